#pragma once
// The only code that touches payload: copy, convert, sum and scale rows. SIMD by run-time dispatch,
// the same bits on every target. Targets are written with streaming stores where their alignment
// allows, so the caller fences before it publishes them (Transport::raise_flag does).
// Invariant: nothing is read or written past the end of a row.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/dtype.hpp"
#include "ferry/wire_format.hpp"

namespace ferry::kernels {

/// How a row stands in memory: in a dtype, or as it crosses between nodes.
struct RowFormat {
  WireFormat format = WireFormat::f32;
  /// To and from f16 and bf16, finite values saturate; without it, they overflow as FP32 does.
  bool crosses = false;
  std::uint32_t block_columns = 0;  ///< that share a scale, where there are scales

  constexpr RowFormat() = default;
  /// Implicit: most rows have a dtype.
  constexpr RowFormat(DType dtype) : format(wire_format_of(dtype)) {}
  constexpr RowFormat(WireFormat wire, std::int64_t columns)
      : format(wire), crosses(true), block_columns(static_cast<std::uint32_t>(columns)) {}

  /// Bytes of a row.
  constexpr std::uint64_t row_bytes(std::int64_t hidden) const {
    return wire_row_bytes(format, hidden, block_columns);
  }
  bool operator==(const RowFormat&) const = default;
};

/// One source row and its targets: `count` of PushJob::targets from `first` on (0 is allowed).
struct PushRow {
  const std::byte* source = nullptr;
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

/// Reads each source row once and writes it, converted, to each of its targets.
struct PushJob {
  RowFormat source{};
  DType target_dtype = DType::f32;
  std::int64_t hidden = 0;
  std::span<const PushRow> rows;
  std::span<std::byte* const> targets;
};
void push_rows(const PushJob& job);

/// Converts rows into one contiguous block (row stride `wire.row_bytes`). What is in the format
/// already is copied, whatever it means.
struct PackJob {
  DType source_dtype = DType::f32;
  RowFormat wire{};
  std::int64_t hidden = 0;
  std::span<const std::byte* const> rows;
  std::byte* out = nullptr;
};
void pack_rows(const PackJob& job);

/// Packs rows into a quantised format, and those that it would change too much into another: where
/// the root mean square of the errors is more than `max_relative_error` times that of the values
/// (in FP32), or one is not finite. Behind the rows stand marks where there are such rows, one bit
/// for each row.
struct PackWithinJob {
  /// `wire` is quantised; `out` has room for each row in the longer of the two formats, and marks:
  /// what stands behind the result may be overwritten.
  PackJob pack{};
  RowFormat escalated{};  ///< not quantised
  float max_relative_error = 0;
};
struct PackedRows {
  std::uint64_t bytes = 0;
  std::uint32_t escalated = 0;  ///< rows
};
PackedRows pack_rows_within(const PackWithinJob& job);

/// Finds the rows of a payload that pack_rows_within wrote with marks. False where it is not such a
/// payload, to the byte; nothing outside it is read.
struct MarkedRowsJob {
  RowFormat wire{};
  RowFormat escalated{};
  std::int64_t hidden = 0;
  std::uint32_t num_rows = 0;
  std::span<const std::byte> payload;
};
struct MarkedRow {
  const std::byte* row = nullptr;
  bool escalated = false;
};
bool find_marked_rows(const MarkedRowsJob& job, std::vector<MarkedRow>& rows);

/// One term of a sum. Terms of a row stand in tree order: nodes ascending; in a node ranks
/// ascending; in a rank slots ascending. The last term of each group carries the mark.
struct SumTerm {
  const std::byte* row = nullptr;
  float weight = 1.0F;  ///< the product is rounded to FP32, then added
  WireFormat format = WireFormat::f32;
  bool weighted = false;   ///< false: the row is added as it is
  bool ends_rank = false;  ///< last term of its rank
  bool ends_node = false;  ///< last term of its node (then also ends_rank)
};

struct SumRow {
  std::byte* out = nullptr;
  std::uint32_t first = 0;
  std::uint32_t count = 0;  ///< 0 terms: the row becomes 0
};

/// out = sum over nodes of (sum over ranks of (sum over slots of w * row)), FP32, each sum from its
/// first term on, rounded to nearest even once at the end. A NaN in a result always has the same
/// bits (0x7FC00000, rounded), so that they do not depend on the machine. A quantised term is its
/// code times its scale, a product that is rounded to FP32; a quantised result is encoded from its
/// FP32 sum.
struct SumJob {
  RowFormat out{};
  std::int64_t hidden = 0;
  std::span<const SumRow> rows;
  std::span<const SumTerm> terms;
  std::uint32_t block_columns = 0;  ///< of quantised terms; 0: there are none
};
void sum_rows(const SumJob& job);

/// Where a row goes, scaled, and what it is multiplied with there.
struct ScaleTarget {
  std::byte* out = nullptr;
  float weight = 1.0F;
  const std::byte* y = nullptr;  ///< a row of the dtype of `out`; null: no product
  float* dot = nullptr;          ///< becomes row . y; used with `y` only
};

/// Reads each source row once. For each of its targets: out = weight x row, a product in FP32 that
/// is rounded once; and dot = sum over the columns of row x y, products rounded before they are
/// added: lane i of 16 adds columns i, i + 16, ... to 0 in ascending order, then lane i takes lane
/// i + 8, then i + 4, i + 2, i + 1. So the bits depend on no vector width. A NaN is 0x7FC00000,
/// rounded.
struct ScaleJob {
  RowFormat source{};
  DType target_dtype = DType::f32;  ///< of out and y
  std::int64_t hidden = 0;
  std::span<const PushRow> rows;
  std::span<const ScaleTarget> targets;
};
void scale_rows(const ScaleJob& job);

/// CRC-32C (Castagnoli; of "123456789": 0xE3069283) of `bytes`, behind data whose CRC is `start`.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t start = 0);

/// SIMD targets this machine can run, best first, and how a test pins one ("" = the best again).
std::vector<std::string> simd_targets();
void pin_simd_target(std::string_view name);

}  // namespace ferry::kernels
