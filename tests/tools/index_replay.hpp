#pragma once
// Routing as the memberships that one rank sends, plan after plan, and what their lists take.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/generator.hpp"
#include "common/trace.hpp"
#include "plan/experts.hpp"
#include "wire/membership_choice.hpp"

namespace ferry::tools {

/// One rank on each of `num_nodes` nodes, the experts in blocks.
struct ReplayShape {
  int num_experts = 0;
  int num_nodes = 0;

  wire::MembershipForm form() const { return {.num_columns = num_experts / num_nodes}; }
};

/// Of one rank for every node but its own, which is the first.
inline std::vector<plan::Membership> remote(const support::RoutingData& routing,
                                            const ReplayShape& shape) {
  const Topology topology = Topology::uniform(shape.num_nodes, 1);
  const Placement placement = Placement::contiguous(shape.num_experts, shape.num_nodes);
  auto split =
      plan::split_by_node(routing.view(), plan::ExpertIndex(topology, placement), topology);
  split.erase(split.begin());
  return split;
}

/// Bytes of lists.
struct ListBytes {
  double chosen = 0;
  double best = 0;
  double entropy = 0;

  void operator+=(const ListBytes& other) {
    chosen += other.chosen;
    best += other.best;
    entropy += other.entropy;
  }
  double regret() const { return chosen / best; }
};

inline ListBytes list_bytes(const plan::Membership& membership, const ReplayShape& shape,
                            wire::MembershipHistory& history) {
  const wire::MembershipForm form = shape.form();
  const auto bytes = [&](wire::IndexEncoding encoding) {
    return static_cast<double>(wire::index_bytes(membership, form, encoding));
  };
  return {bytes(wire::choose_encoding(membership, form, history)),
          bytes(wire::best_encoding(membership, form)),
          wire::index_entropy_bits(membership, form) / 8};
}

/// The routing of some of the tokens.
inline support::RoutingData slice(const support::RoutingData& all, std::int64_t first_token,
                                  std::int64_t num_tokens) {
  const std::ptrdiff_t begin = first_token * all.num_topk;
  const std::ptrdiff_t end = begin + num_tokens * all.num_topk;
  support::RoutingData part{.num_tokens = num_tokens,
                            .num_topk = all.num_topk,
                            .topk_idx = {all.topk_idx.begin() + begin, all.topk_idx.begin() + end},
                            .topk_weights = {}};
  if (!all.topk_weights.empty()) {
    part.topk_weights.assign(all.topk_weights.begin() + begin, all.topk_weights.begin() + end);
  }
  return part;
}

/// Plans of so many tokens of `all`, one after the other, chosen as an exchange does: calls
/// visit(bytes of the lists) for every message. The first `most_plans`.
template <typename Visit>
void replay(const support::RoutingData& all, const ReplayShape& shape, std::int64_t tokens_per_plan,
            std::int64_t most_plans, const Visit& visit) {
  std::vector<wire::MembershipHistory> histories(static_cast<std::size_t>(shape.num_nodes - 1));
  const std::int64_t plans = std::min(most_plans, all.num_tokens / tokens_per_plan);
  for (std::int64_t plan = 0; plan < plans; ++plan) {
    const std::vector<plan::Membership> memberships =
        remote(slice(all, plan * tokens_per_plan, tokens_per_plan), shape);
    for (std::size_t i = 0; i < memberships.size(); ++i) {
      visit(list_bytes(memberships[i], shape, histories[i]));
    }
  }
}

inline support::RoutingData layer_routing(const Trace& trace, int layer) {
  TraceLayer rows = trace.layer(layer);
  return {.num_tokens = trace.info().num_tokens,
          .num_topk = trace.info().num_topk,
          .topk_idx = std::move(rows.topk_idx),
          .topk_weights = std::move(rows.topk_weights)};
}

}  // namespace ferry::tools
