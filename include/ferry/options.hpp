#pragma once
// What an exchange is made with. Every option travels in the header of each plan, and ranks that
// disagree get an error that names both values.

#include <cstdint>
#include <optional>
#include <string_view>

#include "ferry/dtype.hpp"
#include "ferry/wire_format.hpp"

namespace ferry {

/// How a row reaches experts on another node; docs/concepts.md compares them.
enum class Strategy : std::uint8_t { flat = 0, rank_dedup = 1, node_gather = 2, node_dedup = 3 };
std::string_view to_string(Strategy strategy);
std::optional<Strategy> strategy_from_string(std::string_view name);

/// What the rows of a rank's window are, and their order.
enum class Layout : std::uint8_t {
  expert_major = 0,  ///< one row per (token, expert), by expert, source rank, token
  /// One row per (token, rank), by source rank, token, whatever number of its experts the token
  /// visits there; the caller makes one output of it. Not with flat, nor weights at combine.
  token_major = 1,
};
std::string_view to_string(Layout layout);
std::optional<Layout> layout_from_string(std::string_view name);

/// Who multiplies expert outputs with the routing weights.
enum class WeightMode : std::uint8_t {
  at_combine = 0,  ///< combine
  at_expert = 1,   ///< the caller, with Plan::row_sources() or Plan::topk_weights()
  none = 2,        ///< nobody: combine adds the outputs as they are
};
std::string_view to_string(WeightMode weights);
std::optional<WeightMode> weight_mode_from_string(std::string_view name);

/// The shape of every row of an exchange.
struct RowShape {
  std::int64_t hidden = 0;
  DType dtype = DType::bf16;
};

struct ExchangeOptions {
  // Behaviour
  Strategy strategy = Strategy::node_dedup;
  Layout layout = Layout::expert_major;
  WeightMode weights = WeightMode::at_combine;
  /// Each expert's rows start at a multiple of this many rows; the rows in between are 0 and belong
  /// to nobody. expert_major only, 1..65535.
  int row_alignment = 1;
  /// Bytes that travel with each row of x, such as scales of its blocks; a multiple of 4,
  /// at most 1 MiB.
  int extra_bytes = 0;
  /// Plans say where each row comes from (Plan::row_sources), for one more byte per row in the
  /// metadata. On by itself with token_major and with weights at the expert.
  bool row_sources = false;
  /// Format of rows that cross nodes in dispatch; unset = the dtype (exact).
  std::optional<WireFormat> wire_dispatch{};
  /// Format of rows or partial sums that cross nodes in combine; unset = the dtype. With f32 all
  /// strategies, transports and fragment sizes give the same bits.
  std::optional<WireFormat> wire_combine{};
  /// Format of gradients that cross in combine_backward (on the way out) and in dispatch_backward
  /// (on the way home); unset = that of dispatch and of combine, unless it is quantised: then the
  /// dtype, so that nobody quantises gradients without asking for it.
  std::optional<WireFormat> wire_combine_backward{};
  std::optional<WireFormat> wire_dispatch_backward{};
  /// Columns that share one FP32 scale in fp8_e4m3fn and int8: a power of two from 64 to 2048.
  int wire_block_columns = kDefaultBlockColumns;
  /// Largest error of a quantised row as it crosses: the root mean square of its errors over that
  /// of its values. A row that would miss it crosses as bf16 (on the way out as f16 in an exchange
  /// of f16), and is counted (Exchange::wire_statistics). 0 = no limit; else 2^-8 to below 1.
  float max_relative_error = 0;
  /// Sparse formats keep, in each block of wire_block_columns columns, this share of the values:
  /// the largest, rounded up. 1 = all that are not 0; above 0.
  float wire_sparse_ratio = 1;

  // Performance
  /// Bytes of one fragment on the wire, header included; 0 = what the transport prefers.
  std::int64_t fragment_bytes = 0;
  /// Source tokens per range, in all calls on a plan; 0 = as many as fill eight fragments of
  /// dispatch or of combine, whichever has the longer rows.
  std::int64_t range_tokens = 0;
  /// Ranges that a receiver grants ahead of the one it works on.
  int ranges_in_flight = 3;
  /// CRC32C over every fragment's payload.
  bool checksum_payload = true;
};

}  // namespace ferry
