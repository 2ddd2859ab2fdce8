#pragma once
// Where the gradients of a rank's routing weights arrive. Landing ranks send one number for each
// weight of each target, in the order of their lanes (LanePair::values); the targets on the home
// node have theirs there. All numbers of a rank make one list: those of home_targets, then those of
// each outgoing pair.

#include <cstdint>
#include <span>
#include <vector>

#include "plan/rank_plan.hpp"

namespace ferry::plan {

/// The routing that a plan was made from.
struct SlotExperts {
  std::span<const std::int32_t> experts;  ///< [num_tokens, num_topk], -1 = none
  int num_topk = 1;
};

/// What names a place besides the routing.
struct WeightContext {
  const Topology& topology;
  const ExpertIndex& experts;
  /// Rows are (token, rank), with a number for every slot of the token; else (token, expert).
  bool rows_of_ranks = false;
};

/// First number of each outgoing pair in the list, and the length of the list at the end.
std::vector<std::int64_t> value_begins(const RankPlan& plan, std::uint32_t values_per_target);

/// The place of each slot's number in the list, -1 where the slot names no expert. Slots of a token
/// that name one expert share a place.
/// Cost: linear in the slots but for the order of a token's few experts
std::vector<std::int64_t> weight_places(const SlotExperts& slots, const WeightContext& context,
                                        const RankPlan& plan);

}  // namespace ferry::plan
