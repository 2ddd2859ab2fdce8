// Random programs on the stepped transport, by seed. `--seed N` replays one seed, `--seeds N` runs
// the first N (default 1,000). Then a small program in which every rank cancels its call at every
// step there is.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

#include "conformance/sweep_case.hpp"

namespace ferry::conformance {
namespace {

struct Range {
  std::uint64_t first = 1;
  std::uint64_t count = 1000;
};
Range range_of_seeds;

TEST(Sweep, EverySeedGivesTheOraclesRowsOrTheReason) {
  std::uint64_t cancelled = 0;
  std::uint64_t most_ahead = 0;
  for (std::uint64_t i = 0; i < range_of_seeds.count; ++i) {
    const SweepCase sweep = draw_case(range_of_seeds.first + i);
    const ProgramResult result = run_case(sweep);
    ASSERT_TRUE(result.ok()) << sweep.describe() << result.describe();
    cancelled += result.injected ? 1 : 0;
    most_ahead = std::max(most_ahead, result.calls_ahead);
  }
  if (range_of_seeds.count < 200) return;
  // The sweep itself must be worth something: calls were cancelled, ranks ran ahead of others.
  EXPECT_GT(cancelled, range_of_seeds.count / 10);
  EXPECT_GE(most_ahead, 2U);
}

TEST(Sweep, OneSeedIsOneProgram) {
  for (const std::uint64_t seed : {3, 4, 5}) {
    const ProgramResult a = run_case(draw_case(seed));
    const ProgramResult b = run_case(draw_case(seed));
    EXPECT_EQ(a.steps, b.steps) << "seed " << seed;
  }
}

class Cancelling : public ::testing::TestWithParam<Strategy> {};

TEST_P(Cancelling, AtEveryStepEndsEveryCall) {
  for (const Topology& topology : {Topology::from_sizes({1, 2}), Topology::uniform(2, 2)}) {
    const SweepCase undisturbed = small_case(GetParam(), topology);
    const ProgramResult plain = run_case(undisturbed);
    ASSERT_TRUE(plain.ok()) << plain.describe();
    for (int rank = 0; rank < topology.num_ranks(); ++rank) {
      for (std::uint64_t step = 1; step < plain.steps; ++step) {
        SweepCase sweep = undisturbed;
        sweep.program.injection = support::Injection{step, rank, "given up on purpose"};
        const ProgramResult result = run_case(sweep);
        ASSERT_TRUE(result.ok()) << fmt::format("rank {} cancels at step {} of {} on {}\n", rank,
                                                step, plain.steps, topology.describe())
                                 << result.describe();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, Cancelling,
                         ::testing::Values(Strategy::flat, Strategy::rank_dedup,
                                           Strategy::node_gather, Strategy::node_dedup),
                         [](const auto& strategy) {
                           return std::string(to_string(strategy.param));
                         });

}  // namespace

bool read_arguments(int argc, char** argv) {
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    if (i + 1 == argc || (name != "--seed" && name != "--seeds")) {
      std::fprintf(stderr, "unknown argument %s; allowed: --seed N (one seed), --seeds N (how "
                           "many)\n", argv[i]);
      return false;
    }
    const std::uint64_t value = std::strtoull(argv[i + 1], nullptr, 10);
    range_of_seeds = name == "--seed" ? Range{value, 1} : Range{range_of_seeds.first, value};
  }
  return true;
}

}  // namespace ferry::conformance

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (!ferry::conformance::read_arguments(argc, argv)) return 2;
  return RUN_ALL_TESTS();
}
