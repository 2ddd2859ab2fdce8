// The plans come from src/plan exactly as the executor would make them; here they are only added
// up. One rank's plan lives at a time, so that memory does not grow with ranks squared.
#include "planner/estimate.hpp"

#include <algorithm>
#include <array>
#include <limits>

#include "ferry/error.hpp"
#include "wire/headers.hpp"

namespace ferry::planner {
namespace {

std::uint64_t row_bytes(const Scenario& scenario, WireFormat wire) {
  return wire_row_bytes(wire, scenario.model.hidden, scenario.wire_block_columns);
}

plan::Framing framing_of(const Scenario& scenario, WireFormat wire) {
  return plan::make_framing(row_bytes(scenario, wire), wire::kFragmentHeaderBytes, kFragmentBytes);
}

std::size_t as_size(int value) { return static_cast<std::size_t>(value); }

double us_at(double bytes, double gb_per_s) { return bytes / (gb_per_s * 1e3); }

enum Kind : int {
  kInterDispatch,
  kInterCombine,
  kIntraDispatch,
  kIntraCombine,
  kTokenMajor,
  kNumKinds
};

}  // namespace

/// What one rank sends and receives, by kind.
struct Estimator::RankBytes {
  struct Both {
    std::uint64_t rows = 0;  ///< sent
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
  };
  std::array<Both, kNumKinds> of;
  std::vector<std::uint64_t> token_major_to;  ///< rows by place in the node
};

Estimator::Estimator(const Scenario& scenario)
    : scenario_(scenario),
      experts_(scenario.topology, scenario.placement),
      dispatch_framing_(framing_of(scenario, scenario.wire_dispatch)),
      combine_framing_(framing_of(scenario, scenario.wire_combine)),
      row_bytes_(static_cast<std::uint64_t>(scenario.model.hidden) *
                 element_bytes(scenario.model.dtype)),
      range_tokens_(plan::default_range_tokens(dispatch_framing_, combine_framing_)) {
  for (int rank = 0; rank < scenario.num_ranks(); ++rank) {
    const Routing routing = scenario.routing[as_size(rank)].view();
    const auto error = plan::find_routing_error(routing, experts_.num_experts(), rank);
    if (error) throw Error(ErrorCode::invalid_argument, *error);
    of_ranks_.push_back(plan::split_by_node(routing, experts_, scenario.topology));
  }
  for (int node = 0; node < scenario.topology.num_nodes(); ++node) {
    plan::ColumnCounts counts{.num_columns = experts_.num_columns(node), .values = {}};
    for (const std::vector<plan::Membership>& own : of_ranks_) {
      const auto row = plan::count_columns(own[as_size(node)], counts.num_columns);
      counts.values.insert(counts.values.end(), row.begin(), row.end());
    }
    of_nodes_.push_back(std::move(counts));
  }
}

StrategyEstimate Estimator::estimate(Strategy strategy) const {
  const Topology& topology = scenario_.topology;
  const plan::PlanContext context{topology, experts_, strategy, range_tokens_};
  std::vector<RankBytes> ranks;
  std::vector<const plan::Membership*> of_sources(of_ranks_.size());
  for (int rank = 0; rank < topology.num_ranks(); ++rank) {
    const int node = topology.node_of(rank);
    const plan::ColumnCounts& counts = of_nodes_[as_size(node)];
    for (int source = 0; source < topology.num_ranks(); ++source) {
      const bool needed = plan::needs_membership(context, rank, source, counts);
      of_sources[as_size(source)] = needed ? &of_ranks_[as_size(source)][as_size(node)] : nullptr;
    }
    ranks.push_back(bytes_of(
        plan::make_rank_plan(context, rank, of_ranks_[as_size(rank)], of_sources, counts)));
  }
  receive_token_major(ranks);
  StrategyEstimate result;
  result.strategy = strategy;
  result.dispatch = {sum_up(ranks, kInterDispatch), sum_up(ranks, kIntraDispatch)};
  result.combine = {sum_up(ranks, kInterCombine), sum_up(ranks, kIntraCombine)};
  result.intra_node_token_major =
      sum_up(ranks, strategy == Strategy::flat ? kIntraDispatch : kTokenMajor);
  for (const std::vector<plan::Membership>& own : of_ranks_) {
    for (const plan::Membership& membership : own) {
      result.logical_rows_per_rank += static_cast<double>(membership.tokens.size());
    }
  }
  result.logical_rows_per_rank /= static_cast<double>(of_ranks_.size());
  return result;
}

Estimator::RankBytes Estimator::bytes_of(const plan::RankPlan& plan) const {
  RankBytes rank;
  const plan::RankTraffic sent =
      plan::traffic(plan, scenario_.topology, {dispatch_framing_, combine_framing_});
  rank.of[kInterDispatch] = {sent.rows_out, sent.bytes_out, 0};
  rank.of[kInterCombine] = {sent.rows_back, sent.bytes_back, 0};
  // Traffic is what a rank sends; both ends hold the same lane, so what it receives is there, too.
  for (const plan::LanePair& pair : plan.landing) {
    rank.of[kInterDispatch].received += plan::lane_bytes(pair.dispatch, dispatch_framing_);
  }
  for (const plan::LanePair& pair : plan.outgoing) {
    rank.of[kInterCombine].received += plan::lane_bytes(pair.back(), combine_framing_);
  }
  const int self = scenario_.topology.local_index(plan.rank);
  RankBytes::Both& pushed = rank.of[kIntraDispatch];
  for (std::size_t place = 0; place < plan.rows_to.size(); ++place) {
    if (place == as_size(self)) continue;  // a copy in the rank's own memory
    pushed.rows += plan.rows_to[place];
    pushed.sent += plan.rows_to[place] * row_bytes_;
    pushed.received += plan.rows_from[place] * row_bytes_;
    rank.of[kIntraCombine].rows += plan.rows_from[place];
  }
  // Combine pulls what dispatch pushed: the same rows, the other way.
  rank.of[kIntraCombine].sent = pushed.received;
  rank.of[kIntraCombine].received = pushed.sent;
  count_token_major(plan, rank);
  return rank;
}

/// Rows to each rank of the node when a token goes there once, however many of its experts it has.
void Estimator::count_token_major(const plan::RankPlan& plan, RankBytes& rank) const {
  std::vector<std::uint64_t>& rows = rank.token_major_to;
  rows.assign(plan.rows_to.size(), 0);
  std::vector<std::uint64_t> last_item(rows.size());  // the item, from 1, that last went there
  std::uint64_t item = 0;
  const auto add = [&](const std::vector<plan::Target>& targets, std::uint32_t begin,
                       std::uint32_t end) {
    ++item;
    for (std::uint32_t at = begin; at < end; ++at) {
      const std::uint32_t place = targets[at].local_rank;
      rows[place] += last_item[place] == item ? 0 : 1;
      last_item[place] = item;
    }
  };
  for (std::size_t token = 0; token + 1 < plan.home_begin.size(); ++token) {
    add(plan.home_targets, plan.home_begin[token], plan.home_begin[token + 1]);
  }
  for (const plan::LanePair& pair : plan.landing) {
    const std::vector<std::uint32_t>& begin = pair.dispatch.target_begin;
    for (std::size_t at = 0; at + 1 < begin.size(); ++at) {
      add(pair.dispatch.targets, begin[at], begin[at + 1]);
    }
  }
  rows[as_size(scenario_.topology.local_index(plan.rank))] = 0;  // a copy in its own memory
  for (const std::uint64_t count : rows) {
    rank.of[kTokenMajor].rows += count;
    rank.of[kTokenMajor].sent += count * row_bytes_;
  }
}

void Estimator::receive_token_major(std::vector<RankBytes>& ranks) const {
  for (int rank = 0; rank < scenario_.topology.num_ranks(); ++rank) {
    const std::vector<int>& peers = scenario_.topology.ranks_of(scenario_.topology.node_of(rank));
    for (std::size_t place = 0; place < peers.size(); ++place) {
      ranks[as_size(peers[place])].of[kTokenMajor].received +=
          ranks[as_size(rank)].token_major_to[place] * row_bytes_;
    }
  }
}

Flow Estimator::sum_up(const std::vector<RankBytes>& ranks, int kind) const {
  const Topology& topology = scenario_.topology;
  const Cluster& cluster = scenario_.cluster;
  Flow flow;
  std::vector<RankBytes::Both> of_node(as_size(topology.num_nodes()));
  for (int rank = 0; rank < topology.num_ranks(); ++rank) {
    const RankBytes::Both& bytes = ranks[as_size(rank)].of[as_size(kind)];
    flow.rows += bytes.rows;
    flow.bytes += bytes.sent;
    const std::uint64_t most = std::max(bytes.sent, bytes.received);
    if (most > flow.worst_bytes) {
      flow.worst_bytes = most;
      flow.worst_rank = rank;
    }
    RankBytes::Both& node = of_node[as_size(topology.node_of(rank))];
    node.sent += bytes.sent;
    node.received += bytes.received;
  }
  flow.mean_bytes = static_cast<double>(flow.bytes) / topology.num_ranks();
  const bool inside = kind >= kIntraDispatch;
  std::uint64_t fullest = flow.worst_bytes;
  if (!inside && cluster.link_per == LinkPer::node) {
    for (const RankBytes::Both& node : of_node) {
      fullest = std::max({fullest, node.sent, node.received});
    }
  }
  flow.bound_us = us_at(static_cast<double>(fullest),
                        inside ? cluster.intra_node_gb_per_s : cluster.link_gb_per_s);
  return flow;
}

double logical_gb_per_s(const Scenario& scenario, const StrategyEstimate& estimate, Call call,
                        double us) {
  const WireFormat wire = call == Call::dispatch ? scenario.wire_dispatch : scenario.wire_combine;
  const double bytes =
      estimate.logical_rows_per_rank * static_cast<double>(row_bytes(scenario, wire));
  return us > 0 ? bytes / (us * 1e3) : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace ferry::planner
