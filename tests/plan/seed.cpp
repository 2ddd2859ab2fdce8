// The main of this test program: GoogleTest's, and --seed=N.

#include "seed.hpp"

#include <cstdlib>
#include <string_view>

#include <gtest/gtest.h>

namespace ferry::test {
namespace {
std::uint64_t seed_of_run = 1;
}  // namespace

std::uint64_t first_seed() { return seed_of_run; }

}  // namespace ferry::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  constexpr std::string_view kOption = "--seed=";
  for (int at = 1; at < argc; ++at) {
    if (std::string_view(argv[at]).substr(0, kOption.size()) != kOption) continue;
    ferry::test::seed_of_run = std::strtoull(argv[at] + kOption.size(), nullptr, 10);
  }
  return RUN_ALL_TESTS();
}
