// The choice of wire formats: see ferry/wire_policy.hpp.

#include "ferry/wire_policy.hpp"

#include <optional>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "ferry/error.hpp"

namespace ferry {
namespace {

/// A rounding to bf16 is off by at most half of its last bit; what is finer crosses exactly.
constexpr double kBf16Error = 0x1p-8;
/// Rows of normal values in blocks of 128 are off by 0.6 % in int8: below this, most escalate.
constexpr double kInt8Error = 0.008;
/// Where a rank can send faster, quantising and reading cost as much as the bytes they save: both
/// together run at about half of one core's memcpy.
constexpr double kFastLink_bytes_per_s = 2.5e9;

void check(const WireNeeds& needs) {
  if (!(needs.max_relative_error >= 0 && needs.max_relative_error < 1)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("choose_wires: max_relative_error = {}; allowed: 0 (exact) to below 1",
                            needs.max_relative_error));
  }
  if (!(needs.link_bytes_per_s_per_rank >= 0)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("choose_wires: link_bytes_per_s_per_rank = {}; allowed: 0 (not known) "
                            "or more",
                            needs.link_bytes_per_s_per_rank));
  }
}

}  // namespace

void WireChoice::apply(ExchangeOptions& options) const {
  options.wire_dispatch = dispatch;
  options.wire_combine = combine;
  options.wire_combine_backward = combine_backward;
  options.wire_dispatch_backward = dispatch_backward;
  options.max_relative_error = max_relative_error;
}

WireChoice choose_wires(const WireNeeds& needs) {
  check(needs);
  const WireFormat exact = wire_format_of(needs.dtype);
  WireChoice choice{exact, exact, exact, exact, 0, {}};
  if (needs.max_relative_error < kBf16Error) {
    choice.reason =
        "rows cross exactly: the error allowed is less than a rounding to 16 bits makes";
    return choice;
  }
  const WireFormat rounded = needs.dtype == DType::f32 ? WireFormat::bf16 : exact;
  choice.dispatch = rounded;
  choice.combine = rounded;
  if (needs.round_gradients) choice.combine_backward = choice.dispatch_backward = rounded;
  if (needs.max_relative_error < kInt8Error) {
    choice.reason = "rows cross in 16 bits: int8 would miss the error allowed in most rows";
    return choice;
  }
  if (needs.link_bytes_per_s_per_rank > kFastLink_bytes_per_s) {
    choice.reason = "rows cross in 16 bits: the link is as fast as quantising is";
    return choice;
  }
  choice.dispatch = WireFormat::int8;
  if (needs.quantise_combine) choice.combine = WireFormat::int8;
  choice.max_relative_error = static_cast<float>(needs.max_relative_error);
  choice.reason = needs.quantise_combine
                      ? "rows and outputs cross in int8; those that miss the error in 16 bits"
                      : "rows cross in int8, those that miss the error in 16 bits; outputs, which "
                        "are added to what goes on, in 16 bits";
  return choice;
}

ExchangeOptions with_chosen_wires(const WireNeeds& needs, ExchangeOptions options) {
  const WireChoice choice = choose_wires(needs);
  bool quantised = false;
  const auto fill_in = [&](std::optional<WireFormat>& wire, WireFormat chosen,
                           std::string_view option) {
    if (!wire) wire = chosen;
    quantised |= is_quantised(*wire);
    if (is_sparse(*wire) && options.wire_sparse_ratio < 1 && needs.max_relative_error > 0) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("choose_wires: max_relative_error = {} beside wire_sparse_ratio = {} and "
                      "{} = {}, whose rows may miss any limit; fix: leave one of the two options "
                      "out, or name all formats without wire = auto",
                      needs.max_relative_error, options.wire_sparse_ratio, option,
                      to_string(*wire)));
    }
  };
  fill_in(options.wire_dispatch, choice.dispatch, "wire_dispatch");
  fill_in(options.wire_combine, choice.combine, "wire_combine");
  fill_in(options.wire_combine_backward, choice.combine_backward, "wire_combine_backward");
  fill_in(options.wire_dispatch_backward, choice.dispatch_backward, "wire_dispatch_backward");
  options.max_relative_error = quantised ? static_cast<float>(needs.max_relative_error) : 0;
  return options;
}

}  // namespace ferry
