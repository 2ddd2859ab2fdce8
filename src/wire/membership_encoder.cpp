// The encoder of memberships: sizes the whole exactly, then writes it in one pass.

#include <algorithm>
#include <functional>
#include <utility>

#include "base/check.hpp"
#include "wire/bytes.hpp"
#include "wire/membership_layout.hpp"

namespace ferry {

std::string_view to_string(ListEncoding encoding) {
  switch (encoding) {
    case ListEncoding::raw: return "raw";
    case ListEncoding::bitmask: return "bitmask";
    case ListEncoding::packed: return "packed";
    case ListEncoding::runs: return "runs";
  }
  return "?";
}

namespace wire {

namespace {

/// The columns of a token by number, and its weights likewise.
void order_by_column(std::span<std::uint16_t> columns, std::span<float> weights) {
  for (std::size_t i = 1; i < columns.size(); ++i) {
    for (std::size_t at = i; at > 0 && columns[at - 1] > columns[at]; --at) {
      std::swap(columns[at - 1], columns[at]);
      std::swap(weights[at - 1], weights[at]);
    }
  }
}

/// Weights in the order in which a bitmask gives the columns.
std::vector<float> weights_by_column(const plan::Membership& membership) {
  std::vector<std::uint16_t> columns = membership.columns;
  std::vector<float> weights = membership.weights;
  for (std::size_t i = 0; i < membership.tokens.size(); ++i) {
    const std::uint32_t first = membership.entry_begin[i];
    const std::uint32_t count = membership.entry_begin[i + 1] - first;
    order_by_column(std::span(columns).subspan(first, count),
                    std::span(weights).subspan(first, count));
  }
  return weights;
}

void check_input(const plan::Membership& membership, const MembershipForm& form,
                 [[maybe_unused]] IndexEncoding encoding) {
  const std::uint64_t tokens = membership.tokens.size();
  FERRY_ASSERT(membership.entry_begin.size() == tokens + 1 &&
                   membership.entry_begin.back() == membership.columns.size() &&
                   membership.weights.size() == membership.columns.size(),
               "{} tokens, {} offsets, {} columns, {} weights", tokens,
               membership.entry_begin.size(), membership.columns.size(), membership.weights.size());
  FERRY_ASSERT(!form.slots || membership.slots.size() == membership.columns.size(),
               "{} slots for {} columns", membership.slots.size(), membership.columns.size());
  FERRY_ASSERT(membership.tokens.empty() || membership.tokens.back() < membership.num_tokens,
               "token {} of {}", membership.tokens.back(), membership.num_tokens);
  FERRY_ASSERT_SLOW(std::all_of(membership.columns.begin(), membership.columns.end(),
                                [&](int column) { return column < form.num_columns; }),
                    "a column is not below {}", form.num_columns);
  FERRY_ASSERT_SLOW(std::adjacent_find(membership.tokens.begin(), membership.tokens.end(),
                                       std::greater_equal<>()) == membership.tokens.end(),
                    "tokens do not ascend");
  FERRY_ASSERT_SLOW(can_hold(encoding.experts, membership, form), "{} cannot hold these experts",
                    to_string(encoding.experts));
}

}  // namespace

bool can_hold(ListEncoding experts, const plan::Membership& membership,
              const MembershipForm& form) {
  switch (experts) {
    case ListEncoding::raw:
    case ListEncoding::packed: return true;
    case ListEncoding::bitmask: return order_is_known(membership, form);
    case ListEncoding::runs: return entry_bytes(form) != 0;
  }
  return false;
}

std::uint64_t index_bytes(const plan::Membership& membership, const MembershipForm& form,
                          IndexEncoding encoding) {
  return kMembershipPrefixBytes + token_list_bytes(membership, encoding.tokens) +
         expert_list_bytes(ExpertLists(membership), form.num_columns, encoding.experts);
}

std::uint64_t encoded_membership_bytes(const plan::Membership& membership,
                                       const MembershipForm& form, IndexEncoding encoding) {
  return index_bytes(membership, form, encoding) + membership.num_entries() * entry_bytes(form);
}

std::uint64_t encode_membership(const plan::Membership& membership, const MembershipForm& form,
                                IndexEncoding encoding, std::vector<std::byte>& out) {
  check_input(membership, form, encoding);
  const std::uint64_t token_bytes = token_list_bytes(membership, encoding.tokens);
  const ExpertLists lists(membership);
  FERRY_ASSERT(lists.count_bits < kMaxCount, "a token has 0 or more than {} entries", kMaxCount);
  const std::uint64_t expert_bytes = expert_list_bytes(lists, form.num_columns, encoding.experts);
  const std::size_t before = out.size();
  out.resize(before + kMembershipPrefixBytes + token_bytes + expert_bytes +
             membership.num_entries() * entry_bytes(form));
  std::byte* at = out.data() + before;
  *at++ = std::byte{kMembershipVersion};
  *at++ = static_cast<std::byte>(static_cast<unsigned>(encoding.tokens) |
                                 static_cast<unsigned>(encoding.experts) << kExpertsShift |
                                 (form.slots ? kSlots : 0U) | (form.weights ? 0U : kNoWeights));
  at = store_token_list(at, token_bytes, membership, encoding.tokens);
  at = store_expert_list(at, expert_bytes, lists, form.num_columns, encoding.experts);
  if (form.slots) at = store_block(at, membership.slots.data(), membership.slots.size());
  if (form.weights && encoding.experts == ListEncoding::bitmask) {
    const std::vector<float> weights = weights_by_column(membership);
    at = store_block(at, weights.data(), weights.size() * sizeof(float));
  } else if (form.weights) {
    at = store_block(at, membership.weights.data(), membership.weights.size() * sizeof(float));
  }
  FERRY_ASSERT(at == out.data() + out.size(), "wrote {} bytes of {}", at - out.data() - before,
               out.size() - before);
  return kMembershipPrefixBytes + token_bytes + expert_bytes;
}

}  // namespace wire

}  // namespace ferry
