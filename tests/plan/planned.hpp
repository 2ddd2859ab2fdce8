#pragma once
// Plans of random worlds with what the oracle says of them; the loop of all property tests. A
// failure names its seed: `plan_test --gtest_filter=PlanProperty.* --seed=N` runs that world first.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "oracle.hpp"
#include "plan/rank_plan.hpp"
#include "seed.hpp"
#include "worlds.hpp"

namespace ferry::test {

inline constexpr int kNumWorlds = 200;

struct Planned {
  World world;
  Topology topology;
  plan::ExpertIndex experts;
  std::vector<plan::RankPlan> plans;
  Oracle oracle;

  Planned(World made, Strategy strategy, std::uint64_t range_tokens)
      : world(std::move(made)),
        topology(world.topology()),
        experts(topology, world.placement()),
        plans(plan::make_all_plans({topology, experts, strategy, range_tokens}, world.routing())),
        oracle(make_oracle(world, to_string(strategy))) {}
};

/// Calls check(planned) for many worlds, all strategies, and ranges from one token to all of them.
template <typename Check>
void for_each_world(const Check& check) {
  std::cout << "seeds from " << first_seed() << '\n';
  for (std::uint64_t seed = first_seed(); seed < first_seed() + kNumWorlds; ++seed) {
    const World world = random_world(seed);
    for (const plan::StrategyInfo& strategy : plan::strategies()) {
      const std::uint64_t range_tokens = std::vector<std::uint64_t>{1, 3, 16, 1000}[seed % 4];
      SCOPED_TRACE(fmt::format("--seed={} {}, range_tokens {}: {}", seed, strategy.name,
                               range_tokens, world.describe()));
      check(Planned(world, strategy.id, range_tokens));
      if (testing::Test::HasFailure()) return;  // one world says enough
    }
  }
}

/// A target of a plan in the words of the oracle: the expert from the row and the offsets.
inline OracleTarget as_oracle(const Planned& planned, int node, const plan::Target& target) {
  const int rank = planned.topology.ranks_of(node)[target.local_rank];
  const auto& offsets = planned.plans[static_cast<std::size_t>(rank)].expert_offsets;
  const auto row = static_cast<std::int64_t>(target.row);
  const auto above = std::upper_bound(offsets.begin(), offsets.end(), row);
  EXPECT_TRUE(above != offsets.begin() && above != offsets.end()) << "row " << row;
  if (above == offsets.begin() || above == offsets.end()) return {};
  const auto local = static_cast<std::size_t>(above - offsets.begin()) - 1;
  return {rank, planned.experts.experts_of_rank(rank)[local], target.weight, row};
}

}  // namespace ferry::test
