#pragma once
// How a plan's metadata names tokens and experts to another node. docs/wire-formats.md has the
// bytes, and where the choice matters.

#include <array>
#include <cstdint>
#include <string_view>

namespace ferry {

/// Of a list of tokens, or of the experts of each of them.
enum class ListEncoding : std::uint8_t {
  raw = 0,      ///< numbers of whole bytes
  bitmask = 1,  ///< one bit for each that could be named
  packed = 2,   ///< coordinates (COO), in as many bits as they need
  runs = 3,     ///< lengths of runs
};
inline constexpr std::array kListEncodings{ListEncoding::raw, ListEncoding::bitmask,
                                           ListEncoding::packed, ListEncoding::runs};
/// "raw", "bitmask", "packed" or "runs".
std::string_view to_string(ListEncoding encoding);

/// How the membership for one other node was written, chosen before it was.
struct IndexSummary {
  int node = 0;
  ListEncoding tokens = ListEncoding::raw;
  ListEncoding experts = ListEncoding::raw;
  std::uint64_t bytes = 0;  ///< of both lists and what says how they are written
};

/// What the same lists could have taken.
struct IndexBounds {
  std::uint64_t best_bytes = 0;  ///< with the encodings that turn out to be the smallest
  double entropy_bytes = 0;      ///< docs/wire-formats.md says of what
};

}  // namespace ferry
