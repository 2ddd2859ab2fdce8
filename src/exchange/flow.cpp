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

// What a mode has no use for stays without lanes: its calls are refused.
PlanFlow::PlanFlow(const plan::RankPlan& plan, const Framings& framings, WeightMode weights) {
  const Ends outward{plan.outgoing, plan.landing};
  const Ends homeward{plan.landing, plan.outgoing};
  const auto out = [](const plan::LanePair& pair) -> const plan::Lane& { return pair.dispatch; };
  const auto back = [](const plan::LanePair& pair) -> const plan::Lane& { return pair.back(); };
  const auto values = [](const plan::LanePair& pair) -> const plan::Lane& { return pair.values; };
  rows(wire::OpKind::dispatch) = make_kind(outward, framings.dispatch, out);
  rows(wire::OpKind::combine) = make_kind(homeward, framings.combine, back);
  rows(wire::OpKind::combine_backward) = make_kind(outward, framings.combine_backward, back);
  rows(wire::OpKind::dispatch_backward) = make_kind(homeward, framings.dispatch_backward, back);
  if (weights == WeightMode::at_combine) {
    CallFlow& flow = call(wire::OpKind::combine_backward_weights);
    flow.rows = make_kind(outward, framings.combine_backward, back);
    flow.values = make_kind(homeward, framings.values, values);
  }
  if (weights == WeightMode::at_expert) {
    CallFlow& flow = call(wire::OpKind::dispatch_backward_weights);
    flow.rows = make_kind(homeward, framings.dispatch_backward, back);
    flow.values = make_kind(homeward, framings.values, values);
  }
}

CallFlow& PlanFlow::call(wire::OpKind kind) {
  const auto found = std::ranges::find(kKinds, kind);
  FERRY_ASSERT(found != std::end(kKinds), "no flow for {}", wire::to_string(kind));
  return calls_[static_cast<std::size_t>(found - std::begin(kKinds))];
}

KindFlow* PlanFlow::find(wire::OpKind kind, wire::Stream stream) {
  if (std::ranges::find(kKinds, kind) == std::end(kKinds)) return nullptr;
  return &call(kind).of(stream);
}

}  // namespace ferry::detail
