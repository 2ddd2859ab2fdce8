// Routing checked before anything is made of it. What is as it should be is settled by loops
// without an exit, which are a few SIMD instructions; what is wrong is looked for only when
// something is.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <span>
#include <type_traits>

#include <fmt/format.h>

#include "plan/as_size.hpp"
#include "plan/membership.hpp"

namespace ferry::plan {
namespace {

constexpr int kMaxTopk = 64;
constexpr std::uint64_t kMaxEntries = std::uint64_t{1} << 32;  ///< item numbers are 32 bit

std::optional<std::string> find_size_error(const Routing& routing, int rank) {
  if (routing.num_topk < 1 || routing.num_topk > kMaxTopk) {
    return fmt::format(
        "plan: num_topk = {} on rank {}; allowed: 1..{}; fix: pass the number of "
        "columns of topk_idx",
        routing.num_topk, rank, kMaxTopk);
  }
  if (routing.num_tokens < 0) {
    return fmt::format(
        "plan: num_tokens = {} on rank {}; allowed: 0 and above; fix: pass the number "
        "of rows of topk_idx",
        routing.num_tokens, rank);
  }
  const std::uint64_t limit = kMaxEntries / static_cast<std::uint64_t>(routing.num_topk);
  if (static_cast<std::uint64_t>(routing.num_tokens) >= limit) {
    return fmt::format(
        "plan: num_tokens = {} on rank {}; allowed: below {}, because num_tokens x "
        "num_topk must be below 2^32 and num_topk = {}; fix: split the batch",
        routing.num_tokens, rank, limit, routing.num_topk);
  }
  return std::nullopt;
}

std::optional<std::string> find_shape_error(const Routing& routing, int rank) {
  const bool has32 = !routing.topk_idx32.empty();
  const bool has64 = !routing.topk_idx64.empty();
  if (has32 == has64) {
    return fmt::format(
        "plan: {} of topk_idx32 and topk_idx64 on rank {} hold values; allowed: exactly "
        "one, because num_tokens = {}; fix: pass topk_idx once, as int32 or int64",
        has32 ? "both" : "none", rank, routing.num_tokens);
  }
  const std::size_t needed = as_size(routing.num_tokens) * as_size(routing.num_topk);
  const std::size_t given = has64 ? routing.topk_idx64.size() : routing.topk_idx32.size();
  if (given < needed) {
    return fmt::format(
        "plan: topk_idx has {} values on rank {}; allowed: at least {} (num_tokens {} "
        "x num_topk {}); fix: pass [num_tokens, num_topk], or a smaller num_tokens",
        given, rank, needed, routing.num_tokens, routing.num_topk);
  }
  if (!routing.topk_weights.empty() && routing.topk_weights.size() < needed) {
    return fmt::format(
        "plan: topk_weights has {} values on rank {}; allowed: none (weight 1/num_topk "
        "each) or at least {} (num_tokens {} x num_topk {}); fix: pass the shape of "
        "topk_idx",
        routing.topk_weights.size(), rank, needed, routing.num_tokens, routing.num_topk);
  }
  return std::nullopt;
}

/// Position of the first id outside -1..num_experts-1; `count` when all are inside.
template <typename Index>
std::size_t first_bad_id(std::span<const Index> idx, std::size_t count, int num_experts) {
  using Unsigned = std::make_unsigned_t<Index>;
  const auto allowed = static_cast<Unsigned>(num_experts);
  // -1 becomes 0 and every other negative id a huge number: one comparison per id.
  const auto is_bad = [&](Index id) {
    return static_cast<Unsigned>(static_cast<Unsigned>(id) + 1U) > allowed;
  };
  Unsigned any = 0;
  for (std::size_t at = 0; at < count; ++at) any |= is_bad(idx[at]) ? 1U : 0U;
  if (any == 0) return count;
  std::size_t at = 0;
  while (!is_bad(idx[at])) ++at;
  return at;
}

/// One pass, over the bits, that settles a routing as it should be: no NaN and no infinity.
bool all_finite(std::span<const float> weights) {
  constexpr std::int32_t kExponent = 0x7F800000;
  std::int32_t any = 0;
  for (const float weight : weights) {
    any |= (std::bit_cast<std::int32_t>(weight) & 0x7FFFFFFF) >= kExponent ? 1 : 0;
  }
  return any == 0;
}

// The sum of a token's weights for one expert, in slot order, as it will be used.
float weight_sum(const Routing& routing, std::int64_t token, std::int64_t expert) {
  float sum = 0;
  for (int slot = 0; slot < routing.num_topk; ++slot) {
    if (routing.expert(token, slot) == expert) sum += routing.weight(token, slot);
  }
  return sum;
}

// +Inf and -Inf for the same expert of a token would make a NaN.
std::optional<std::string> find_opposed_weights(const Routing& routing, int rank) {
  const std::size_t count = as_size(routing.num_tokens) * as_size(routing.num_topk);
  for (std::size_t at = 0; at < count; ++at) {
    if (!std::isinf(routing.topk_weights[at])) continue;
    const auto token = static_cast<std::int64_t>(at / as_size(routing.num_topk));
    const auto slot = static_cast<int>(at % as_size(routing.num_topk));
    const std::int64_t expert = routing.expert(token, slot);
    if (expert < 0 || !std::isnan(weight_sum(routing, token, expert))) continue;
    return fmt::format(
        "plan: the weights of token {} for expert {} on rank {} are infinite with both signs; "
        "allowed: a sum that is a number; fix: look for an overflow in the router",
        token, expert, rank);
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> find_routing_error(const Routing& routing, int num_experts, int rank) {
  if (auto error = find_size_error(routing, rank)) return error;
  if (routing.num_tokens == 0) return std::nullopt;
  if (auto error = find_shape_error(routing, rank)) return error;

  const std::size_t count = as_size(routing.num_tokens) * as_size(routing.num_topk);
  const std::size_t bad_id = routing.topk_idx64.empty()
                                 ? first_bad_id(routing.topk_idx32, count, num_experts)
                                 : first_bad_id(routing.topk_idx64, count, num_experts);
  const auto num_topk = as_size(routing.num_topk);
  if (bad_id < count) {
    const auto token = static_cast<std::int64_t>(bad_id / num_topk);
    const auto slot = static_cast<int>(bad_id % num_topk);
    return fmt::format(
        "plan: topk_idx[{},{}] = {} on rank {} is not an expert; allowed: -1 (none) or "
        "0..{}, because num_experts = {}; fix: write -1 into slots without an expert, "
        "or make the placement with all experts of the router",
        token, slot, routing.expert(token, slot), rank, num_experts - 1, num_experts);
  }
  if (routing.topk_weights.empty()) return std::nullopt;
  const std::span<const float> weights = routing.topk_weights.first(count);
  if (all_finite(weights)) return std::nullopt;
  const auto nan = std::ranges::find_if(weights, [](float weight) { return std::isnan(weight); });
  if (nan == weights.end()) return find_opposed_weights(routing, rank);
  const auto bad_weight = static_cast<std::size_t>(nan - weights.begin());
  return fmt::format(
      "plan: topk_weights[{},{}] = nan on rank {}; allowed: any number but NaN, also in slots "
      "whose expert is -1; fix: look for a softmax over masked or infinite scores",
      bad_weight / num_topk, bad_weight % num_topk, rank);
}

}  // namespace ferry::plan
