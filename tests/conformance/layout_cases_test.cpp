// Cases about what the rows of a window are and who applies weights: every layout and weight mode
// of every strategy, with and without alignment rows, extra bytes and row sources. Everything that
// a plan says about its rows is checked, and every plan is replayed with new rows.

#include <limits>

#include <fmt/format.h>

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

using support::WeightKind;

class Layouts : public Conformance {
 protected:
  /// The modes at this point: alignment exists for expert_major rows only.
  std::vector<Mode> variants() const {
    Mode plain = GetParam().mode;
    Mode extended = plain;
    extended.extra_bytes = 12;
    std::vector<Mode> result{plain, extended};
    if (plain.layout == Layout::token_major) return result;
    plain.row_alignment = extended.row_alignment = 16;
    plain.row_sources = extended.row_sources = true;
    result.push_back(plain);
    result.push_back(extended);
    return result;
  }
  /// The variant with everything there is, for cases where one says enough.
  Mode richest() const { return variants().back(); }

  Layer layer(const RoutingSpec& spec, const Mode& mode, std::uint64_t seed) const {
    return {with_mode(group(spec.num_experts), mode), make_all_routing(spec, ragged(6), seed)};
  }
};

TEST_P(Layouts, GapsRepeatsAndOddWeights) {
  // -1 slots, experts named again in the next slot or later, weights of 0, below 0 and subnormal.
  const RoutingSpec spec{.num_experts = 3 * num_ranks() + 1,
                         .num_topk = 5,
                         .none_share = 0.2,
                         .repeat_share = 0.4,
                         .weights = WeightKind::odd};
  std::uint64_t seed = 3;
  for (const Mode& mode : variants()) {
    SCOPED_TRACE(to_string(mode));
    run(layer(spec, mode, ++seed), {.uses = 3, .seed = seed});
  }
}

TEST_P(Layouts, ManyExpertsOfARankPerToken) {
  // Two experts a rank and as many slots as experts: a token_major row has several outputs to sum.
  const RoutingSpec spec{.num_experts = 2 * num_ranks(), .num_topk = 2 * num_ranks()};
  run(layer(spec, richest(), 11), {.y = OutputPlace::plain, .uses = 3, .seed = 11});
}

TEST_P(Layouts, NoTokensOnSomeRanks) {
  const RoutingSpec spec{.num_experts = 2 * num_ranks() + 1, .num_topk = 3, .none_share = 0.1};
  std::vector<std::int64_t> tokens = ragged(5);
  tokens.front() = 0;
  tokens[tokens.size() / 2] = 0;
  run({with_mode(group(spec.num_experts), richest()), make_all_routing(spec, tokens, 13)},
      {.y = OutputPlace::dispatched_rows, .uses = 3, .seed = 13});
}

TEST_P(Layouts, FewerExpertsThanRanks) {
  // Weights are not given: each slot counts 1 / num_topk, a repeated one twice that.
  const RoutingSpec spec{
      .num_experts = 3, .num_topk = 2, .repeat_share = 0.3, .weights = WeightKind::none};
  Layer few = layer(spec, richest(), 17);
  run(few, {.uses = 3, .seed = 17});
  Group scattered = few.group();
  scattered.placement = Placement::from_map({num_ranks() - 1, 0, num_ranks() - 1});
  run({scattered, make_all_routing(spec, ragged(4), 18)}, {.uses = 3, .seed = 18});
}

TEST_P(Layouts, EveryTokenToOneExpertOrNone) {
  RoutingSpec spec{.num_experts = num_ranks() + 1, .num_topk = 3, .all_to_first = true};
  run(layer(spec, richest(), 19), {.uses = 3, .seed = 19});
  spec.all_to_first = false;
  spec.none_share = 1;
  run(layer(spec, richest(), 20), {.uses = 3, .seed = 20});
}

TEST_P(Layouts, WeightsThatAreZeroOrNegativeStillCount) {
  const RoutingSpec spec{.num_experts = 2 * num_ranks(), .num_topk = 3, .repeat_share = 0.3};
  Layer odd = layer(spec, richest(), 23);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    constexpr float kWeights[] = {0.0F, -0.5F, -0.0F, std::numeric_limits<float>::denorm_min()};
    std::size_t i = static_cast<std::size_t>(rank);
    for (float& weight : odd.data(rank).topk_weights) weight = kWeights[++i % 4];
  }
  run(odd, {.uses = 3, .seed = 23});
}

INSTANTIATE_TEST_SUITE_P(Matrix, Layouts,
                         ::testing::ValuesIn(mode_points({"1x8", "2x4", "8x1", "3+5"})), name_of);

}  // namespace
}  // namespace ferry::conformance
