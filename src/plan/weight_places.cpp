// Where gradients of routing weights arrive: see weight_places.hpp. Counts the targets of each lane
// in the order in which the lanes list them: tokens ascending; in a token ranks ascending, and for
// one rank slots ascending. On the home node experts of a token are listed by slot.

#include "plan/weight_places.hpp"

#include <algorithm>

#include "base/check.hpp"
#include "plan/as_size.hpp"

namespace ferry::plan {
namespace {

/// An expert that a token names, at the first slot that does.
struct Named {
  int slot = 0;
  int rank = 0;
};

class PlaceCounter {
 public:
  PlaceCounter(const SlotExperts& slots, const WeightContext& context, const RankPlan& plan)
      : slots_(slots),
        context_(context),
        values_per_target_(context.rows_of_ranks ? slots.num_topk : 1),
        home_node_(context.topology.node_of(plan.rank)),
        first_slot_(as_size(context.experts.num_experts())),
        stamp_(as_size(context.experts.num_experts())) {
    const std::vector<std::int64_t> begins =
        value_begins(plan, static_cast<std::uint32_t>(values_per_target_));
    lane_of_rank_.resize(as_size(context.topology.num_ranks()));
    next_.push_back(0);  // home
    for (std::size_t pair = 0; pair < plan.outgoing.size(); ++pair) {
      lanes_of_peer(plan, plan.outgoing[pair].dispatch.peer, next_.size());
      next_.push_back(begins[pair]);
    }
  }

  std::vector<std::int64_t> count() {
    std::vector<std::int64_t> places(slots_.experts.size(), -1);
    const std::size_t num_tokens = slots_.experts.size() / as_size(slots_.num_topk);
    for (std::size_t token = 0; token < num_tokens; ++token) {
      place_token(
          static_cast<std::uint32_t>(token),
          std::span(places).subspan(token * as_size(slots_.num_topk), as_size(slots_.num_topk)));
    }
    return places;
  }

 private:
  // Experts of these ranks send their numbers over the lane of this peer.
  void lanes_of_peer(const RankPlan& plan, int peer, std::size_t lane) {
    if (!lands_on_rail(info(plan.strategy))) {
      lane_of_rank_[as_size(peer)] = lane;
      return;
    }
    for (const int rank : context_.topology.ranks_of(context_.topology.node_of(peer))) {
      lane_of_rank_[as_size(rank)] = lane;
    }
  }

  void place_token(std::uint32_t token, std::span<std::int64_t> places) {
    const auto experts = slots_.experts.subspan(token * places.size(), places.size());
    named_.clear();
    for (std::size_t slot = 0; slot < experts.size(); ++slot) {
      if (experts[slot] < 0) continue;
      const auto expert = static_cast<std::size_t>(experts[slot]);
      if (stamp_[expert] == token + 1) continue;
      stamp_[expert] = token + 1;
      first_slot_[expert] = static_cast<int>(slot);
      named_.push_back({static_cast<int>(slot), context_.experts.rank_of(experts[slot])});
    }
    order_named();
    for (std::size_t i = 0; i < named_.size(); ++i) {
      const bool same_row = context_.rows_of_ranks && i > 0 && named_[i - 1].rank == named_[i].rank;
      std::int64_t& next = next_[lane_of_rank_[as_size(named_[i].rank)]];
      if (!same_row) next += values_per_target_;
      const std::int64_t row = next - values_per_target_;
      places[as_size(named_[i].slot)] = row + (context_.rows_of_ranks ? named_[i].slot : 0);
    }
    for (std::size_t slot = 0; slot < experts.size(); ++slot) {
      if (experts[slot] < 0) continue;
      places[slot] = places[as_size(first_slot_[static_cast<std::size_t>(experts[slot])])];
    }
  }

  // Lanes are counted apart, so only the order inside each matters.
  void order_named() {
    const auto listed_by_rank = [this](const Named& named) {
      return context_.rows_of_ranks || context_.topology.node_of(named.rank) != home_node_;
    };
    // Not those of std::ranges, whose subranges clang 14 cannot read.
    const auto remote = std::stable_partition(
        named_.begin(), named_.end(), [&](const Named& named) { return !listed_by_rank(named); });
    std::stable_sort(remote, named_.end(),
                     [](const Named& a, const Named& b) { return a.rank < b.rank; });
  }

  const SlotExperts slots_;
  const WeightContext context_;
  const int values_per_target_;
  const int home_node_;
  std::vector<int> first_slot_;       ///< per expert, of the token that named it last
  std::vector<std::uint32_t> stamp_;  ///< that token + 1
  std::vector<std::size_t> lane_of_rank_;
  std::vector<std::int64_t> next_;  ///< per lane, 0 = home
  std::vector<Named> named_;
};

}  // namespace

std::vector<std::int64_t> value_begins(const RankPlan& plan, std::uint32_t values_per_target) {
  std::vector<std::int64_t> begins{
      static_cast<std::int64_t>(plan.home_targets.size() * values_per_target)};
  for (const LanePair& pair : plan.outgoing) {
    begins.push_back(begins.back() + pair.values.range_begin.back());
  }
  return begins;
}

std::vector<std::int64_t> weight_places(const SlotExperts& slots, const WeightContext& context,
                                        const RankPlan& plan) {
  FERRY_ASSERT(slots.num_topk > 0, "num_topk = {}; allowed: 1 or more", slots.num_topk);
  return PlaceCounter(slots, context, plan).count();
}

}  // namespace ferry::plan
