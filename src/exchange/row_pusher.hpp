#pragma once
// A batch of rows to be copied, each to one or more places; its memory is reused from batch to
// batch.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/transport.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::detail {

/// Bytes pushed between two looks at the network: long enough to hide the look, short enough that a
/// link does not run dry meanwhile.
inline constexpr std::uint64_t kPushBytesPerStep = 1U << 20U;

class RowPusher {
 public:
  void clear() {
    rows_.clear();
    targets_.clear();
  }
  std::size_t num_targets() const { return targets_.size(); }
  /// Adds a place for the row that `add_row` names next.
  void add_target(std::byte* target) { targets_.push_back(target); }
  /// The targets added since the last row are those of this one; without any it is left out.
  void add_row(const std::byte* row) {
    const std::uint32_t first = rows_.empty() ? 0 : rows_.back().first + rows_.back().count;
    const auto count = static_cast<std::uint32_t>(targets_.size()) - first;
    if (count > 0) rows_.push_back({row, first, count});
  }
  void push(Transport& transport, std::int64_t hidden, const kernels::RowFormat& source,
            DType target) const {
    transport.push_rows({.source = source,
                         .target_dtype = target,
                         .hidden = hidden,
                         .rows = rows_,
                         .targets = targets_});
  }

 private:
  std::vector<kernels::PushRow> rows_;
  std::vector<std::byte*> targets_;
};

}  // namespace ferry::detail
