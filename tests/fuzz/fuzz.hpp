#pragma once
// What the fuzz targets share. A target is one .cpp that defines `run` and `seeds`, and one line in
// CMakeLists.txt.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace ferry::fuzz {

using Input = std::span<const std::byte>;

/// An input to begin with: a message as a peer sends it, or close to one.
struct Seed {
  std::string name;
  std::vector<std::byte> bytes;
};

/// Of the target: one input. Whatever it is, this returns.
void run(Input input);
/// Of the target: what tests/fuzz/seeds/TARGET holds, at least.
std::vector<Seed> seeds();

/// Ends the process, so that the fuzzer keeps the input, unless `good`.
void require(bool good, const std::string& what);

}  // namespace ferry::fuzz
