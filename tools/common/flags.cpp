// Parsers of the flags that commands share.
#include "common/flags.hpp"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "common/failures.hpp"
#include "ferry/error.hpp"
#include "ferry/wire_policy.hpp"

namespace ferry::tools {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

void check_range(std::string_view flag, std::int64_t value, Range allowed) {
  if (value >= allowed.low && value <= allowed.high) return;
  throw UsageError(fmt::format("{} {}: allowed: {}..{}", flag, value, allowed.low, allowed.high));
}

void check_ranks(int num_nodes, int ranks_per_node) {
  check_range("--nodes", num_nodes, {1, kMaxRanks});
  check_range("--ranks-per-node", ranks_per_node, {1, kMaxRanks});
  check_range("--nodes times --ranks-per-node", std::int64_t{num_nodes} * ranks_per_node,
              {1, kMaxRanks});
}

DType parse_dtype(std::string_view flag, std::string_view name) {
  const std::optional<DType> dtype = dtype_from_string(name);
  if (!dtype) {
    throw UsageError(fmt::format("{} {}: no such format; allowed: f32, bf16, f16", flag, name));
  }
  return *dtype;
}

namespace {

WireFormat parse_wire_format(std::string_view flag, std::string_view name) {
  const std::optional<WireFormat> format = wire_format_from_string(name);
  if (!format) {
    throw UsageError(fmt::format(
        "{} {}: no such format; allowed: f32, bf16, f16, fp8_e4m3fn (or fp8), int8, sparse_f32, "
        "sparse_bf16, sparse_f16",
        flag, name));
  }
  return *format;
}

int parse_block(std::string_view text) {
  const std::optional<int> columns = number<int>(text);
  if (!columns || !is_block_size(*columns)) {
    throw UsageError(fmt::format("--wire block={}: allowed: powers of two from {} to {}", text,
                                 kFewestBlockColumns, kMostBlockColumns));
  }
  return *columns;
}

double parse_share(std::string_view name, std::string_view text) {
  const std::optional<double> share = number<double>(text);
  if (!share || !(*share > 0 && *share <= 1)) {
    throw UsageError(fmt::format("--wire {}={}: allowed: above 0, at most 1", name, text));
  }
  return *share;
}

/// As `wire="auto"` of Python does.
void choose_unset(WireFormats& wires, DType dtype) {
  ExchangeOptions options{.wire_dispatch = wires.dispatch,
                          .wire_combine = wires.combine,
                          .wire_combine_backward = wires.combine_backward,
                          .wire_dispatch_backward = wires.dispatch_backward,
                          .wire_sparse_ratio = wires.sparse_ratio};
  try {
    options = with_chosen_wires({.dtype = dtype,
                                 .max_relative_error = wires.max_relative_error,
                                 .link_bytes_per_s_per_rank = wires.link_bytes_per_s_per_rank},
                                options);
  } catch (const Error& error) {
    throw UsageError(
        fmt::format("--wire auto,error={:g}: {}", wires.max_relative_error, error.what()));
  }
  wires.dispatch = options.wire_dispatch;
  wires.combine = options.wire_combine;
  wires.combine_backward = options.wire_combine_backward;
  wires.dispatch_backward = options.wire_dispatch_backward;
  if (options.max_relative_error == 0) wires.max_relative_error = 0;
}

}  // namespace

WireFormats WireFormats::filled_in(DType dtype) const {
  WireFormats all = *this;
  const WireFormat own = wire_format_of(dtype);
  if (automatic) choose_unset(all, dtype);
  all.dispatch = all.dispatch.value_or(own);
  all.combine = all.combine.value_or(own);
  all.combine_backward = all.combine_backward.value_or(gradient_wire(*all.dispatch, dtype));
  all.dispatch_backward = all.dispatch_backward.value_or(gradient_wire(*all.combine, dtype));
  const auto any = [&](bool (*is)(WireFormat)) {
    return is(*all.dispatch) || is(*all.combine) || is(*all.combine_backward) ||
           is(*all.dispatch_backward);
  };
  if (all.max_relative_error > 0 && !any([](WireFormat format) { return is_quantised(format); })) {
    throw UsageError("--wire error=LIMIT: is for fp8 and int8; fix: choose one, or auto");
  }
  if (sparse_ratio < 1 && !any([](WireFormat format) { return is_sparse(format); })) {
    throw UsageError("--wire ratio=SHARE: is for sparse formats; fix: choose one");
  }
  return all;
}

WireFormats parse_wire(const std::string& text) {
  WireFormats formats;
  if (text.empty()) return formats;
  const std::pair<std::string_view, std::optional<WireFormat>*> calls[] = {
      {"dispatch", &formats.dispatch},
      {"combine", &formats.combine},
      {"combine_backward", &formats.combine_backward},
      {"dispatch_backward", &formats.dispatch_backward}};
  std::optional<WireFormat> both;
  std::set<std::string_view> named;
  for (const std::string_view part : split(text, ',')) {
    const std::size_t equals = part.find('=');
    const bool of_both = equals == std::string_view::npos;
    const std::string_view name =
        of_both ? "the format of both directions" : part.substr(0, equals);
    const std::string_view value = of_both ? part : part.substr(equals + 1);
    if (!named.insert(name).second) {
      throw UsageError(fmt::format("--wire {}: {} is named twice; fix: name it once", text, name));
    }
    const auto* const call = std::ranges::find(calls, name, [](const auto& c) { return c.first; });
    if (part == "auto") {
      formats.automatic = true;
    } else if (of_both) {
      both = parse_wire_format("--wire", value);
    } else if (name == "block") {
      formats.block_columns = parse_block(value);
    } else if (name == "error") {
      formats.max_relative_error = parse_share(name, value);
    } else if (name == "ratio") {
      formats.sparse_ratio = static_cast<float>(parse_share(name, value));
    } else if (call != std::end(calls)) {
      *call->second = parse_wire_format(fmt::format("--wire {}", name), value);
    } else {
      throw UsageError(
          fmt::format("--wire {}: no such call; allowed: dispatch, combine, "
                      "combine_backward, dispatch_backward, and block, error, ratio",
                      part));
    }
  }
  if (both && formats.dispatch && formats.combine) {
    throw UsageError(
        fmt::format("--wire {}: dispatch and combine are named, so {} is for nothing; fix: leave "
                    "one out",
                    text, to_string(*both)));
  }
  // `--wire NAME` is dispatch and combine, unless one of them is named, in either order.
  if (!formats.dispatch) formats.dispatch = both;
  if (!formats.combine) formats.combine = both;
  return formats;
}

std::vector<std::int64_t> parse_tokens(const std::string& text, int num_ranks) {
  if (text.empty()) return {};
  std::vector<std::int64_t> tokens;
  for (const std::string_view part : split(text, ',')) {
    const std::optional<std::int64_t> count = number<std::int64_t>(part);
    constexpr std::int64_t kMaxTokens = 1 << 24;
    if (!count || *count < 0 || *count > kMaxTokens) {
      throw UsageError(fmt::format("--tokens {}: '{}' is no token count; allowed: 0..{}", text,
                                   part, kMaxTokens));
    }
    tokens.push_back(*count);
  }
  if (tokens.size() != 1 && tokens.size() != static_cast<std::size_t>(num_ranks)) {
    throw UsageError(
        fmt::format("--tokens {}: {} counts for {} ranks; fix: give one count for "
                    "all ranks, or one per rank",
                    text, tokens.size(), num_ranks));
  }
  return tokens;
}

std::vector<std::int64_t> tokens_per_rank(const std::vector<std::int64_t>& given, int num_ranks,
                                          std::int64_t if_none) {
  if (given.size() > 1) return given;
  return std::vector<std::int64_t>(static_cast<std::size_t>(num_ranks),
                                   given.empty() ? if_none : given.front());
}

}  // namespace ferry::tools
