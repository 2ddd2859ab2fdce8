#pragma once
// Flags that more than one command has, as text and as values. Every refusal is a UsageError that
// names the flag, its value, what is allowed and the fix.

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/dtype.hpp"
#include "ferry/wire_format.hpp"

namespace ferry::tools {

/// Ranks that a command plans or runs at most.
inline constexpr int kMaxRanks = 1024;

std::vector<std::string_view> split(std::string_view text, char separator);

/// A whole text as a number; nothing when anything is left over.
template <typename Number>
std::optional<Number> number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

struct Range {
  std::int64_t low = 0;
  std::int64_t high = 0;
};
/// Errors: UsageError
void check_range(std::string_view flag, std::int64_t value, Range allowed);
/// Of --nodes, --ranks-per-node and their product. Errors: UsageError
void check_ranks(int num_nodes, int ranks_per_node);

/// Errors: UsageError
DType parse_dtype(std::string_view flag, std::string_view name);

/// Formats in which rows cross; unset as in ExchangeOptions.
struct WireFormats {
  std::optional<WireFormat> dispatch{};
  std::optional<WireFormat> combine{};
  std::optional<WireFormat> combine_backward{};
  std::optional<WireFormat> dispatch_backward{};
  int block_columns = kDefaultBlockColumns;
  /// What is unset follows from max_relative_error and the link, else from the dtype.
  bool automatic = false;
  double max_relative_error = 0;
  double link_bytes_per_s_per_rank = 0;  ///< 0 = not known
  float sparse_ratio = 1;

  /// With all formats set, for rows of a dtype.
  /// Errors: UsageError
  WireFormats filled_in(DType dtype) const;
};
/// A comma list of "NAME" for dispatch and combine (or "auto"), "CALL=NAME" for one call,
/// "block=COLUMNS", "error=LIMIT" and "ratio=SHARE", in any order and each once; empty = unset.
/// What names a call goes before what does not.
/// Errors: UsageError
WireFormats parse_wire(const std::string& text);
inline constexpr const char* kWireHelp =
    "format of rows between nodes: NAME for both directions [,CALL=NAME] [,block=COLUMNS] "
    "[,error=LIMIT] [,ratio=SHARE]; f32, bf16, f16, fp8, int8, sparse_f32, sparse_bf16, "
    "sparse_f16, or auto: what suits the error and the link; default the dtype";

/// One count for all ranks, a comma list with one per rank, or empty for the default.
/// Errors: UsageError
std::vector<std::int64_t> parse_tokens(const std::string& text, int num_ranks);

/// Tokens of each rank: as given, or `if_none`.
std::vector<std::int64_t> tokens_per_rank(const std::vector<std::int64_t>& given, int num_ranks,
                                          std::int64_t if_none);

}  // namespace ferry::tools
