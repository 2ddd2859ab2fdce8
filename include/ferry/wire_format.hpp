#pragma once
// What rows look like while they cross between nodes: in a dtype, or quantised, which is one byte
// for each element and one FP32 scale for each block of columns. docs/wire-formats.md has the
// bytes, the rounding and the error bounds. Inside a node rows have their dtype.

#include <bit>
#include <cstdint>
#include <optional>
#include <string_view>

#include "ferry/dtype.hpp"

namespace ferry {

enum class WireFormat : std::uint8_t {
  f32 = 0,
  bf16 = 1,  ///< saturates, as f16: no finite value of a row becomes infinite
  f16 = 2,
  fp8_e4m3fn = 3,  ///< 4 bits of exponent, 3 of fraction; the largest of a block becomes 448
  int8 = 4,        ///< -127..127, symmetric; the largest of a block becomes 127
  // The values that are not 0, in a dtype, and their positions; never longer than rows in that
  // dtype.
  sparse_f32 = 5,
  sparse_bf16 = 6,
  sparse_f16 = 7,
};
inline constexpr WireFormat kLastWireFormat = WireFormat::sparse_f16;

/// Rows of varying length: values that are not 0, and their positions.
constexpr bool is_sparse(WireFormat format) {
  return format == WireFormat::sparse_f32 || format == WireFormat::sparse_bf16 ||
         format == WireFormat::sparse_f16;
}

/// The format of the values of a sparse one; any other is its own.
constexpr WireFormat dense_format(WireFormat format) {
  switch (format) {
    case WireFormat::sparse_f32: return WireFormat::f32;
    case WireFormat::sparse_bf16: return WireFormat::bf16;
    case WireFormat::sparse_f16: return WireFormat::f16;
    case WireFormat::f32:
    case WireFormat::bf16:
    case WireFormat::f16:
    case WireFormat::fp8_e4m3fn:
    case WireFormat::int8: return format;
  }
  return format;
}

/// One byte for each element, and scales.
constexpr bool is_quantised(WireFormat format) {
  return format == WireFormat::fp8_e4m3fn || format == WireFormat::int8;
}

/// Bytes of one element, without its share of a scale.
constexpr std::uint64_t element_bytes(WireFormat format) {
  switch (format) {
    case WireFormat::f32: return 4;
    case WireFormat::bf16: return 2;
    case WireFormat::f16: return 2;
    case WireFormat::fp8_e4m3fn: return 1;
    case WireFormat::int8: return 1;
    case WireFormat::sparse_f32: return 4;
    case WireFormat::sparse_bf16: return 2;
    case WireFormat::sparse_f16: return 2;
  }
  return 0;
}

/// The format in which rows of a dtype cross as they are.
constexpr WireFormat wire_format_of(DType dtype) { return static_cast<WireFormat>(dtype); }
/// Requires: neither quantised nor sparse
constexpr DType dtype_of(WireFormat format) { return static_cast<DType>(format); }

/// The format of gradients where only that of the rows forward was chosen: the same, but neither
/// quantised nor sparse.
constexpr WireFormat gradient_wire(WireFormat forward, DType dtype) {
  return is_quantised(forward) || is_sparse(forward) ? wire_format_of(dtype) : forward;
}

/// Columns that share a scale: a power of two in these bounds.
inline constexpr int kDefaultBlockColumns = 128;
inline constexpr int kFewestBlockColumns = 64;
inline constexpr int kMostBlockColumns = 2048;
constexpr bool is_block_size(int columns) {
  return columns >= kFewestBlockColumns && columns <= kMostBlockColumns &&
         std::has_single_bit(static_cast<unsigned>(columns));
}

/// Bytes of the scales of one row, which stand before its elements.
constexpr std::uint64_t scale_bytes(WireFormat format, std::int64_t hidden,
                                    std::int64_t block_columns) {
  if (!is_quantised(format)) return 0;
  return static_cast<std::uint64_t>((hidden + block_columns - 1) / block_columns) * 4;
}

/// Bytes of one row, scales included; of a sparse row the most.
constexpr std::uint64_t wire_row_bytes(WireFormat format, std::int64_t hidden,
                                       std::int64_t block_columns) {
  return scale_bytes(format, hidden, block_columns) +
         static_cast<std::uint64_t>(hidden) * element_bytes(format);
}

std::string_view to_string(WireFormat format);
/// The name of a format, or "fp8" for fp8_e4m3fn; nothing for any other.
std::optional<WireFormat> wire_format_from_string(std::string_view name);

}  // namespace ferry
