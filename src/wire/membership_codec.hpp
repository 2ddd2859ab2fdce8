#pragma once
// Membership as bytes. Layout and limits are in docs/wire-formats.md. The decoder trusts nothing:
// every size, index and order is checked against what the receiver knows before it is used, and
// nothing is allocated beyond what the bytes themselves can justify.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "plan/membership.hpp"

namespace ferry::wire {

/// What a membership is for: both ends know it from the options.
struct MembershipForm {
  int num_columns = 0;  ///< experts on the receiving node
  bool slots = false;   ///< the slot of each entry is needed
  bool weights = true;  ///< weights are needed; else they are 1 when decoded
};

/// What the receiver knows of a membership before it decodes it.
struct MembershipLimits {
  std::uint64_t num_tokens = 0;  ///< of the source, from the header
  int num_topk = 0;
  MembershipForm form{};
};

/// Appends the encoded membership to `out`.
/// Requires: columns < num_columns; slots where the form has them
void encode_membership(const plan::Membership& membership, const MembershipForm& form,
                       std::vector<std::byte>& out);
/// Exact size of that encoding.
std::uint64_t encoded_membership_bytes(const plan::Membership& membership,
                                       const MembershipForm& form);

/// Decodes all of `bytes`. On failure returns the text that names the field; `out` is then empty.
[[nodiscard]] std::optional<std::string> decode_membership(std::span<const std::byte> bytes,
                                                           const MembershipLimits& limits,
                                                           plan::Membership& out);

}  // namespace ferry::wire
