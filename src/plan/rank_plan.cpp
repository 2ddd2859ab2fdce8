// The plan of one rank. Rows of a window are ordered by (expert, source, token), so the first row
// of (expert, source) is a prefix sum over the counts; it is carried along while the sources are
// visited in ascending order, which needs one number per column and no table per source.

#include "plan/rank_plan.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/check.hpp"
#include "plan/as_size.hpp"
#include "plan/lanes.hpp"
#include "plan/memory.hpp"

namespace ferry::plan {
namespace {

int num_local_experts(const ExpertIndex& experts, int rank) {
  return static_cast<int>(experts.experts_of_rank(rank).size());
}

std::uint64_t aligned(std::uint64_t row, std::uint64_t alignment) {
  return (row + alignment - 1) / alignment * alignment;
}

/// Rows of a source for the experts of one rank.
std::uint64_t rows_for(const PlanContext& context, int rank, int source,
                       const ColumnCounts& counts) {
  std::uint64_t rows = 0;
  const int first = context.experts.first_column(rank);
  const int end = first + num_local_experts(context.experts, rank);
  for (int column = first; column < end; ++column) rows += counts.at(source, column);
  return rows;
}

/// Next free row of every column of a node, source by source.
class RowPlaces {
 public:
  RowPlaces(const PlanContext& context, int node, const ColumnCounts& counts)
      : counts_(counts), first_(as_size(counts.num_columns)) {
    std::vector<std::uint64_t> totals(first_.size());
    for (int source = 0; source < context.topology.num_ranks(); ++source) {
      for (int column = 0; column < counts.num_columns; ++column) {
        totals[as_size(column)] += counts.at(source, column);
      }
    }
    for (const int rank : context.topology.ranks_of(node)) {
      std::uint64_t row = 0;  // each rank has its own window
      const std::size_t first = as_size(context.experts.first_column(rank));
      const std::size_t end = first + as_size(num_local_experts(context.experts, rank));
      for (std::size_t column = first; column < end; ++column) {
        first_[column].local_rank = static_cast<std::uint32_t>(context.topology.local_index(rank));
        first_[column].row = row;
        row = aligned(row + totals[column], context.row_alignment);
      }
    }
  }

  /// A cursor over the rows of the current source; the one before it is no longer valid.
  RowCursor cursor() {
    next_ = first_;
    return {next_};
  }

  /// True when the last cursor took all rows of `source` in `columns` columns from `first` on.
  bool used_up(int source, int first, int columns) const {
    for (int column = first; column < first + columns; ++column) {
      const std::size_t at = as_size(column);
      if (next_[at].row != first_[at].row + counts_.at(source, column)) return false;
    }
    return true;
  }

  void advance_past(int source) {
    for (int column = 0; column < counts_.num_columns; ++column) {
      first_[as_size(column)].row += counts_.at(source, column);
    }
  }

 private:
  const ColumnCounts& counts_;
  std::vector<Target> first_;  ///< of the current source, per column
  std::vector<Target> next_;
};

void set_window(const PlanContext& context, const ColumnCounts& counts, RankPlan& plan) {
  const int first = context.experts.first_column(plan.rank);
  const int num_experts = num_local_experts(context.experts, plan.rank);
  plan.expert_counts.assign(as_size(num_experts), 0);
  for (int source = 0; source < context.topology.num_ranks(); ++source) {
    for (int expert = 0; expert < num_experts; ++expert) {
      plan.expert_counts[as_size(expert)] += counts.at(source, first + expert);
    }
  }
  plan.expert_offsets.assign(1, 0);
  plan.expert_offsets.reserve(as_size(num_experts) + 1);
  for (const std::int64_t count : plan.expert_counts) {
    const auto end = static_cast<std::uint64_t>(plan.expert_offsets.back() + count);
    plan.expert_offsets.push_back(static_cast<std::int64_t>(aligned(end, context.row_alignment)));
  }
}

// Entries of the own membership are the targets, in the same order.
void add_home(const Membership& own, RowCursor cursor, RankPlan& plan) {
  resize_for_overwrite(plan.home_begin, plan.num_tokens + 1);
  std::size_t i = 0;
  for (std::uint64_t token = 0; token < plan.num_tokens; ++token) {
    plan.home_begin[token] = own.entry_begin[i];
    i += i < own.tokens.size() && own.tokens[i] == token ? 1 : 0;
  }
  plan.home_begin[plan.num_tokens] = own.entry_begin[i];

  resize_for_overwrite(plan.home_targets, own.num_entries());
  for (std::size_t at = 0; at < own.num_entries(); ++at) {
    plan.home_targets[at] = cursor.take(own.columns[at], own.weights[at]);
  }
}

/// Adds the rows of one source to what the ranks of this node write into each other's windows.
void add_row_flow(const PlanContext& context, int source, const ColumnCounts& counts,
                  RankPlan& plan) {
  const Topology& topology = context.topology;
  const int node = topology.node_of(plan.rank);
  const bool at_home = topology.node_of(source) == node;
  const auto self = as_size(topology.local_index(plan.rank));
  const std::uint64_t to_self = rows_for(context, plan.rank, source, counts);
  if (!at_home && !lands_on_rail(info(context.strategy))) {
    // Rows of other nodes land where their expert is: every rank writes its own.
    plan.rows_from[self] += to_self;
    plan.rows_to[self] += to_self;
    return;
  }
  const int writer = topology.rail_rank(source, node);
  plan.rows_from[as_size(topology.local_index(writer))] += to_self;
  if (writer != plan.rank) return;
  for (const int rank : topology.ranks_of(node)) {
    plan.rows_to[as_size(topology.local_index(rank))] += rows_for(context, rank, source, counts);
  }
}

void check_inputs(const PlanContext& context, const KnownRouting& routing) {
  const Topology& topology = context.topology;
  const ColumnCounts& counts = routing.counts;
  const auto num_ranks = as_size(topology.num_ranks());
  FERRY_ASSERT(context.range_tokens > 0, "a range has at least one token");
  FERRY_ASSERT(context.row_alignment > 0, "rows are aligned to at least one row");
  FERRY_ASSERT(routing.own.size() == as_size(topology.num_nodes()), "{} memberships for {} nodes",
               routing.own.size(), topology.num_nodes());
  FERRY_ASSERT(routing.of_sources.size() == num_ranks, "{} sources for {} ranks",
               routing.of_sources.size(), num_ranks);
  FERRY_ASSERT(counts.values.size() == num_ranks * as_size(counts.num_columns),
               "{} counts for {} ranks x {} columns", counts.values.size(), num_ranks,
               counts.num_columns);
}

/// Sets what is not made further down.
void begin_plan(const PlanContext& context, int rank, std::uint64_t num_tokens, RankPlan& plan) {
  plan.rank = rank;
  plan.strategy = context.strategy;
  plan.num_tokens = num_tokens;
  plan.range_tokens = context.range_tokens;
  const int node = context.topology.node_of(rank);
  plan.rows_from.assign(context.topology.ranks_of(node).size(), 0);
  plan.rows_to.assign(context.topology.ranks_of(node).size(), 0);
}

void make_outgoing(const PlanContext& context, int rank, std::span<const Membership> own,
                   std::vector<LanePair>& outgoing) {
  LaneList lanes(outgoing);
  for (int node = 0; node < context.topology.num_nodes(); ++node) {
    if (node == context.topology.node_of(rank)) continue;
    add_outgoing({context, rank, node, own[as_size(node)]}, lanes);
  }
  lanes.end();
}

std::uint64_t memory_bytes(const Lane& lane) {
  return capacity_bytes(lane.tokens, lane.range_begin, lane.target_begin, lane.targets,
                        lane.weights);
}

std::uint64_t memory_bytes(const std::vector<LanePair>& lanes) {
  std::uint64_t bytes = capacity_bytes(lanes);
  for (const LanePair& pair : lanes) {
    bytes += memory_bytes(pair.dispatch) + memory_bytes(pair.values) + capacity_bytes(pair.combine);
    for (const Lane& lane : pair.combine) bytes += memory_bytes(lane);
  }
  return bytes;
}

ColumnCounts count_node(const PlanContext& context, int node,
                        const std::vector<std::vector<Membership>>& of_ranks) {
  ColumnCounts counts{.num_columns = context.experts.num_columns(node), .values = {}};
  counts.values.reserve(of_ranks.size() * as_size(counts.num_columns));
  for (const std::vector<Membership>& own : of_ranks) {
    const std::vector<std::uint32_t> row = count_columns(own[as_size(node)], counts.num_columns);
    counts.values.insert(counts.values.end(), row.begin(), row.end());
  }
  return counts;
}

}  // namespace

bool needs_membership(const PlanContext& context, int rank, int source,
                      const ColumnCounts& counts) {
  if (rank == source) return true;
  const Topology& topology = context.topology;
  if (topology.same_node(rank, source)) return false;
  if (lands_on_rail(info(context.strategy))) {
    return topology.rail_rank(source, topology.node_of(rank)) == rank;
  }
  return rows_for(context, rank, source, counts) > 0;
}

std::uint64_t memory_bytes(const RankPlan& plan) {
  return capacity_bytes(plan.home_begin, plan.home_targets, plan.expert_counts, plan.expert_offsets,
                        plan.rows_from, plan.rows_to) +
         memory_bytes(plan.outgoing) + memory_bytes(plan.landing);
}

RankPlan make_rank_plan(const PlanContext& context, int rank, std::span<const Membership> own,
                        std::span<const Membership* const> of_sources, const ColumnCounts& counts) {
  RankPlan plan;
  make_rank_plan(context, rank, {own, of_sources, counts}, plan);
  return plan;
}

void make_rank_plan(const PlanContext& context, int rank, const KnownRouting& routing,
                    RankPlan& plan) {
  check_inputs(context, routing);
  const Topology& topology = context.topology;
  const int home = topology.node_of(rank);
  const ColumnCounts& counts = routing.counts;
  FERRY_ASSERT(counts.num_columns == context.experts.num_columns(home),
               "counts of {} columns for node {}, which has {}", counts.num_columns, home,
               context.experts.num_columns(home));
  const Membership& own = routing.own[as_size(home)];
  begin_plan(context, rank, own.num_tokens, plan);
  set_window(context, counts, plan);

  RowPlaces places(context, home, counts);
  LaneList landing(plan.landing);
  for (int source = 0; source < topology.num_ranks(); ++source) {
    add_row_flow(context, source, counts, plan);
    if (source == rank) {
      add_home(own, places.cursor(), plan);
      FERRY_ASSERT_SLOW(places.used_up(source, 0, counts.num_columns),
                        "the counts of rank {} differ from its membership", source);
    } else if (needs_membership(context, rank, source, counts)) {
      const Membership* membership = routing.of_sources[as_size(source)];
      FERRY_ASSERT(membership != nullptr, "rank {} needs the membership of rank {}", rank, source);
      add_landing({context, source, home, *membership}, rank, places.cursor(), landing);
      FERRY_ASSERT_SLOW(places.used_up(source, context.experts.first_column(rank),
                                       num_local_experts(context.experts, rank)),
                        "the counts of rank {} differ from its membership", source);
    }
    places.advance_past(source);
  }
  landing.end();
  make_outgoing(context, rank, routing.own, plan.outgoing);
}

std::vector<LanePair> make_outgoing(const PlanContext& context, int rank,
                                    std::span<const Membership> own) {
  std::vector<LanePair> outgoing;
  make_outgoing(context, rank, own, outgoing);
  return outgoing;
}

std::vector<LanePair> make_gather_lanes(const PlanContext& context, int rank,
                                        std::uint64_t num_tokens) {
  FERRY_ASSERT(info(context.strategy).sends_every_token, "strategy {} waits for routing",
               info(context.strategy).name);
  // No token has an expert anywhere, as far as is known: all of them go out.
  Membership unknown;
  unknown.num_tokens = num_tokens;
  const std::vector<Membership> own(as_size(context.topology.num_nodes()), unknown);
  return make_outgoing(context, rank, own);
}

std::vector<RankPlan> make_all_plans(const PlanContext& context, std::span<const Routing> routing) {
  const Topology& topology = context.topology;
  const auto num_ranks = as_size(topology.num_ranks());
  FERRY_ASSERT(routing.size() == num_ranks, "{} routings for {} ranks", routing.size(), num_ranks);
  std::vector<std::vector<Membership>> of_ranks;
  of_ranks.reserve(num_ranks);
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    const auto error =
        find_routing_error(routing[rank], context.experts.num_experts(), static_cast<int>(rank));
    if (error) throw Error(ErrorCode::invalid_argument, *error);
    of_ranks.push_back(split_by_node(routing[rank], context.experts, topology));
  }

  std::vector<RankPlan> plans(num_ranks);
  std::vector<const Membership*> of_sources(num_ranks);
  for (int node = 0; node < topology.num_nodes(); ++node) {
    const ColumnCounts counts = count_node(context, node, of_ranks);
    for (const int rank : topology.ranks_of(node)) {
      for (std::size_t source = 0; source < num_ranks; ++source) {
        const bool needed = needs_membership(context, rank, static_cast<int>(source), counts);
        of_sources[source] = needed ? &of_ranks[source][as_size(node)] : nullptr;
      }
      plans[as_size(rank)] =
          make_rank_plan(context, rank, of_ranks[as_size(rank)], of_sources, counts);
    }
  }
  return plans;
}

}  // namespace ferry::plan
