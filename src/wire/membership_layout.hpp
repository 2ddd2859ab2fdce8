#pragma once
// What the encoder and the decoder of a membership share: its first bytes, and the two lists that
// can be written in several ways, as docs/wire-formats.md has them. Sections: version and form;
// token list; expert list; slots; weights.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/index_encoding.hpp"
#include "plan/membership.hpp"
#include "wire/bits.hpp"
#include "wire/headers.hpp"
#include "wire/membership_codec.hpp"

namespace ferry::wire {

inline constexpr std::uint8_t kMembershipVersion = 2;
inline constexpr std::size_t kMembershipPrefixBytes = 2;  // version, form

inline constexpr std::uint8_t kListMask = 0x03;   // encoding of the token list
inline constexpr int kExpertsShift = 2;           // then of the expert list, as wide
inline constexpr std::uint8_t kSlots = 0x10;      // the slot of each entry is sent
inline constexpr std::uint8_t kNoWeights = 0x20;  // weights are not sent
inline constexpr std::uint8_t kReservedForm = 0xC0;

inline constexpr std::uint32_t kMaxCount = 256;  // a count is sent as count - 1
inline constexpr std::uint64_t kMaxTokens = std::numeric_limits<std::uint32_t>::max();

/// Bytes of each entry behind both lists.
constexpr std::uint64_t entry_bytes(const MembershipForm& form) {
  return (form.slots ? 1 : 0) + (form.weights ? sizeof(float) : 0);
}

/// Bytes of a number below `values` in a raw list of tokens or columns.
constexpr std::uint64_t raw_token_bytes(std::uint64_t num_tokens) {
  return num_tokens > 65536 ? 4 : 2;
}
constexpr std::uint64_t raw_column_bytes(int num_columns) { return num_columns > 256 ? 2 : 1; }
/// Bits of a column in a packed list: at least one, so that no entry is for nothing.
constexpr int column_width(int num_columns) {
  return num_columns <= 2 ? 1 : width_below(static_cast<std::uint64_t>(num_columns));
}

/// Of `num_tokens` tokens `count` come: a packed list has this many lower bits of each apart.
constexpr int low_token_width(std::uint64_t num_tokens, std::uint64_t count) {
  return count == 0 ? 0 : static_cast<int>(std::bit_width(num_tokens / count)) - 1;
}

/// The columns of each token; or of the first token of each run of tokens that name the same.
struct ExpertLists {
  std::uint64_t tokens = 0;
  const std::uint32_t* entry_begin = nullptr;  ///< tokens + 1 values
  const std::uint16_t* columns = nullptr;
  std::uint32_t count_bits = 0;  ///< that are set in some count - 1

  /// Requires: begin holds one value more than there are tokens
  ExpertLists(std::span<const std::uint32_t> begin, std::span<const std::uint16_t> of)
      : tokens(begin.size() - 1), entry_begin(begin.data()), columns(of.data()) {
    for (std::uint64_t i = 0; i < tokens; ++i) count_bits |= count(i) - 1;
  }
  explicit ExpertLists(const plan::Membership& membership)
      : ExpertLists(membership.entry_begin, membership.columns) {}

  std::uint64_t entries() const { return entry_begin[tokens]; }
  std::uint32_t count(std::uint64_t i) const { return entry_begin[i + 1] - entry_begin[i]; }
};

/// How a packed expert list says where the entries of a token end.
struct CountForm {
  static constexpr std::uint8_t kEndMarks = 0xFF;
  /// Bits of each count - 1; or kEndMarks: a bit for each entry, set for the last of a token.
  std::uint8_t width = 0;

  std::uint64_t bits(std::uint64_t tokens, std::uint64_t entries) const {
    return width == kEndMarks ? entries : tokens * width;
  }
  bool operator==(const CountForm&) const = default;
};
/// The smaller one; counts where they take the same. `count_bits`: see ExpertLists
CountForm count_form(std::uint64_t tokens, std::uint64_t entries, std::uint32_t count_bits);
/// Bytes of a packed list of `tokens` tokens with `entries` columns of `width` bits.
std::uint64_t packed_expert_bytes(std::uint64_t tokens, std::uint64_t entries, CountForm form,
                                  int width);

/// Whether the order of a token's entries follows from what else is sent: weights descending, equal
/// ones by column; without weights, columns ascending.
bool order_is_known(const plan::Membership& membership, const MembershipForm& form);
/// Whether tokens i - 1 and i name the same columns in the same order.
inline bool equals_last(const ExpertLists& lists, std::uint64_t i) {
  const std::uint16_t* own = lists.columns + lists.entry_begin[i];
  const std::uint32_t count = lists.count(i);
  return count == lists.count(i - 1) && std::equal(own, own + count, own - count);
}
/// Calls visit(first, count) for runs of `count` tokens from `first` on that name the same.
template <typename Visit>
void for_each_equal_run(const ExpertLists& lists, const Visit& visit) {
  for (std::uint64_t first = 0, next = 1; first < lists.tokens; first = next++) {
    while (next < lists.tokens && equals_last(lists, next)) ++next;
    visit(first, next - first);
  }
}

/// Bytes of the list in that encoding. Requires: the encoding can hold it
std::uint64_t token_list_bytes(const plan::Membership& membership, ListEncoding encoding);
std::uint64_t expert_list_bytes(const ExpertLists& lists, int num_columns, ListEncoding encoding);
/// Bits of the runs of tokens [first, end) that come and that do not.
std::uint64_t token_run_bits(std::span<const std::uint32_t> tokens, std::uint64_t first,
                             std::uint64_t end);
/// Writes the list, which takes `bytes`; returns the byte after it.
std::byte* store_token_list(std::byte* at, std::uint64_t bytes, const plan::Membership& membership,
                            ListEncoding encoding);
std::byte* store_expert_list(std::byte* at, std::uint64_t bytes, const ExpertLists& lists,
                             int num_columns, ListEncoding encoding);
/// Takes a list with the decoder of tokens, or of experts.
template <typename Decoder>
[[nodiscard]] std::optional<std::string> take_list(Decoder& decoder, ListEncoding encoding) {
  switch (encoding) {
    case ListEncoding::raw: return decoder.take_raw();
    case ListEncoding::bitmask: return decoder.take_bitmask();
    case ListEncoding::packed: return decoder.take_packed();
    case ListEncoding::runs: return decoder.take_runs();
  }
  return std::nullopt;
}
/// Shortens `rest` by a list and gives what it holds, or the text of an error. Nothing is allocated
/// before the bytes that are left can hold the token's columns, slots and weights.
[[nodiscard]] std::optional<std::string> take_token_list(Bytes& rest, ListEncoding encoding,
                                                         const MembershipLimits& limits,
                                                         plan::Membership& out,
                                                         std::uint64_t fewest_bits_per_token);
[[nodiscard]] std::optional<std::string> take_expert_list(Bytes& rest, ListEncoding encoding,
                                                          const MembershipLimits& limits,
                                                          plan::Membership& out);
/// Bits that such a list, slots and weights take for a token at the very least.
std::uint64_t fewest_expert_bits(ListEncoding encoding, const MembershipForm& form);

}  // namespace ferry::wire
