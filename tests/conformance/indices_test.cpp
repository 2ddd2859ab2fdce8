// What a plan says of the lists in its metadata: one entry for each other node, sizes that add up
// to what was sent, and bounds that the sizes keep.

#include <set>

#include <fmt/format.h>

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

using support::require;

class Indices : public Conformance {
 protected:
  Layer layer(std::uint64_t seed) const {
    const RoutingSpec spec{.num_experts = 3 * num_ranks() + 1, .num_topk = 3, .none_share = 0.1};
    return {group(spec.num_experts), make_all_routing(spec, ragged(40), seed)};
  }
};

constexpr std::uint64_t kHeaderBytes = 140;

std::uint64_t varint_bytes(std::uint64_t value) { return value < 128 ? 1 : 2; }

/// Bytes of a plan's messages but for its lists, from the routing alone: headers, rows of every
/// strategy for every node, and of every (token, expert) of other nodes a weight and a slot.
class OtherBytes {
 public:
  OtherBytes(const Group& group, const Routing& routing, int rank) {
    const Topology& topology = group.topology;
    for (int node = 0; node < topology.num_nodes(); ++node) {
      std::uint64_t tokens = 0;
      std::uint64_t ranks = 0;
      std::uint64_t entries = 0;
      for (std::int64_t token = 0; token < routing.num_tokens; ++token) {
        std::set<int> experts;
        std::set<int> on_ranks;
        for (int slot = 0; slot < routing.num_topk; ++slot) {
          const int expert = routing.topk_idx32[token * routing.num_topk + slot];
          if (expert < 0) continue;
          const int of = group.placement.rank_of(expert);
          if (topology.node_of(of) != node) continue;
          experts.insert(expert);
          on_ranks.insert(of);
        }
        tokens += experts.empty() ? 0 : 1;
        ranks += on_ranks.size();
        entries += experts.size();
      }
      summary += varint_bytes(tokens) + varint_bytes(ranks) + varint_bytes(entries);
      if (node != topology.node_of(rank)) remote_entries += entries;
    }
  }

  std::uint64_t summary = 0;  ///< of one message
  std::uint64_t remote_entries = 0;
};

TEST_P(Indices, SizesAddUpToWhatIsSent) {
  const Layer first = layer(1);
  const Layer second = layer(2);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, first.group());
    const Topology& topology = first.group().topology;
    const auto others = static_cast<std::uint64_t>(topology.num_nodes() - 1);
    for (const Layer* one : {&first, &second, &first}) {
      const Routing routing = one->routing(context.rank());
      const TrafficCounters before = context.transport().counters();
      const Plan plan = co_await exchange.start_plan(routing);
      const TrafficCounters after = context.transport().counters();
      const ExchangeOptions& options = exchange.options();
      const OtherBytes other(one->group(), routing, context.rank());
      require(plan.indices().size() == others, "not one entry for each other node");
      std::uint64_t index_bytes = 0;
      int last = -1;
      for (const IndexSummary& index : plan.indices()) {
        require(index.node > last && index.node != topology.node_of(context.rank()),
                "nodes do not ascend, or one of them is the own");
        last = index.node;
        index_bytes += index.bytes;
      }
      require(plan.summary().index_bytes == index_bytes, "index_bytes is not their sum");
      const std::uint64_t entry_bytes =
          (options.weights == WeightMode::none ? 0 : 4) + (options.row_sources ? 1 : 0);
      const std::uint64_t expected = others * (kHeaderBytes + other.summary) + index_bytes +
                                     other.remote_entries * entry_bytes;
      require(plan.summary().metadata_bytes == expected,
              fmt::format("metadata has {} bytes, its parts {}", plan.summary().metadata_bytes,
                          expected));
      require(after.metadata_bytes - before.metadata_bytes == expected, "sent is not planned");
    }
  });
}

TEST_P(Indices, BoundsAreThoseOfTheRouting) {
  const Layer shared = layer(3);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    const Routing routing = shared.routing(context.rank());
    const Plan plan = co_await exchange.start_plan(routing);
    const std::vector<IndexBounds> bounds = exchange.index_bounds(routing);
    require(bounds.size() == plan.indices().size(), "not one entry for each other node");
    for (std::size_t i = 0; i < bounds.size(); ++i) {
      const std::uint64_t bytes = plan.indices()[i].bytes;
      require(bounds[i].best_bytes <= bytes, "the choice beats the best");
      require(static_cast<double>(bytes) <= 1.1 * static_cast<double>(bounds[i].best_bytes) + 1,
              "the choice is more than a tenth above the best");
      require(bounds[i].entropy_bytes > 0 &&
                  bounds[i].entropy_bytes < static_cast<double>(bounds[i].best_bytes),
              "entropy is not between 0 and the best");
    }
    std::vector<std::int32_t> bad(static_cast<std::size_t>(routing.num_topk), 1'000'000);
    bool refused = false;
    try {
      const std::span<const std::int32_t> ids(bad);
      (void)exchange.index_bounds(Routing::of(1, routing.num_topk, ids));
    } catch (const Error& error) {
      refused = error.code() == ErrorCode::invalid_argument;
    }
    require(refused, "an expert that does not exist was taken");
  });
}

// Tokens go to one rank after the other, 32 at a time, and then to any, by turns.
TEST_P(Indices, PlansAreWrittenAsTheirTokensLie) {
  RoutingData in_runs{.num_tokens = 512, .num_topk = 1, .topk_idx = {}, .topk_weights = {}};
  for (int token = 0; token < 512; ++token) {
    in_runs.topk_idx.push_back(4 * (token / 32 % num_ranks()) + token % 4);
  }
  const auto all_ranks = static_cast<std::size_t>(num_ranks());
  const std::vector<RoutingData> same(all_ranks, in_runs);
  const std::vector<std::int64_t> tokens(all_ranks, 512);
  const RoutingSpec spec{.num_experts = 4 * num_ranks(), .num_topk = 1};
  const Layer runs{group(spec.num_experts), same};
  const Layer random{group(spec.num_experts), make_all_routing(spec, tokens, 5)};
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, runs.group());
    for (const Layer* one : {&runs, &random, &runs}) {
      const Plan plan = co_await exchange.start_plan(one->routing(context.rank()));
      for (const IndexSummary& index : plan.indices()) {
        require((index.tokens == ListEncoding::runs) == (one == &runs),
                fmt::format("{} tokens for node {} are {}", one == &runs ? "regular" : "random",
                            index.node, to_string(index.tokens)));
      }
    }
  });
}

std::vector<Point> points() {
  std::vector<Point> result;
  for (const Point& point : mode_points({"1x4", "2x4", "8x1", "3+5"})) {
    if (point.mode.row_alignment == 1 && point.mode.extra_bytes == 0) result.push_back(point);
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(All, Indices, ::testing::ValuesIn(points()), name_of);

}  // namespace
}  // namespace ferry::conformance
