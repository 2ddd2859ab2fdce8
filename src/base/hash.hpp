#pragma once
// Mixing of 64-bit numbers, for fingerprints and for rows that tests can make anywhere.

#include <cstdint>

namespace ferry::base {

/// A bijection that spreads every input bit over the result.
/// Source: the finaliser of splitmix64 (Steele, Lea, Flood, 2014)
constexpr std::uint64_t mix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

constexpr std::uint64_t combine_hash(std::uint64_t a, std::uint64_t b) {
  return mix64(a ^ mix64(b));
}

}  // namespace ferry::base
