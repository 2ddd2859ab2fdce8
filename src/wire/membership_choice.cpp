// Sizes of all encodings but runs follow from numbers of tokens, entries and columns alone; runs
// are estimated.

#include "wire/membership_choice.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "wire/membership_layout.hpp"

namespace ferry::wire {

namespace {

/// What earlier plans count for beside one of which nothing is looked at.
constexpr double kMemory = 0.25;
/// Tokens of a plan that are looked at: all, or so many stretches of so many.
constexpr std::size_t kStretches = 8;
constexpr std::size_t kStretch = 64;
/// Share of both lists that one may take more than another that is decoded more slowly.
constexpr double kTolerance = 1.0 / 32;

constexpr double kCannot = std::numeric_limits<double>::infinity();
/// By ListEncoding; of those that cannot be used kCannot.
using Sizes = std::array<double, kListEncodings.size()>;

double& size_of(Sizes& sizes, ListEncoding encoding) {
  return sizes[static_cast<std::size_t>(encoding)];
}

/// From the fastest to decode to the slowest.
using Order = std::array<ListEncoding, kListEncodings.size()>;
constexpr Order kTokenOrder{ListEncoding::raw, ListEncoding::bitmask, ListEncoding::packed,
                            ListEncoding::runs};
constexpr Order kExpertOrder{ListEncoding::raw, ListEncoding::packed, ListEncoding::bitmask,
                             ListEncoding::runs};

/// The first of those that take the fewest bytes, or `tolerance` more.
ListEncoding smallest(const Sizes& sizes, const Order& order, double tolerance) {
  const auto size = [&](ListEncoding encoding) {
    return sizes[static_cast<std::size_t>(encoding)];
  };
  ListEncoding best = order.front();
  for (const ListEncoding other : order) {
    if (size(other) + tolerance < size(best)) best = other;
  }
  return best;
}

/// Mean bits of a gamma code for lengths of runs that go on with the same chance at each step.
double mean_gamma_bits(double mean_length) {
  // 1 + 2 x the mean of floor(log2 length): a length is 2^j or more with chance go_on^(2^j - 1).
  if (mean_length <= 1) return 1;
  const double go_on = 1 - 1 / mean_length;
  double sum = 0;
  // go_on^(2^j)
  for (double power = go_on * go_on; power > 1e-6; power *= power) sum += power;
  return 1 + 2 * sum / go_on;
}

/// Bits of the runs of a token list where `count` of `num_tokens` come at random.
double random_run_bits(double num_tokens, double count) {
  const double others = num_tokens - count;
  return count * (others + 1) / num_tokens * mean_gamma_bits(num_tokens / (others + 1)) +
         others * (count + 1) / num_tokens * mean_gamma_bits(num_tokens / (count + 1));
}

double run_token_bytes(const plan::Membership& membership, const MembershipHistory& history) {
  if (membership.num_tokens == 0) return 0;
  const double bits = random_run_bits(static_cast<double>(membership.num_tokens),
                                      static_cast<double>(membership.tokens.size()));
  return std::ceil((1 + bits * history.token_runs()) / 8);
}

double run_expert_bytes(const ExpertLists& lists, const MembershipForm& form,
                        const MembershipHistory& history) {
  if (entry_bytes(form) == 0) return kCannot;
  if (lists.tokens == 0) return 0;
  const auto tokens = static_cast<double>(lists.tokens);
  const double runs = std::max(history.new_experts() * tokens, 1.0);
  const double entries = runs * static_cast<double>(lists.entries()) / tokens;
  const double count_bits = std::min(entries, runs * std::bit_width(lists.count_bits));
  return 1 + std::ceil(runs * mean_gamma_bits(tokens / runs) / 8) + std::ceil(count_bits / 8) +
         std::ceil(entries * column_width(form.num_columns) / 8);
}

double log2_choose(std::uint64_t of, std::uint64_t count) {
  double bits = 0;
  for (std::uint64_t i = 1; i <= std::min(count, of - count); ++i) {
    bits += std::log2(static_cast<double>(of - i + 1) / static_cast<double>(i));
  }
  return bits;
}

double log2_factorial(std::uint64_t of) {
  double bits = 0;
  for (std::uint64_t i = 2; i <= of; ++i) bits += std::log2(static_cast<double>(i));
  return bits;
}

}  // namespace

void MembershipHistory::learn(const plan::Membership& membership) {
  const std::size_t count = membership.tokens.size();
  if (count == 0) return;
  const std::size_t seen = std::min(count, kStretches * kStretch);
  const double unseen = 1 - static_cast<double>(seen) / static_cast<double>(count);
  for (double* const sum : {&run_bits_, &random_run_bits_, &new_lists_, &lists_}) {
    *sum *= kMemory * unseen;
  }
  if (seen == count) {
    look_at(membership, 0, count);
    return;
  }
  for (std::size_t i = 0; i < kStretches; ++i) {
    look_at(membership, (count - kStretch) * i / (kStretches - 1), kStretch);
  }
}

void MembershipHistory::look_at(const plan::Membership& membership, std::size_t begin,
                                std::size_t length) {
  const std::size_t count = membership.tokens.size();
  const auto tokens = std::span(membership.tokens).subspan(begin, length);
  const std::uint64_t first = begin == 0 ? 0 : membership.tokens[begin - 1] + 1ULL;
  const std::uint64_t end = begin + length == count ? membership.num_tokens : tokens.back() + 1ULL;
  const double share = static_cast<double>(length) / static_cast<double>(count);
  run_bits_ += static_cast<double>(token_run_bits(tokens, first, end));
  random_run_bits_ += share * random_run_bits(static_cast<double>(membership.num_tokens),
                                              static_cast<double>(count));

  const std::size_t before = begin == 0 ? 0 : 1;  // the first token begins a run if nothing is
  const ExpertLists lists(
      std::span(membership.entry_begin).subspan(begin - before, length + before + 1),
      membership.columns);
  std::uint64_t new_lists = 1 - before;
  for (std::uint64_t i = 1; i < lists.tokens; ++i) new_lists += equals_last(lists, i) ? 0 : 1;
  new_lists_ += static_cast<double>(new_lists);
  lists_ += static_cast<double>(length);
}

IndexEncoding choose_encoding(const plan::Membership& membership, const MembershipForm& form,
                              MembershipHistory& history) {
  history.learn(membership);
  const ExpertLists lists(membership);
  Sizes tokens{};
  Sizes experts{};
  for (const ListEncoding encoding :
       {ListEncoding::raw, ListEncoding::bitmask, ListEncoding::packed}) {
    size_of(tokens, encoding) = static_cast<double>(token_list_bytes(membership, encoding));
    size_of(experts, encoding) =
        static_cast<double>(expert_list_bytes(lists, form.num_columns, encoding));
  }
  size_of(tokens, ListEncoding::runs) = run_token_bytes(membership, history);
  size_of(experts, ListEncoding::runs) = run_expert_bytes(lists, form, history);
  const double tolerance =
      kTolerance * (std::ranges::min(tokens) + std::ranges::min(experts) + kMembershipPrefixBytes);
  // Whether a bitmask can be used is only looked at where it would be.
  if (smallest(experts, kExpertOrder, tolerance) == ListEncoding::bitmask &&
      !order_is_known(membership, form)) {
    size_of(experts, ListEncoding::bitmask) = kCannot;
  }
  return {smallest(tokens, kTokenOrder, tolerance), smallest(experts, kExpertOrder, tolerance)};
}

IndexEncoding best_encoding(const plan::Membership& membership, const MembershipForm& form) {
  const ExpertLists lists(membership);
  Sizes tokens{};
  Sizes experts{};
  for (const ListEncoding encoding : kListEncodings) {
    size_of(tokens, encoding) = static_cast<double>(token_list_bytes(membership, encoding));
    size_of(experts, encoding) =
        can_hold(encoding, membership, form)
            ? static_cast<double>(expert_list_bytes(lists, form.num_columns, encoding))
            : kCannot;
  }
  return {smallest(tokens, kTokenOrder, 0), smallest(experts, kExpertOrder, 0)};
}

double index_entropy_bits(const plan::Membership& membership, const MembershipForm& form) {
  const ExpertLists lists(membership);
  std::array<std::uint64_t, kMaxCount + 1> tokens_with{};  // so many entries
  for (std::uint64_t i = 0; i < lists.tokens; ++i) ++tokens_with[lists.count(i)];
  const auto columns = static_cast<std::uint64_t>(form.num_columns);
  double at_random = 0;
  double order = 0;
  std::uint64_t left = lists.tokens;
  for (std::uint64_t count = 1; left > 0; ++count) {
    const std::uint64_t tokens = tokens_with[count];
    at_random += log2_choose(left, tokens);
    at_random += static_cast<double>(tokens) * log2_choose(columns, count);
    order += static_cast<double>(tokens) * log2_factorial(count);
    left -= tokens;
  }
  double by_frequency =
      static_cast<double>(columns) / 2 * std::log2(static_cast<double>(lists.tokens + 1));
  for (const std::uint32_t tokens : plan::count_columns(membership, form.num_columns)) {
    by_frequency += log2_choose(lists.tokens, tokens);
  }
  return log2_choose(membership.num_tokens, lists.tokens) + std::min(at_random, by_frequency) +
         (order_is_known(membership, form) ? 0 : order);
}

}  // namespace ferry::wire
