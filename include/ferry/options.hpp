#pragma once
// What an exchange is made with. Every option travels in the header of each plan, and ranks that
// disagree get an error that names both values.

#include <cstdint>
#include <optional>
#include <string_view>

#include "ferry/dtype.hpp"

namespace ferry {

/// How a row reaches experts on another node; docs/concepts.md compares them.
enum class Strategy : std::uint8_t { flat = 0, rank_dedup = 1, node_gather = 2, node_dedup = 3 };
std::string_view to_string(Strategy strategy);
std::optional<Strategy> strategy_from_string(std::string_view name);

/// The shape of every row of an exchange.
struct RowShape {
  std::int64_t hidden = 0;
  DType dtype = DType::bf16;
};

struct ExchangeOptions {
  // Behaviour
  Strategy strategy = Strategy::node_dedup;
  /// Format of rows that cross nodes in dispatch; unset = the dtype (exact).
  std::optional<DType> wire_dispatch{};
  /// Format of rows or partial sums that cross nodes in combine; unset = the dtype. With f32 all
  /// strategies, transports and fragment sizes give the same bits.
  std::optional<DType> wire_combine{};

  // Performance
  /// Bytes of one fragment on the wire, header included; 0 = what the transport prefers.
  std::int64_t fragment_bytes = 0;
  /// Source tokens per range; 0 = as many as fill eight fragments.
  std::int64_t range_tokens = 0;
  /// Ranges that a receiver grants ahead of the one it works on.
  int ranges_in_flight = 3;
  /// CRC32C over every fragment's payload.
  bool checksum_payload = true;
};

}  // namespace ferry
