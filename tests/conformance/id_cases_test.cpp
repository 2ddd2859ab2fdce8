// Cases about what a router may say: repeated experts, -1, weights that are zero or tiny, tokens
// that hold Inf or NaN, everything to one expert, experts anywhere. At every point of the matrix.

#include <cmath>
#include <limits>

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

using support::WeightKind;

class Ids : public Conformance {
 protected:
  void run_spec(const RoutingSpec& spec) const {
    run(Layer(group(spec.num_experts), make_all_routing(spec, ragged(12), 17)));
  }
  int some_experts() const { return 2 * num_ranks() + 1; }
};

TEST_P(Ids, RepeatedExpertIsOneRowAndItsWeightsAdd) {
  // [3, 3, 7] adjacent, [3, 7, 3] apart, [3, 3, 3] alone, then at random.
  std::vector<RoutingData> routing;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    routing.push_back({3, 3, {3, 3, 7, 3, 7, 3, 3, 3, 3},
                       {.1F, .2F, .3F, .4F, .5F, .6F, .7F, .8F, .9F}});
  }
  run(Layer(group(8), routing));
  run_spec({.num_experts = some_experts(), .num_topk = 5, .repeat_share = 0.5});
  run_spec({.num_experts = some_experts(), .num_topk = 5, .repeat_share = 0.5,
            .weights = WeightKind::none});
}

TEST_P(Ids, TokensWithoutExpertsAreZero) {
  run_spec({.num_experts = some_experts(), .num_topk = 2, .none_share = 1.0});
  run_spec({.num_experts = some_experts(), .num_topk = 3, .none_share = 0.5});
}

TEST_P(Ids, ZeroSubnormalAndNegativeWeightsCount) {
  run_spec({.num_experts = some_experts(), .num_topk = 4, .weights = WeightKind::odd});
}

TEST_P(Ids, InfAndNanStayInTheirToken) {
  const RoutingSpec spec{.num_experts = some_experts(), .num_topk = 3};
  Layer layer(group(spec.num_experts), make_all_routing(spec, ragged(12), 19));
  const float infinity = std::numeric_limits<float>::infinity();
  layer.special_rows = {{0, 1, infinity}, {0, 4, std::nanf("")}, {num_ranks() - 1, 2, -infinity}};
  run(layer);
}

TEST_P(Ids, AllTokensToOneExpert) {
  run_spec({.num_experts = some_experts(), .num_topk = 1, .all_to_first = true});
  run_spec({.num_experts = some_experts(), .num_topk = 4, .all_to_first = true});
}

TEST_P(Ids, SkewedRouting) {
  run_spec({.num_experts = some_experts(), .num_topk = 3, .zipf = 1.5, .none_share = 0.1,
            .repeat_share = 0.1});
}

TEST_P(Ids, WideIds) {
  // 64-bit ids give what 32-bit ids give.
  const RoutingSpec spec{.num_experts = some_experts(), .num_topk = 3, .none_share = 0.2};
  const Layer layer(group(spec.num_experts), make_all_routing(spec, ragged(9), 23));
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, layer.group());
    RankLayer memory(context, layer, 29);
    const Routing narrow = memory.routing();
    const std::vector<std::int64_t> wide(narrow.topk_idx32.begin(), narrow.topk_idx32.end());
    const Plan plan = co_await exchange.start_plan(
        Routing::of(narrow.num_tokens, narrow.num_topk, std::span(wide), narrow.topk_weights));
    memory.check_plan(plan);
    co_await use_plan(context, exchange, plan, memory, {.y = OutputPlace::window});
  });
}

TEST_P(Ids, OnlyTheFirstTokensAreRead) {
  // Buffers may be longer than num_tokens says; what lies behind is not even valid.
  const RoutingSpec spec{.num_experts = some_experts(), .num_topk = 2};
  std::vector<RoutingData> routing = make_all_routing(spec, ragged(7), 31);
  for (RoutingData& data : routing) {
    data.topk_idx.insert(data.topk_idx.end(), {1 << 30, -77});
    data.topk_weights.insert(data.topk_weights.end(), {std::nanf(""), std::nanf("")});
  }
  run(Layer(group(spec.num_experts), routing));
}

TEST_P(Ids, FewerExpertsThanRanksAndScatteredOnes) {
  run_spec({.num_experts = 1, .num_topk = 1});
  if (num_ranks() > 2) run_spec({.num_experts = num_ranks() - 2, .num_topk = 2});
  // Any map: neighbours apart, shares uneven, some ranks without an expert.
  const int num_experts = 13;
  std::vector<int> rank_of_expert;
  for (int e = 0; e < num_experts; ++e) rank_of_expert.push_back((e * e + 3) % num_ranks());
  const RoutingSpec spec{.num_experts = num_experts, .num_topk = 4, .none_share = 0.1};
  Group scattered = group(num_experts);
  scattered.placement = Placement::from_map(rank_of_expert);
  run(Layer(scattered, make_all_routing(spec, ragged(11), 37)));
}

INSTANTIATE_TEST_SUITE_P(Matrix, Ids, ::testing::ValuesIn(all_points()), name_of);

}  // namespace
}  // namespace ferry::conformance
