#pragma once
// The seed of property tests: `--seed=N` on the command line, else 1, so that a run repeats.

#include <cstdint>

namespace ferry::test {

std::uint64_t first_seed();

}  // namespace ferry::test
