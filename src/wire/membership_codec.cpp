// The encoder of memberships: picks the smallest form of each section per message, sizes the whole
// exactly, then writes it in one pass.

#include "wire/membership_codec.hpp"

#include <algorithm>
#include <functional>

#include "base/check.hpp"
#include "wire/bytes.hpp"
#include "wire/membership_layout.hpp"

namespace ferry::wire {

namespace {

/// Number of tokens, then the gap before each: the tokens skipped since the last one.
std::uint64_t gap_list_bytes(const std::vector<std::uint32_t>& tokens) {
  std::uint64_t bytes = varint_bytes(tokens.size());
  std::uint64_t next = 0;
  for (const std::uint32_t token : tokens) {
    bytes += varint_bytes(token - next);
    next = token + 1ULL;
  }
  return bytes;
}

struct Layout {
  std::uint8_t flags = 0;
  std::uint64_t token_bytes = 0;
  std::uint64_t bytes = 0;
};

Layout choose_layout(const plan::Membership& membership, const MembershipForm& form) {
  const std::uint64_t tokens = membership.tokens.size();
  FERRY_ASSERT(membership.entry_begin.size() == tokens + 1 &&
                   membership.entry_begin.back() == membership.columns.size() &&
                   membership.weights.size() == membership.columns.size(),
               "{} tokens, {} offsets, {} columns, {} weights", tokens,
               membership.entry_begin.size(), membership.columns.size(), membership.weights.size());
  FERRY_ASSERT(!form.slots || membership.slots.size() == membership.columns.size(),
               "{} slots for {} columns", membership.slots.size(), membership.columns.size());
  Layout layout;
  const std::uint64_t mask_bytes = bitmask_bytes(membership.num_tokens);
  // A gap takes a byte at least, so that most dense lists are settled without looking at them.
  const std::uint64_t gap_bytes =
      tokens >= mask_bytes ? tokens + 1 : gap_list_bytes(membership.tokens);
  if (mask_bytes <= gap_bytes) layout.flags |= kBitmask;
  layout.token_bytes = std::min(mask_bytes, gap_bytes);

  std::uint32_t max_count = 0;
  for (std::uint64_t i = 0; i < tokens; ++i) {
    max_count = std::max(max_count, membership.entry_begin[i + 1] - membership.entry_begin[i]);
  }
  FERRY_ASSERT(max_count <= kMaxCount, "a token has {} entries", max_count);
  if (max_count <= kMaxNibble) layout.flags |= kNibbleCounts;
  if (form.num_columns > kMaxNarrowColumns) layout.flags |= kWideColumns;
  if (form.slots) layout.flags |= kSlots;
  if (!form.weights) layout.flags |= kNoWeights;
  layout.bytes = kMembershipPrefixBytes + layout.token_bytes + count_bytes(tokens, layout.flags) +
                 membership.columns.size() * entry_bytes(layout.flags);
  return layout;
}

/// Requires: zeros at `at` (a bitmask sets bits only).
std::byte* store_tokens(std::byte* at, const plan::Membership& membership, const Layout& layout) {
  if ((layout.flags & kBitmask) != 0) {
    for (const std::uint32_t token : membership.tokens) {
      at[token / 8] |= static_cast<std::byte>(1U << (token % 8));
    }
    return at + layout.token_bytes;
  }
  at = store_varint(at, membership.tokens.size());
  std::uint64_t next = 0;
  for (const std::uint32_t token : membership.tokens) {
    at = store_varint(at, token - next);
    next = token + 1ULL;
  }
  return at;
}

std::byte* store_counts(std::byte* at, const plan::Membership& membership, std::uint8_t flags) {
  const std::uint32_t* begin = membership.entry_begin.data();
  const std::size_t tokens = membership.tokens.size();
  if ((flags & kNibbleCounts) == 0) {
    for (std::size_t i = 0; i < tokens; ++i) {
      *at++ = static_cast<std::byte>(begin[i + 1] - begin[i]);
    }
    return at;
  }
  std::size_t i = 0;
  for (; i + 1 < tokens; i += 2) {
    const std::uint32_t low = begin[i + 1] - begin[i];
    const std::uint32_t high = begin[i + 2] - begin[i + 1];
    *at++ = static_cast<std::byte>(low | high << 4);
  }
  if (i < tokens) *at++ = static_cast<std::byte>(begin[i + 1] - begin[i]);
  return at;
}

std::byte* store_columns(std::byte* at, const std::vector<std::uint16_t>& columns,
                         std::uint8_t flags) {
  if ((flags & kWideColumns) != 0) {
    return store_block(at, columns.data(), columns.size() * sizeof(columns[0]));
  }
  for (std::size_t i = 0; i < columns.size(); ++i) at[i] = static_cast<std::byte>(columns[i]);
  return at + columns.size();
}

}  // namespace

std::uint64_t encoded_membership_bytes(const plan::Membership& membership,
                                       const MembershipForm& form) {
  return choose_layout(membership, form).bytes;
}

void encode_membership(const plan::Membership& membership, const MembershipForm& form,
                       std::vector<std::byte>& out) {
  FERRY_ASSERT_SLOW(std::all_of(membership.columns.begin(), membership.columns.end(),
                                [&](int column) { return column < form.num_columns; }),
                    "a column is not below {}", form.num_columns);
  FERRY_ASSERT_SLOW(std::adjacent_find(membership.tokens.begin(), membership.tokens.end(),
                                       std::greater_equal<>()) == membership.tokens.end(),
                    "tokens do not ascend");
  FERRY_ASSERT(membership.tokens.empty() || membership.tokens.back() < membership.num_tokens,
               "token {} of {}", membership.tokens.back(), membership.num_tokens);
  const Layout layout = choose_layout(membership, form);
  const std::size_t before = out.size();
  out.resize(before + layout.bytes);
  std::byte* at = out.data() + before;
  *at++ = std::byte{kMembershipVersion};
  *at++ = std::byte{layout.flags};
  at = store_tokens(at, membership, layout);
  at = store_counts(at, membership, layout.flags);
  at = store_columns(at, membership.columns, layout.flags);
  if (form.slots) at = store_block(at, membership.slots.data(), membership.slots.size());
  if (form.weights) {
    at = store_block(at, membership.weights.data(), membership.weights.size() * sizeof(float));
  }
  FERRY_ASSERT(at == out.data() + out.size(), "wrote {} bytes of {}", at - out.data() - before,
               layout.bytes);
}

}  // namespace ferry::wire
