// How a refusal reaches every rank of an exchange: the rank that refuses tells its node in a notice
// and sends it to every rank of other nodes. Nobody relays: the one that should may have left
// already.

#include <algorithm>

#include "exchange/engine.hpp"

namespace ferry::detail {

void Engine::broadcast(ExchangeState& exchange, const Poison& poison) {
  exchange.board.post({.call = poison.call, .kind = NoticeKind::refusal}, poison.error);
  const std::vector<std::byte> message = wire::encode(wire::PoisonMessage{
      .call = poison.call, .code = poison.error.code(), .text = poison.error.what()});
  const Topology& topology = transport_.topology();
  for (int target = 0; target < topology.num_ranks(); ++target) {
    if (topology.same_node(target, rank())) continue;
    network_.send(target, MessageKind::control, message);
  }
}

void Engine::apply(ExchangeState& exchange, const Poison& poison) {
  if (poison.call.plan != kNoPlan) fail_plan(exchange, poison.call, poison.error);
  if (poison.call.plan == kNoPlan || poison.error.code() == ErrorCode::mismatch) {
    apply_to_place(exchange, poison);
  }
}

// The refuser named no plan, or another one than this rank's call at the same place is on: that
// call cannot end well either, and its plan is lost with it.
void Engine::apply_to_place(ExchangeState& exchange, const Poison& poison) {
  exchange.failures.lose_order();
  const std::uint64_t place = poison.call.place;
  if (place >= exchange.next_place) {
    exchange.refused_ahead.emplace(place, poison);
    return;
  }
  std::optional<wire::CallId> own;
  if (const auto call = exchange.calls.find(place); call != exchange.calls.end()) {
    call->second->fail(poison.error);
    own = call->second->call();
  } else if (const CallOrder::Entry* const entry = exchange.order.find(place)) {
    own = entry->call;
  }
  if (!own || own->plan == kNoPlan || own->plan == poison.call.plan) return;
  // The refusal does not name this plan, so the others must be told what else has ended.
  if (fail_plan(exchange, *own, poison.error)) broadcast(exchange, {*own, poison.error});
}

// The plan of a refused call fails with it: ranks that already ended that call must end the next
// one on the plan, and calls on it that still run lose peers that will not go on. A call that opens
// the plan ends as elsewhere: only its own refusal fails it. False where this was known.
bool Engine::fail_plan(ExchangeState& exchange, const wire::CallId& call, const Error& error) {
  const bool news = exchange.failures.add(call.plan, error);
  if (const auto known = exchange.plans.find(call.plan); news && known != exchange.plans.end()) {
    retire_flow(known->second);
  }
  for (const auto& [place, operation] : exchange.calls) {
    const wire::CallId& other = operation->call();
    if (other.plan != call.plan) continue;
    if (wire::opens_plan(other.kind) && !wire::opens_plan(call.kind)) continue;
    operation->fail(error);
  }
  leave_plan(exchange, call.plan);
  return news;
}

// Calls on a failed plan have failed here, and later ones fail when they start: nothing of this
// rank touches memory of peers for it any more, and they may take it back.
void Engine::leave_plan(ExchangeState& exchange, std::uint32_t plan) {
  if (exchange.failures.find(plan) == nullptr) return;
  if (exchange.failures.has_left(plan, local_index_)) return;
  const bool opening = std::ranges::any_of(exchange.calls, [plan](const auto& call) {
    const Operation& operation = *call.second;
    return operation.running() && operation.call().plan == plan;
  });
  if (opening) return;
  exchange.failures.mark_left(plan, local_index_);
  exchange.board.post({.call = {.exchange = exchange.id, .plan = plan}, .kind = NoticeKind::left});
}

}  // namespace ferry::detail
