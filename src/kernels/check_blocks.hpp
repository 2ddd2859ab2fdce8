#pragma once
// The block sizes that every kernel can read and write: its chunks are whole blocks, and a block
// is whole vectors.

#include <cstdint>
#include <string_view>

#include "base/check.hpp"
#include "ferry/wire_format.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::kernels::detail {

inline void check_blocks(std::string_view what, std::uint32_t block_columns) {
  FERRY_ASSERT(is_block_size(static_cast<int>(block_columns)),
               "{}: blocks of {} columns; allowed: powers of two from {} to {}", what,
               block_columns, kFewestBlockColumns, kMostBlockColumns);
}

inline void check_blocks(std::string_view what, const RowFormat& rows) {
  if (is_quantised(rows.format)) check_blocks(what, rows.block_columns);
}

}  // namespace ferry::kernels::detail
