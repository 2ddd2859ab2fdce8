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

#include "ferry/index_encoding.hpp"
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

/// How its two lists are written.
struct IndexEncoding {
  ListEncoding tokens = ListEncoding::bitmask;
  ListEncoding experts = ListEncoding::packed;
  bool operator==(const IndexEncoding&) const = default;
};

/// Whether the experts can be written so. Raw and packed always can; a bitmask loses the order of a
/// token's experts, which must then follow from their weights; runs need slots or weights behind
/// them, so that their bytes bound what a decoder must allocate.
bool can_hold(ListEncoding experts, const plan::Membership& membership, const MembershipForm& form);

/// Appends the encoded membership to `out`; returns its index_bytes.
/// Requires: columns < num_columns; slots where the form has them; can_hold
std::uint64_t encode_membership(const plan::Membership& membership, const MembershipForm& form,
                                IndexEncoding encoding, std::vector<std::byte>& out);
/// Exact size of both lists and of what says how they are written: all but slots and weights.
std::uint64_t index_bytes(const plan::Membership& membership, const MembershipForm& form,
                          IndexEncoding encoding);
/// Exact size of the whole.
std::uint64_t encoded_membership_bytes(const plan::Membership& membership,
                                       const MembershipForm& form, IndexEncoding encoding);

/// Decodes all of `bytes`. On failure returns the text that names the field; `out` is then empty.
[[nodiscard]] std::optional<std::string> decode_membership(std::span<const std::byte> bytes,
                                                           const MembershipLimits& limits,
                                                           plan::Membership& out);

}  // namespace ferry::wire
