// Routing split by node. Two passes over topk_idx: one counts slots per node, one fills arrays with
// room for them; repeats of an expert inside a token are found with a stamp per expert, so the cost
// is linear in num_tokens x num_topk for any number of nodes, experts and slots.

#include "plan/membership.hpp"

#include <algorithm>
#include <cstddef>
#include <span>

#include "plan/as_size.hpp"
#include "plan/memory.hpp"

namespace ferry::plan {
namespace {

/// Splits one routing; lives for one call. Stamps hold token + 1, so that 0 means "not yet".
class Splitter {
 public:
  Splitter(const Routing& routing, const ExpertIndex& experts, const SplitForm& form,
           std::vector<Membership>& out)
      : routing_(routing), with_slots_(form.slots), out_(out), sides_(as_size(form.num_nodes)) {
    out_.resize(sides_.size());
    experts_.reserve(as_size(experts.num_experts()));
    for (int expert = 0; expert < experts.num_experts(); ++expert) {
      experts_.push_back({.node = static_cast<std::uint32_t>(experts.node_of(expert)),
                          .column = static_cast<std::uint16_t>(experts.column_of(expert))});
    }
  }

  template <typename Index>
  void split(std::span<const Index> idx) {
    make_room(idx);
    if (sides_.size() == 1) {
      Side side = sides_.front();  // its counts stay in registers
      visit(idx, [&](const Named& named, Expert& expert) { add(named, expert, side); });
      sides_.front() = side;
    } else {
      visit(idx,
            [&](const Named& named, Expert& expert) { add(named, expert, sides_[expert.node]); });
    }
    for (std::size_t node = 0; node < sides_.size(); ++node) end(sides_[node], out_[node]);
  }

 private:
  struct Expert {
    std::uint32_t node = 0;
    std::uint32_t stamp = 0;  ///< the last token that named it
    std::uint32_t entry = 0;  ///< of that token
    std::uint16_t column = 0;
  };
  struct Named {
    std::uint32_t token;
    std::uint8_t slot;
    float weight;
  };
  /// Where the membership of a node is written.
  struct Side {
    std::uint32_t* tokens = nullptr;
    std::uint32_t* entry_begin = nullptr;
    std::uint16_t* columns = nullptr;
    float* weights = nullptr;
    std::uint8_t* slots = nullptr;
    std::uint32_t num_tokens = 0;
    std::uint32_t num_entries = 0;
    std::uint32_t stamp = 0;  ///< the last token that came here
  };

  /// Room for all slots that name an expert of the node, repeats included: what is too much is only
  /// address space of memory that is used again.
  template <typename Index>
  void make_room(std::span<const Index> idx) {
    const std::size_t count = as_size(routing_.num_tokens) * as_size(routing_.num_topk);
    std::vector<std::size_t> num_entries(sides_.size(), sides_.size() == 1 ? count : 0);
    for (std::size_t at = 0; sides_.size() > 1 && at < count; ++at) {
      if (idx[at] >= 0) ++num_entries[experts_[static_cast<std::size_t>(idx[at])].node];
    }
    for (std::size_t node = 0; node < sides_.size(); ++node) {
      Membership& membership = out_[node];
      const std::size_t num_tokens = std::min(num_entries[node], as_size(routing_.num_tokens));
      membership.num_tokens = static_cast<std::uint64_t>(routing_.num_tokens);
      resize_for_overwrite(membership.tokens, num_tokens + 1);  // see add
      resize_for_overwrite(membership.entry_begin, num_tokens + 1);
      resize_for_overwrite(membership.columns, num_entries[node]);
      resize_for_overwrite(membership.weights, num_entries[node]);
      resize_for_overwrite(membership.slots, with_slots_ ? num_entries[node] : 0);
      membership.entry_begin[0] = 0;
      sides_[node] = {.tokens = membership.tokens.data(),
                      .entry_begin = membership.entry_begin.data(),
                      .columns = membership.columns.data(),
                      .weights = membership.weights.data(),
                      .slots = membership.slots.data()};
    }
  }

  template <typename Index, typename Visitor>
  void visit(std::span<const Index> idx, const Visitor& visitor) {
    const auto num_topk = as_size(routing_.num_topk);
    const auto num_tokens = static_cast<std::uint32_t>(routing_.num_tokens);
    const bool weighted = !routing_.topk_weights.empty();
    const float same_weight = 1.0F / static_cast<float>(routing_.num_topk);
    std::size_t at = 0;
    for (std::uint32_t token = 0; token < num_tokens; ++token) {
      for (std::size_t slot = 0; slot < num_topk; ++slot, ++at) {
        if (idx[at] < 0) continue;
        const float weight = weighted ? routing_.topk_weights[at] : same_weight;
        visitor({token, static_cast<std::uint8_t>(slot), weight},
                experts_[static_cast<std::size_t>(idx[at])]);
      }
    }
  }

  void add(const Named& named, Expert& expert, Side& side) const {
    if (expert.stamp == named.token + 1) {
      side.weights[expert.entry] += named.weight;
      return;
    }
    expert.stamp = named.token + 1;
    expert.entry = side.num_entries;
    // Whether a token is new on a node is as good as random: written in any case, counted if so.
    side.tokens[side.num_tokens] = named.token;
    side.num_tokens += side.stamp != named.token + 1 ? 1 : 0;
    side.stamp = named.token + 1;
    side.columns[side.num_entries] = expert.column;
    side.weights[side.num_entries] = named.weight;
    if (with_slots_) side.slots[side.num_entries] = named.slot;
    side.entry_begin[side.num_tokens] = ++side.num_entries;
  }

  static void end(const Side& side, Membership& membership) {
    membership.tokens.resize(side.num_tokens);
    membership.entry_begin.resize(side.num_tokens + 1);
    membership.columns.resize(side.num_entries);
    membership.weights.resize(side.num_entries);
    if (!membership.slots.empty()) membership.slots.resize(side.num_entries);
  }

  const Routing& routing_;
  const bool with_slots_;
  std::vector<Membership>& out_;
  std::vector<Expert> experts_;
  std::vector<Side> sides_;
};

}  // namespace

std::uint64_t memory_bytes(const Membership& membership) {
  return capacity_bytes(membership.tokens, membership.entry_begin, membership.columns,
                        membership.weights, membership.slots);
}

std::vector<Membership> split_by_node(const Routing& routing, const ExpertIndex& experts,
                                      const Topology& topology, bool with_slots) {
  std::vector<Membership> result;
  split_by_node(routing, experts, {.num_nodes = topology.num_nodes(), .slots = with_slots}, result);
  return result;
}

void split_by_node(const Routing& routing, const ExpertIndex& experts, const SplitForm& form,
                   std::vector<Membership>& out) {
  Splitter splitter(routing, experts, form, out);
  if (routing.topk_idx64.empty()) {
    splitter.split(routing.topk_idx32);
  } else {
    splitter.split(routing.topk_idx64);
  }
}

std::vector<std::uint16_t> local_ranks(const ExpertIndex& experts, const Topology& topology,
                                       int node) {
  std::vector<std::uint16_t> result;
  result.reserve(as_size(experts.num_columns(node)));
  for (const int expert : experts.experts_of_node(node)) {
    result.push_back(static_cast<std::uint16_t>(topology.local_index(experts.rank_of(expert))));
  }
  return result;
}

void group_by_rank(const Membership& membership, std::span<const std::uint16_t> local_rank,
                   Membership& grouped) {
  grouped.num_tokens = membership.num_tokens;
  grouped.tokens = membership.tokens;
  grouped.entry_begin.assign(1, 0);
  grouped.entry_begin.reserve(membership.entry_begin.size());
  grouped.columns.clear();
  grouped.columns.reserve(membership.columns.size());
  for (std::size_t i = 0; i < membership.tokens.size(); ++i) {
    const auto first = static_cast<std::ptrdiff_t>(grouped.columns.size());
    for (std::uint32_t e = membership.entry_begin[i]; e < membership.entry_begin[i + 1]; ++e) {
      grouped.columns.push_back(local_rank[membership.columns[e]]);
    }
    std::sort(grouped.columns.begin() + first, grouped.columns.end());
    grouped.columns.erase(std::unique(grouped.columns.begin() + first, grouped.columns.end()),
                          grouped.columns.end());
    grouped.entry_begin.push_back(static_cast<std::uint32_t>(grouped.columns.size()));
  }
  grouped.weights.assign(grouped.columns.size(), 1.0F);
  grouped.slots.clear();
}

std::uint64_t count_rank_rows(const Membership& membership,
                              std::span<const std::uint16_t> local_rank) {
  const auto most = std::ranges::max_element(local_rank);
  std::vector<std::size_t> last_token(most == local_rank.end() ? 0 : std::size_t{*most} + 1);
  std::uint64_t rows = 0;
  for (std::size_t i = 0; i < membership.tokens.size(); ++i) {
    for (std::uint32_t e = membership.entry_begin[i]; e < membership.entry_begin[i + 1]; ++e) {
      std::size_t& last = last_token[local_rank[membership.columns[e]]];
      rows += last != i + 1 ? 1 : 0;
      last = i + 1;
    }
  }
  return rows;
}

std::vector<std::uint32_t> count_columns(const Membership& membership, int num_columns) {
  std::vector<std::uint32_t> counts(as_size(num_columns));
  for (const std::uint16_t column : membership.columns) ++counts[column];
  return counts;
}

}  // namespace ferry::plan
