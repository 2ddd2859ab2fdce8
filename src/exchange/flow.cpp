// Credit of one plan: see flow.hpp.

#include "exchange/flow.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace ferry::detail {
namespace {

template <typename Box>
Box* box_of(std::vector<Box>& boxes, int peer) {
  const auto found = std::ranges::find(boxes, peer, &Box::peer);
  return found == boxes.end() ? nullptr : &*found;
}

struct Ends {
  const std::vector<plan::LanePair>& senders;    ///< lanes whose fragments this rank sends
  const std::vector<plan::LanePair>& receivers;  ///< lanes whose fragments come here
};

template <typename LaneOf>
KindFlow make_kind(const Ends& ends, const plan::Framing& framing, LaneOf lane_of) {
  const auto fragments = [&](const plan::LanePair& pair) {
    return static_cast<std::uint32_t>(
        plan::num_fragments(lane_of(pair), framing.rows_per_fragment));
  };
  KindFlow flow;
  for (const plan::LanePair& pair : ends.senders) {
    const std::uint32_t total = fragments(pair);
    flow.outboxes.push_back({.peer = pair.dispatch.peer,
                             .total = total,
                             .granted = std::min(total, kInitialFragments)});
  }
  for (const plan::LanePair& pair : ends.receivers) {
    LaneInbox inbox;
    inbox.peer = pair.dispatch.peer;
    inbox.total = fragments(pair);
    inbox.granted = std::min(inbox.total, kInitialFragments);
    flow.inboxes.push_back(std::move(inbox));
  }
  return flow;
}

}  // namespace

LaneInbox* KindFlow::inbox_of(int peer) { return box_of(inboxes, peer); }
LaneOutbox* KindFlow::outbox_of(int peer) { return box_of(outboxes, peer); }

PlanFlow::PlanFlow(const plan::RankPlan& plan, const plan::Framing& dispatch,
                   const plan::Framing& combine)
    : kinds_{
          make_kind({plan.outgoing, plan.landing}, dispatch,
                    [](const plan::LanePair& pair) -> const plan::Lane& { return pair.dispatch; }),
          make_kind({plan.landing, plan.outgoing}, combine,
                    [](const plan::LanePair& pair) -> const plan::Lane& { return pair.back(); })} {}

KindFlow& PlanFlow::kind(wire::OpKind kind) {
  FERRY_ASSERT(kind == wire::OpKind::dispatch || kind == wire::OpKind::combine, "no flow for {}",
               wire::to_string(kind));
  return kinds_[kind == wire::OpKind::dispatch ? 0 : 1];
}

}  // namespace ferry::detail
