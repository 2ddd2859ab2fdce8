// How a refusal reaches every rank of an exchange: the rank that refuses tells its node in a notice
// and sends it to every rank of other nodes. Nobody relays: the one that should may have left
// already.

#include <algorithm>

#include "exchange/dispatch.hpp"
#include "exchange/engine.hpp"

namespace ferry::detail {

void Engine::broadcast(ExchangeState& exchange, const Poison& poison) {
  exchange.board->post_to_all({.call = poison.call, .kind = NoticeKind::refusal}, poison.error);
  exchange.board->flush();
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
  const bool no_plan = poison.call.plan == kNoPlan;
  const std::uint64_t place = poison.call.place;
  std::vector<wire::CallId> lost;
  if (no_plan && (poison.call.after_failure || exchange.failures.order_lost())) {
    // Places say nothing now. A rank for which they did may have named the plan already; else,
    // whichever call the refuser left alone, it is one of these.
    if (exchange.failures.knows(poison.error)) return;
    for (const auto& [number, known] : exchange.plans) lost.push_back({.plan = number});
    for (const auto& [at, operation] : exchange.calls) lost.push_back(operation->call());
    for (wire::CallId& call : lost) call.kind = wire::OpKind::dispatch;
  } else if (no_plan && place >= exchange.next_place) {
    exchange.refused_ahead.emplace(place, poison);
  } else if (const auto own = exchange.calls.find(place); own != exchange.calls.end()) {
    // Of calls that name their plans, one made after a failure is not the other's counterpart.
    if (!no_plan && own->second->call().after_failure) return;
    own->second->fail(poison.error);
    lost.push_back(own->second->call());
  } else if (const wire::CallId* const ended = exchange.order.find_own(place)) {
    lost.push_back(*ended);
  }
  for (wire::CallId& call : lost) {
    if (call.plan == kNoPlan || call.plan == poison.call.plan) continue;
    call.exchange = exchange.id;
    // The refusal does not name this plan, so the others must be told what else has ended.
    if (fail_plan(exchange, call, poison.error)) broadcast(exchange, {call, poison.error});
  }
}

// The plan of a refused call fails with it: ranks that already ended that call must end the next
// one on the plan, and calls on it that still run lose peers that will not go on. A call that opens
// the plan ends as elsewhere: only its own refusal fails it. False where this was known.
bool Engine::fail_plan(ExchangeState& exchange, const wire::CallId& call, const Error& error) {
  const bool news = exchange.failures.add(call.plan, error);
  if (const auto known = exchange.plans.find(call.plan); news && known != exchange.plans.end()) {
    retire_flow(known->second);
  }
  // A dispatch that began beside its plan takes it along.
  const bool whole = wire::opens_plan(call.kind) || find_early(exchange, call.plan) != nullptr;
  for (const auto& [place, operation] : exchange.calls) {
    const wire::CallId& other = operation->call();
    if (other.plan != call.plan || (wire::opens_plan(other.kind) && !whole)) continue;
    operation->fail(error);
  }
  return news;
}

// Calls on a failed plan have failed here, and later ones fail when they start: once their steps
// are over, nothing of this rank touches memory of peers for it any more, and they may take it
// back. A call that opens a plan reads metadata of its peers until it is over.
void Engine::leave_failed_plans(ExchangeState& exchange) {
  for (const std::uint32_t plan : exchange.failures.known()) {
    if (exchange.failures.find(plan) == nullptr) continue;
    if (exchange.failures.has_left(plan, local_index_)) continue;
    const bool inside = std::ranges::any_of(exchange.calls, [plan](const auto& call) {
      const Operation& operation = *call.second;
      const bool touches = operation.running() || wire::opens_plan(operation.call().kind);
      return touches && operation.call().plan == plan;
    });
    if (inside) continue;
    exchange.failures.mark_left(plan, local_index_);
    exchange.board->post_to_all(
        {.call = {.exchange = exchange.id, .plan = plan}, .kind = NoticeKind::left});
    exchange.board->flush();
  }
}

}  // namespace ferry::detail
