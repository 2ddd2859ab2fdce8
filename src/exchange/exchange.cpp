// The public face: checks arguments, starts operations, hands out results.

#include "ferry/exchange.hpp"

#include <new>

#include <fmt/format.h>

#include "base/log.hpp"
#include "exchange/checks.hpp"
#include "exchange/combine.hpp"
#include "exchange/combine_backward.hpp"
#include "exchange/dispatch.hpp"
#include "exchange/engine.hpp"
#include "exchange/gather_operation.hpp"
#include "exchange/plan_operation.hpp"

namespace ferry {
namespace detail {
namespace {

void log_made(const ExchangeState& exchange) {
  const ExchangeOptions& options = exchange.options;
  base::log(
      LogLevel::info,
      "exchange {}: {}, {}, weights {}; hidden {} in {}, on the wire {} and {}; {} experts on "
      "{}; fragments of {} bytes, ranges of {} tokens, {} in flight",
      exchange.id, to_string(options.strategy), to_string(options.layout),
      to_string(options.weights), exchange.shape.hidden, to_string(exchange.shape.dtype),
      to_string(*options.wire_dispatch), to_string(*options.wire_combine),
      exchange.placement.num_experts(), exchange.engine.transport().topology().describe(),
      options.fragment_bytes, options.range_tokens, options.ranges_in_flight);
}

// The other ranks are in this call: whatever goes wrong here must reach them.
Error no_memory_error(const ExchangeState& exchange, std::string_view call) {
  return Error(ErrorCode::resource_exhausted,
               fmt::format("{}: no memory for the call on rank {}; fix: free some on this rank",
                           call, exchange.engine.rank()));
}

// A refused call takes no plan along where the plan may not be one of this exchange.
class RefusedOperation final : public Operation {
 public:
  RefusedOperation(std::shared_ptr<ExchangeState> exchange, std::shared_ptr<PlanState> plan,
                   wire::OpKind kind)
      : Operation(std::move(exchange), std::move(plan), kind) {}
  /// A dispatch before its plan.
  RefusedOperation(std::shared_ptr<ExchangeState> exchange, PlanUse use, std::uint32_t plan_number)
      : Operation(std::move(exchange), wire::OpKind::dispatch, use, plan_number) {}
  bool step() override { return false; }
  WaitTarget waits_for() const override { return {}; }
};

template <typename Result>
Pending<Result> refused(const std::shared_ptr<ExchangeState>& exchange,
                        std::shared_ptr<PlanState> plan, wire::OpKind kind, const Error& error) {
  const auto operation = std::make_shared<RefusedOperation>(exchange, std::move(plan), kind);
  exchange->engine.start(operation, error);
  return Pending<Result>(operation, [](Operation&) -> Result {
    throw std::logic_error("ferry: a refused call has no result");
  });
}

/// A call on a plan of this exchange, and what is wrong with its arguments.
struct CheckedCall {
  const std::shared_ptr<ExchangeState>& exchange;
  const std::shared_ptr<PlanState>& plan;
  wire::OpKind kind;
  std::optional<Error> error;
};

// Takes up the operation, or its refusal.
template <typename Result, typename Make, typename Take>
Pending<Result> start_checked(const CheckedCall& call, const Make& make, const Take& take) {
  if (call.error) return refused<Result>(call.exchange, call.plan, call.kind, *call.error);
  decltype(make()) operation;
  try {
    operation = make();
  } catch (const std::bad_alloc&) {
    return refused<Result>(call.exchange, call.plan, call.kind,
                           no_memory_error(*call.exchange, wire::to_string(call.kind)));
  }
  call.exchange->engine.start(operation, std::nullopt);
  return Pending<Result>(operation, take);
}

ExpertRows take_rows(Operation& done) {
  auto& dispatch = static_cast<DispatchOperation&>(done);
  const Matrix rows = dispatch.rows();
  const ExchangeState& exchange = dispatch.exchange();
  return ExpertRows(WindowRows(Plan(dispatch.plan()), rows, dispatch.take_lease()),
                    static_cast<std::int64_t>(exchange.extra_offset), exchange.options.extra_bytes);
}

Plan take_plan(Operation& done) { return Plan(static_cast<PlanOperation&>(done).result()); }

}  // namespace
}  // namespace detail

using detail::CallerGuard;
using detail::Engine;

// Plan ------------------------------------------------------------------------------------------

std::int64_t Plan::num_rows() const { return state_->rows.num_rows(); }
std::int64_t Plan::num_tokens() const { return static_cast<std::int64_t>(state_->rows.num_tokens); }
std::span<const std::int64_t> Plan::expert_counts() const { return state_->expert_counts; }
std::span<const std::int64_t> Plan::expert_offsets() const { return state_->expert_offsets; }
std::span<const std::int32_t> Plan::local_experts() const { return state_->local_experts; }
const PlanSummary& Plan::summary() const { return state_->summary; }
std::span<const IndexSummary> Plan::indices() const { return state_->indices; }
const RowSources& Plan::row_sources() const { return state_->row_sources; }
std::span<const std::int32_t> Plan::topk_idx() const { return state_->topk_idx; }
std::span<const float> Plan::topk_weights() const { return state_->topk_weights; }

// WindowRows --------------------------------------------------------------------------------------

WindowRows::WindowRows(Plan plan, Matrix matrix, std::unique_ptr<detail::SlotLease> lease)
    : plan_(std::move(plan)), matrix_(matrix), lease_(std::move(lease)) {}
WindowRows::WindowRows(WindowRows&&) noexcept = default;
WindowRows& WindowRows::operator=(WindowRows&&) noexcept = default;
WindowRows::~WindowRows() = default;

// Exchange ----------------------------------------------------------------------------------------

Exchange::Exchange(Transport& transport, Placement placement, RowShape shape,
                   ExchangeOptions options) {
  Engine& engine = Engine::of(transport);
  const CallerGuard guard(engine);
  // Goes before the guard where what follows throws.
  auto made = std::make_shared<detail::ExchangeState>(engine, engine.next_exchange_number(),
                                                      std::move(placement), shape, options);
  engine.add(made);
  if (engine.rank() == 0) detail::log_made(*made);
  state_ = std::move(made);
}
Exchange::Exchange(Exchange&&) noexcept = default;
Exchange& Exchange::operator=(Exchange&& other) noexcept {
  Exchange taken(std::move(other));  // what this one was goes with it
  std::swap(state_, taken.state_);
  return *this;
}
Exchange::~Exchange() {
  if (!state_) return;
  const detail::UseHold hold(state_->use);
  state_.reset();
}

Pending<Plan> Exchange::start_plan(const Routing& routing) {
  const CallerGuard guard(state_->engine);
  state_->engine.progress();
  const auto operation = std::make_shared<detail::PlanOperation>(state_, routing);
  state_->engine.start(operation, detail::find_routing_refusal(*state_, routing));
  return Pending<Plan>(operation, &detail::take_plan);
}

Pending<Plan> Exchange::start_plan(const Routing& routing, Pending<ExpertRows>& gathering) {
  const CallerGuard guard(state_->engine);
  state_->engine.progress();
  const detail::Operation& gather = gathering.operation();
  if (const auto misuse = detail::find_gather_misuse(*state_, gather)) {
    return detail::refused<Plan>(state_, nullptr, wire::OpKind::plan, *misuse);
  }
  const auto operation =
      std::make_shared<detail::PlanOperation>(state_, routing, gather.call().plan);
  state_->engine.start(operation, detail::find_joined_refusal(*state_, routing, gather));
  return Pending<Plan>(operation, &detail::take_plan);
}

Plan Exchange::plan(const Routing& routing, Pending<ExpertRows>& gathering) {
  return start_plan(routing, gathering).wait();
}

Plan Exchange::plan(const Routing& routing) { return start_plan(routing).wait(); }

Pending<ExpertRows> Exchange::start_dispatch(const Plan& plan, ConstMatrix x,
                                             std::span<const std::byte> extra) {
  const CallerGuard guard(state_->engine);
  state_->engine.progress();  // a refusal that has arrived is known before the call starts
  constexpr auto kKind = wire::OpKind::dispatch;
  if (const auto stale = detail::find_plan_error(*state_, plan.state().get(), "dispatch")) {
    return detail::refused<ExpertRows>(state_, nullptr, kKind, *stale);
  }
  const auto tokens = static_cast<std::int64_t>(plan.state()->rows.num_tokens);
  const detail::DispatchInput input{x, extra};
  return detail::start_checked<ExpertRows>(
      {state_, plan.state(), kKind,
       detail::find_input_error(*state_, input, {"dispatch", "x", tokens})},
      [&] { return std::make_shared<detail::DispatchOperation>(state_, plan.state(), input); },
      &detail::take_rows);
}

Pending<ExpertRows> Exchange::start_gather(ConstMatrix x, std::span<const std::byte> extra) {
  const CallerGuard guard(state_->engine);
  state_->engine.progress();
  const detail::DispatchInput input{x, extra};
  std::optional<Error> refusal;
  if (!plan::info(state_->options.strategy).sends_every_token) {
    refusal = Error(ErrorCode::unsupported,
                    fmt::format("start_gather: strategy {} needs routing before rows leave; "
                                "allowed: node_gather",
                                to_string(state_->options.strategy)));
  }
  if (!refusal) refusal = detail::find_input_error(*state_, input, {"start_gather", "x", x.rows});
  std::shared_ptr<detail::Operation> operation;
  if (!refusal) {
    try {
      operation = std::make_shared<detail::DispatchOperation>(
          state_, detail::EarlySide::for_gather(*state_, static_cast<std::uint64_t>(x.rows)),
          input);
    } catch (const std::bad_alloc&) {
      refusal = detail::no_memory_error(*state_, "start_gather");
    }
  }
  if (!operation) {
    operation = std::make_shared<detail::RefusedOperation>(
        state_, detail::Operation::PlanUse::opens, detail::kNoPlan);
  }
  state_->engine.start(operation, refusal);
  return Pending<ExpertRows>(operation, &detail::take_rows);
}

Pending<Dispatched> Exchange::start_plan_and_dispatch(const Routing& routing, ConstMatrix x,
                                                      std::span<const std::byte> extra) {
  const CallerGuard guard(state_->engine);
  state_->engine.progress();
  const detail::DispatchInput input{x, extra};
  auto refusal = detail::find_routing_refusal(*state_, routing);
  if (!refusal) {
    refusal =
        detail::find_input_error(*state_, input, {"plan_and_dispatch", "x", routing.num_tokens});
  }
  const auto planning = std::make_shared<detail::PlanOperation>(state_, routing);
  state_->engine.enter(planning, refusal);
  // The dispatch begins before the plan's first step: that one may be its last.
  const std::uint32_t number = planning->call().plan;
  std::shared_ptr<detail::Operation> operation;
  if (planning->running()) {
    try {
      operation = std::make_shared<detail::DispatchOperation>(
          state_, detail::EarlySide::for_plan(*state_, number, planning->prepare_lanes()), input);
    } catch (const Error& error) {
      refusal = error;
    } catch (const std::bad_alloc&) {
      refusal = detail::no_memory_error(*state_, "plan_and_dispatch");
    }
  }
  if (!operation) {
    operation = std::make_shared<detail::RefusedOperation>(
        state_, detail::Operation::PlanUse::joins, number);
    if (!refusal) refusal = planning->error();
  }
  state_->engine.start(operation, refusal);
  return Pending<Dispatched>(operation, [](detail::Operation& done) {
    return Dispatched{Plan(done.plan()), detail::take_rows(done)};
  });
}

Dispatched Exchange::plan_and_dispatch(const Routing& routing, ConstMatrix x,
                                       std::span<const std::byte> extra) {
  return start_plan_and_dispatch(routing, x, extra).wait();
}

ExpertRows Exchange::dispatch(const Plan& plan, ConstMatrix x, std::span<const std::byte> extra) {
  return start_dispatch(plan, x, extra).wait();
}

OutputRows Exchange::output(const Plan& plan) {
  const CallerGuard guard(state_->engine);
  if (const auto error = detail::find_plan_error(*state_, plan.state().get(), "output")) {
    throw Error(*error);
  }
  const detail::PlanState& state = *plan.state();
  auto lease = state_->engine.slots().take(
      state.slot_bytes, fmt::format("output of plan {} of exchange {}", state.number, state_->id));
  const Matrix rows{.data = lease->slot().data(),
                    .dtype = state_->shape.dtype,
                    .rows = state.rows.num_rows(),
                    .columns = state_->shape.hidden,
                    .row_stride_bytes = static_cast<std::int64_t>(state_->window_stride_bytes)};
  return OutputRows(plan, rows, std::move(lease));
}

Pending<void> Exchange::start_combine(const Plan& plan, ConstMatrix y, Matrix out) {
  const CallerGuard guard(state_->engine);
  state_->engine.progress();  // a refusal that has arrived is known before the call starts
  constexpr auto kKind = wire::OpKind::combine;
  if (const auto error = detail::find_plan_error(*state_, plan.state().get(), "combine")) {
    return detail::refused<void>(state_, nullptr, kKind, *error);
  }
  const detail::PlanState& state = *plan.state();
  auto error = detail::find_matrix_error(*state_, y, {"combine", "y", state.rows.num_rows()});
  if (!error) {
    const auto tokens = static_cast<std::int64_t>(state.rows.num_tokens);
    error = detail::find_matrix_error(*state_, out, {"combine", "out", tokens});
  }
  return detail::start_checked<void>(
      {state_, plan.state(), kKind, error},
      [&] {
        return std::make_shared<detail::CombineOperation>(state_, plan.state(),
                                                          detail::RowsHome{kKind, y, out});
      },
      [](detail::Operation&) {});
}

void Exchange::combine(const Plan& plan, ConstMatrix y, Matrix out) {
  start_combine(plan, y, out).wait();
}

Pending<GradRows> Exchange::start_combine_backward(const Plan& plan,
                                                   const CombineBackwardInput& input,
                                                   std::optional<std::span<float>> grad_weights) {
  const CallerGuard guard(state_->engine);
  state_->engine.progress();
  const auto kind =
      grad_weights ? wire::OpKind::combine_backward_weights : wire::OpKind::combine_backward;
  if (const auto stale = detail::find_plan_error(*state_, plan.state().get(), "combine_backward")) {
    return detail::refused<GradRows>(state_, nullptr, kind, *stale);
  }
  std::optional<detail::WeightGradients> weights;
  if (grad_weights) weights = {input.y, *grad_weights};
  return detail::start_checked<GradRows>(
      {state_, plan.state(), kind,
       detail::find_combine_backward_error(*state_, *plan.state(), input, grad_weights)},
      [&] {
        return std::make_shared<detail::CombineBackwardOperation>(state_, plan.state(),
                                                                  input.grad_out, weights);
      },
      [](detail::Operation& done) {
        auto& operation = static_cast<detail::CombineBackwardOperation&>(done);
        const Matrix rows = operation.rows();
        return GradRows(Plan(operation.plan()), rows, operation.take_lease());
      });
}

GradRows Exchange::combine_backward(const Plan& plan, const CombineBackwardInput& input,
                                    std::optional<std::span<float>> grad_weights) {
  return start_combine_backward(plan, input, grad_weights).wait();
}

Pending<void> Exchange::start_dispatch_backward(const Plan& plan,
                                                const DispatchBackwardInput& input,
                                                const DispatchBackwardOutput& output) {
  const CallerGuard guard(state_->engine);
  state_->engine.progress();
  const auto kind = input.grad_row_weights ? wire::OpKind::dispatch_backward_weights
                                           : wire::OpKind::dispatch_backward;
  if (const auto stale =
          detail::find_plan_error(*state_, plan.state().get(), "dispatch_backward")) {
    return detail::refused<void>(state_, nullptr, kind, *stale);
  }
  const auto error = detail::find_dispatch_backward_error(*state_, *plan.state(), input, output);
  std::optional<detail::WeightsHome> weights;
  if (!error && input.grad_row_weights) weights = {*input.grad_row_weights, *output.grad_weights};
  return detail::start_checked<void>(
      {state_, plan.state(), kind, error},
      [&] {
        return std::make_shared<detail::CombineOperation>(
            state_, plan.state(), detail::RowsHome{kind, input.grad_rows, output.grad_x}, weights);
      },
      [](detail::Operation&) {});
}

void Exchange::dispatch_backward(const Plan& plan, const DispatchBackwardInput& input,
                                 const DispatchBackwardOutput& output) {
  start_dispatch_backward(plan, input, output).wait();
}

void Exchange::refuse_next(const Error& error) {
  const CallerGuard guard(state_->engine);
  state_->refusal_of_next = error;
}

const Placement& Exchange::placement() const { return state_->placement; }
const RowShape& Exchange::shape() const { return state_->shape; }
const ExchangeOptions& Exchange::options() const { return state_->options; }
WireStatistics Exchange::wire_statistics() const {
  const detail::UseHold hold(state_->use);
  const detail::RowPackers& packers = state_->packers;
  return {packers.dispatch.use(), packers.combine.use(), packers.combine_backward.use(),
          packers.dispatch_backward.use()};
}
std::vector<IndexBounds> Exchange::index_bounds(const Routing& routing) const {
  const CallerGuard guard(state_->engine);
  if (const auto error = detail::find_routing_refusal(*state_, routing)) throw *error;
  return detail::find_index_bounds(*state_, routing);
}
std::uint64_t Exchange::metadata_rounds() const {
  const detail::UseHold hold(state_->use);
  return state_->metadata_rounds;
}

std::uint64_t Exchange::host_stalls() const {
  const detail::UseHold hold(state_->use);
  return state_->host_stalls;
}
double Exchange::stall_us() const {
  const detail::UseHold hold(state_->use);
  return state_->stall_us;
}

// Transport-wide --------------------------------------------------------------------------------

void set_limits(Transport& transport, const TransportLimits& limits) {
  Engine& engine = Engine::of(transport);
  const CallerGuard guard(engine);
  engine.limits() = limits;
  engine.slots().limit_bytes = limits.pool_limit_bytes;
}

std::uint64_t pool_bytes(const Transport& transport) {
  const detail::UseHold hold(transport.sole_use());
  const auto* const engine = dynamic_cast<const Engine*>(transport.attachment.get());
  return engine == nullptr ? 0 : engine->slots().reserved_bytes();
}

std::uint64_t staging_bytes(const Transport& transport) {
  const detail::UseHold hold(transport.sole_use());
  const auto* const engine = dynamic_cast<const Engine*>(transport.attachment.get());
  return engine == nullptr ? 0 : engine->network().staging_bytes();
}

void poison_free_slots(Transport& transport, unsigned char value) {
  Engine& engine = Engine::of(transport);
  const CallerGuard guard(engine);
  engine.slots().fill_free(value);
}

Pending<std::vector<std::vector<std::byte>>> start_all_gather(Transport& transport,
                                                              std::span<const std::byte> mine) {
  Engine& engine = Engine::of(transport);
  const CallerGuard guard(engine);
  const auto operation = std::make_shared<detail::GatherOperation>(engine.world(), mine);
  engine.start(operation, std::nullopt);
  return Pending<std::vector<std::vector<std::byte>>>(operation, [](detail::Operation& done) {
    return std::move(static_cast<detail::GatherOperation&>(done).result());
  });
}

std::vector<std::vector<std::byte>> all_gather(Transport& transport,
                                               std::span<const std::byte> mine) {
  return start_all_gather(transport, mine).wait();
}

void barrier(Transport& transport) { all_gather(transport, {}); }

}  // namespace ferry
