#pragma once
// Which wire formats suit an error that the caller allows: one table, docs/wire-formats.md
// "Choosing". A pure function, so that all ranks that ask alike choose alike.

#include <string>

#include "ferry/dtype.hpp"
#include "ferry/options.hpp"

namespace ferry {

/// What the choice depends on.
struct WireNeeds {
  DType dtype = DType::bf16;
  /// Largest error of a row that the caller allows: root mean square, over that of its values.
  /// 0 = none.
  double max_relative_error = 0;
  /// Of the link of one node, over the ranks that share it: what each can count on. 0 = not known,
  /// and taken to be slow.
  double link_bytes_per_s_per_rank = 0;
  /// Outputs may be quantised too, although they are added to the residual stream or go into a
  /// LayerNorm, where errors add up over layers.
  bool quantise_combine = false;
  /// Gradients may be rounded to bf16 where the dtype is f32; they are never quantised here.
  bool round_gradients = true;
};

/// Formats for ExchangeOptions, with the reason in one sentence.
struct WireChoice {
  WireFormat dispatch = WireFormat::bf16;
  WireFormat combine = WireFormat::bf16;
  WireFormat combine_backward = WireFormat::bf16;
  WireFormat dispatch_backward = WireFormat::bf16;
  float max_relative_error = 0;
  std::string reason;

  /// Puts the formats and the limit into the options of an exchange.
  void apply(ExchangeOptions& options) const;
};

/// Errors: invalid_argument (an error that is negative, NaN or not below 1; a rate that is negative
///         or NaN)
WireChoice choose_wires(const WireNeeds& needs);

/// The options with the formats that are unset chosen, and the limit put in: what `wire="auto"`
/// does. Formats that are set stand, and the caller's limit stands wherever one of the four is
/// quantised, so that a limit is never lost beside a format that was named; where none is, it has
/// done its work by the choice and is 0. Whether an exchange can keep that limit is for it to say.
/// Errors: as choose_wires; invalid_argument where a sparse format that leaves values out
///         (wire_sparse_ratio below 1) stands beside a limit, which it would not keep
ExchangeOptions with_chosen_wires(const WireNeeds& needs, ExchangeOptions options);

}  // namespace ferry
