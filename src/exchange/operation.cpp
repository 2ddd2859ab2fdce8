// What all operations share: see operation.hpp.

#include "exchange/operation.hpp"

#include <fmt/format.h>

#include "exchange/engine.hpp"

namespace ferry::detail {

std::string_view to_string(Phase phase) {
  switch (phase) {
    case Phase::none: return "nothing";
    case Phase::metadata: return "its routing";
    case Phase::node_counts: return "its counts in node memory";
    case Phase::window_granted: return "its window";
    case Phase::rows: return "its rows";
    case Phase::rows_pushed: return "rows that it writes into this rank's window";
    case Phase::credit: return "memory for more fragments";
    case Phase::outputs: return "its expert outputs";
    case Phase::partial_sums: return "its partial sums";
    case Phase::values: return "its gradients of weights";
    case Phase::outputs_read: return "it to read this rank's outputs";
    case Phase::sends: return "it to take what was sent";
    case Phase::earlier_call: return "it to end an earlier call";
  }
  return "unknown";
}

Error different_calls(const wire::CallId& a, int rank_a, const wire::CallId& b, int rank_b) {
  const auto describe = [](const wire::CallId& call) {
    const std::string_view kind = wire::to_string(call.kind);
    if (call.plan == kNoPlan) return std::string(kind);
    return fmt::format("{} (use {} of plan {})", kind, call.ordinal, call.plan);
  };
  return Error(
      ErrorCode::mismatch,
      fmt::format("call {} of exchange {} is {} on rank {} and {} on rank {}; fix: start "
                  "the same operations in the same order on all ranks",
                  wire::place_text(a.place), a.exchange, describe(a), rank_a, describe(b), rank_b));
}

Operation::Operation(std::shared_ptr<ExchangeState> exchange, std::shared_ptr<PlanState> plan,
                     wire::OpKind kind)
    : exchange_(std::move(exchange)), plan_(std::move(plan)), plan_use_(PlanUse::known) {
  call_.generation = kGeneration;
  call_.exchange = exchange_->id;
  call_.kind = kind;
  call_.plan = plan_ ? plan_->number : kNoPlan;
}

Operation::Operation(std::shared_ptr<ExchangeState> exchange, wire::OpKind kind, PlanUse use,
                     std::uint32_t plan_number)
    : exchange_(std::move(exchange)), plan_use_(use) {
  call_.generation = kGeneration;
  call_.exchange = exchange_->id;
  call_.kind = kind;
  call_.plan = plan_number;
}

// Opening a plan starts a new count of places, so that ranks that left out calls on a failed plan
// are in step again.
void Operation::take_place() {
  ExchangeState& exchange = *exchange_;
  call_.place = exchange.next_place++;
  if (plan_use_ == PlanUse::opens) {
    call_.plan = exchange.next_plan++;
    call_.after_failure = exchange.failures.open_plan();
    exchange.next_place = static_cast<std::uint64_t>(exchange.next_plan) << 32U;
    return;
  }
  call_.after_failure = exchange.failures.order_lost();
  if (plan_) call_.ordinal = plan_->flow->call(call_.kind).next_ordinal++;
}

Engine& Operation::engine() const { return exchange_->engine; }

void Operation::fail(const Error& error) {
  if (state_ != State::running) return;
  error_ = error;
  state_ = State::failing;
}

void Operation::give_up(const Error& error) {
  if (over()) return;
  fail(error);
  abandon();
  end_failing();
}

std::string Operation::describe() const {
  return fmt::format("{} (call {} of exchange {}{}) on rank {}", wire::to_string(call_.kind),
                     wire::place_text(call_.place), call_.exchange,
                     call_.plan == kNoPlan ? "" : fmt::format(", plan {}", call_.plan),
                     engine().rank());
}

}  // namespace ferry::detail
