#pragma once
// One bit for each row of a payload, behind its rows.

#include <cstdint>

namespace ferry::kernels {

inline constexpr std::uint32_t kBitsPerByte = 8;

inline std::uint64_t mark_bytes(std::uint64_t num_rows) {
  return (num_rows + kBitsPerByte - 1) / kBitsPerByte;
}

}  // namespace ferry::kernels
