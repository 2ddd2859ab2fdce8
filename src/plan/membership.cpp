// Routing checked and split by node. Two passes over topk_idx: one counts, one fills exactly
// reserved arrays; repeats of an expert inside a token are found with a stamp per expert, so the
// cost is linear in num_tokens x num_topk for any number of nodes, experts and slots.

#include "plan/membership.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>

namespace ferry::plan {
namespace {

constexpr int kMaxTopk = 64;
constexpr std::uint64_t kMaxEntries = std::uint64_t{1} << 32;  ///< item numbers are 32 bit

std::size_t as_size(std::int64_t value) { return static_cast<std::size_t>(value); }

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
  const auto allowed = static_cast<std::uint64_t>(num_experts);
  // -1 becomes 0 and every other negative id a huge number: one comparison per id.
  const auto is_bad = [&](Index id) {
    return static_cast<std::uint64_t>(static_cast<std::int64_t>(id)) + 1 > allowed;
  };
  bool any = false;
  for (std::size_t at = 0; at < count; ++at) any |= is_bad(idx[at]);
  if (!any) return count;
  std::size_t at = 0;
  while (!is_bad(idx[at])) ++at;
  return at;
}

std::size_t first_nan(std::span<const float> weights, std::size_t count) {
  bool any = false;
  for (std::size_t at = 0; at < count; ++at) any |= std::isnan(weights[at]);
  if (!any) return count;
  std::size_t at = 0;
  while (!std::isnan(weights[at])) ++at;
  return at;
}

/// Splits one routing; lives for one call. Stamps hold token + 1, so that 0 means "not yet".
class Splitter {
 public:
  Splitter(const Routing& routing, const ExpertIndex& experts, const Topology& topology,
           bool with_slots)
      : routing_(routing),
        with_slots_(with_slots),
        experts_(experts),
        num_topk_(as_size(routing.num_topk)),
        expert_stamp_(as_size(experts.num_experts())),
        node_stamp_(as_size(topology.num_nodes())),
        entry_of_expert_(as_size(experts.num_experts())),
        result_(as_size(topology.num_nodes())) {
    for (Membership& membership : result_) {
      membership.num_tokens = static_cast<std::uint64_t>(routing.num_tokens);
    }
  }

  template <typename Index>
  std::vector<Membership> split(std::span<const Index> idx) {
    reserve(idx);
    const auto num_tokens = static_cast<std::uint32_t>(routing_.num_tokens);
    for (std::uint32_t token = 0; token < num_tokens; ++token) {
      const std::size_t first = token * num_topk_;
      for (std::size_t slot = 0; slot < num_topk_; ++slot) {
        if (idx[first + slot] < 0) continue;
        add(token, static_cast<int>(slot), static_cast<std::size_t>(idx[first + slot]));
      }
    }
    return std::move(result_);
  }

 private:
  template <typename Index>
  void reserve(std::span<const Index> idx) {
    std::vector<std::size_t> num_tokens(result_.size());
    std::vector<std::size_t> num_entries(result_.size());
    const auto end = static_cast<std::uint32_t>(routing_.num_tokens);
    for (std::uint32_t token = 0; token < end; ++token) {
      for (std::size_t slot = 0; slot < num_topk_; ++slot) {
        const Index id = idx[token * num_topk_ + slot];
        if (id < 0 || !first_time(expert_stamp_[static_cast<std::size_t>(id)], token)) continue;
        const auto node = as_size(experts_.node_of(static_cast<int>(id)));
        ++num_entries[node];
        if (first_time(node_stamp_[node], token)) ++num_tokens[node];
      }
    }
    for (std::size_t node = 0; node < result_.size(); ++node) {
      result_[node].tokens.reserve(num_tokens[node]);
      result_[node].entry_begin.reserve(num_tokens[node] + 1);
      result_[node].columns.reserve(num_entries[node]);
      result_[node].weights.reserve(num_entries[node]);
      if (with_slots_) result_[node].slots.reserve(num_entries[node]);
    }
    expert_stamp_.assign(expert_stamp_.size(), 0);
    node_stamp_.assign(node_stamp_.size(), 0);
  }

  void add(std::uint32_t token, int slot, std::size_t expert) {
    const float weight = routing_.weight(token, slot);
    const auto node = as_size(experts_.node_of(static_cast<int>(expert)));
    Membership& membership = result_[node];
    if (!first_time(expert_stamp_[expert], token)) {
      membership.weights[entry_of_expert_[expert]] += weight;
      return;
    }
    if (first_time(node_stamp_[node], token)) {
      membership.tokens.push_back(token);
      membership.entry_begin.push_back(0);
    }
    const auto entry = static_cast<std::uint32_t>(membership.columns.size());
    entry_of_expert_[expert] = entry;
    membership.columns.push_back(
        static_cast<std::uint16_t>(experts_.column_of(static_cast<int>(expert))));
    membership.weights.push_back(weight);
    if (with_slots_) membership.slots.push_back(static_cast<std::uint8_t>(slot));
    membership.entry_begin.back() = entry + 1;
  }

  static bool first_time(std::uint32_t& stamp, std::uint32_t token) {
    const bool first = stamp != token + 1;
    stamp = token + 1;
    return first;
  }

  const Routing& routing_;
  const bool with_slots_;
  const ExpertIndex& experts_;
  std::size_t num_topk_;
  std::vector<std::uint32_t> expert_stamp_;
  std::vector<std::uint32_t> node_stamp_;
  std::vector<std::uint32_t> entry_of_expert_;
  std::vector<Membership> result_;
};

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
  const std::size_t bad_weight = first_nan(routing.topk_weights, count);
  if (bad_weight == count) return find_opposed_weights(routing, rank);
  return fmt::format(
      "plan: topk_weights[{},{}] = nan on rank {}; allowed: any number but NaN, also in slots "
      "whose expert is -1; fix: look for a softmax over masked or infinite scores",
      bad_weight / num_topk, bad_weight % num_topk, rank);
}

std::vector<Membership> split_by_node(const Routing& routing, const ExpertIndex& experts,
                                      const Topology& topology, bool with_slots) {
  Splitter splitter(routing, experts, topology, with_slots);
  return routing.topk_idx64.empty() ? splitter.split(routing.topk_idx32)
                                    : splitter.split(routing.topk_idx64);
}

Membership group_by_rank(const Membership& membership, const ExpertIndex& experts,
                         const Topology& topology, int node) {
  std::vector<std::uint16_t> place_of_column;
  for (const int expert : experts.experts_of_node(node)) {
    place_of_column.push_back(
        static_cast<std::uint16_t>(topology.local_index(experts.rank_of(expert))));
  }
  Membership grouped;
  grouped.num_tokens = membership.num_tokens;
  grouped.tokens = membership.tokens;
  grouped.entry_begin.reserve(membership.entry_begin.size());
  grouped.columns.reserve(membership.columns.size());
  for (std::size_t i = 0; i < membership.tokens.size(); ++i) {
    const auto first = static_cast<std::ptrdiff_t>(grouped.columns.size());
    for (std::uint32_t e = membership.entry_begin[i]; e < membership.entry_begin[i + 1]; ++e) {
      grouped.columns.push_back(place_of_column[membership.columns[e]]);
    }
    std::sort(grouped.columns.begin() + first, grouped.columns.end());
    grouped.columns.erase(std::unique(grouped.columns.begin() + first, grouped.columns.end()),
                          grouped.columns.end());
    grouped.entry_begin.push_back(static_cast<std::uint32_t>(grouped.columns.size()));
  }
  grouped.weights.assign(grouped.columns.size(), 1.0F);
  return grouped;
}

std::vector<std::uint32_t> count_columns(const Membership& membership, int num_columns) {
  std::vector<std::uint32_t> counts(as_size(num_columns));
  for (const std::uint16_t column : membership.columns) ++counts[column];
  return counts;
}

}  // namespace ferry::plan
