#pragma once
// Rows of which most values are 0, as the positions of the others and those values;
// docs/wire-formats.md has the bytes. Values keep their format: what is written here are dense rows
// of 16- or 32-bit elements, and the same rows come back bit for bit.
// Invariant: nothing is read or written past the end of a row or payload, whatever stands in it.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "ferry/wire_format.hpp"

namespace ferry::kernels {

/// How the positions of a message's values are written.
enum class Positions : std::uint8_t {
  coo = 0,         ///< their number, then each column
  bitmask = 1,     ///< one bit for each column
  run_length = 2,  ///< runs of values and the gaps between them, as varints
};

struct SparseShape {
  std::int64_t hidden = 0;
  std::uint32_t element_bytes = 2;  ///< 2 or 4

  std::size_t columns() const { return static_cast<std::size_t>(hidden); }
  std::size_t row_bytes() const { return columns() * element_bytes; }
};

/// Keeps, in each block of columns, the largest magnitudes (the first of equal ones), as many as
/// `ratio` of the block's columns, rounded up; all others become 0, and so does -0. A NaN is larger
/// than any number. Rows stand one behind the other.
struct KeepLargestJob {
  SparseShape shape{};
  float ratio = 1;  ///< above 0, at most 1
  std::uint32_t block_columns = kDefaultBlockColumns;
  std::uint32_t num_rows = 0;
  std::byte* rows = nullptr;
};
/// What is left, of all rows.
struct SparseCounts {
  std::uint64_t values = 0;
  std::uint64_t runs = 0;  ///< of values in neighbouring columns
};
SparseCounts keep_largest(const KeepLargestJob& job);

/// Writes the values of rows that are not 0, with their positions.
struct CompressJob {
  SparseShape shape{};
  Positions positions = Positions::bitmask;
  std::uint32_t num_rows = 0;
  const std::byte* rows = nullptr;  ///< without -0, as keep_largest leaves them
  std::span<std::byte> out;
};
/// Returns the bytes written, 0 where `out` is too small.
std::uint64_t compress_rows(const CompressJob& job);

/// Bytes that compress_rows needs for so many rows: exact for coo and bitmask; for run_length as
/// where runs begin and end by chance.
std::uint64_t compressed_bytes(Positions positions, const SparseShape& shape,
                               std::uint32_t num_rows, const SparseCounts& counts);

/// Brings rows back. False where the payload is not so many rows and nothing else; `out` may then
/// hold anything. A value of 0, which compress_rows leaves out, is a value like any other.
struct ExpandJob {
  SparseShape shape{};
  Positions positions = Positions::bitmask;
  std::uint32_t num_rows = 0;
  std::span<const std::byte> payload;
  std::byte* out = nullptr;  ///< num_rows dense rows
};
bool expand_rows(const ExpandJob& job);

}  // namespace ferry::kernels
