#pragma once
// What a plan says about the rows of a window, one by one.

#include <cstdint>
#include <vector>

namespace ferry {

/// Where the rows of a window come from, one value per row. Alignment rows have rank, token and
/// slot -1 and weight 0.
struct RowSources {
  std::vector<std::int32_t> rank;
  std::vector<std::int64_t> token;   ///< of that rank
  std::vector<std::int32_t> slot;    ///< first one that names the expert; empty with token_major
  /// Summed over those slots, 1 with weights none; empty with token_major.
  std::vector<float> weight;
};

}  // namespace ferry
