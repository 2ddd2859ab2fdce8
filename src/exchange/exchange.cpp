// The public face: checks arguments, starts operations, hands out results.

#include "ferry/exchange.hpp"

#include <new>

#include <fmt/format.h>

#include "exchange/combine.hpp"
#include "exchange/dispatch.hpp"
#include "exchange/engine.hpp"
#include "exchange/gather_operation.hpp"
#include "exchange/plan_operation.hpp"
#include "plan/membership.hpp"

namespace ferry {
namespace detail {
namespace {

struct Expected {
  std::string_view call;
  std::string_view name;
  std::int64_t rows;
};

// What is wrong with a matrix of rows, naming rank, value and what is allowed.
std::optional<Error> find_matrix_error(const ExchangeState& exchange, const ConstMatrix& matrix,
                                       const Expected& expected) {
  const int rank = exchange.engine.rank();
  const auto refuse = [&](const std::string& what) {
    return Error(ErrorCode::invalid_argument,
                 fmt::format("{}: {} {}", expected.call, expected.name, what));
  };
  if (matrix.dtype != exchange.shape.dtype) {
    return refuse(fmt::format("has dtype {} on rank {}; allowed: {}, the dtype of the exchange",
                              to_string(matrix.dtype), rank, to_string(exchange.shape.dtype)));
  }
  if (matrix.rows != expected.rows || matrix.columns != exchange.shape.hidden) {
    return refuse(
        fmt::format("has shape [{}, {}] on rank {}; allowed: [{}, {}], from the plan and "
                    "the exchange's hidden size",
                    matrix.rows, matrix.columns, rank, expected.rows, exchange.shape.hidden));
  }
  if (matrix.rows > 0 && matrix.data == nullptr) {
    return refuse(fmt::format("is null on rank {}, with {} rows", rank, matrix.rows));
  }
  if (matrix.rows > 1 && matrix.stride_bytes() < static_cast<std::int64_t>(exchange.row_bytes)) {
    return refuse(
        fmt::format("has rows {} bytes apart on rank {}; allowed: at least {}, the bytes "
                    "of a row",
                    matrix.stride_bytes(), rank, exchange.row_bytes));
  }
  return std::nullopt;
}

std::optional<Error> find_extra_error(const ExchangeState& exchange,
                                      std::span<const std::byte> extra, std::int64_t tokens) {
  const std::int64_t wanted = tokens * exchange.options.extra_bytes;
  if (static_cast<std::int64_t>(extra.size()) == wanted) return std::nullopt;
  return Error(
      ErrorCode::invalid_argument,
      fmt::format("dispatch: extra has {} bytes on rank {}; allowed: {}, because num_tokens "
                  "= {} and extra_bytes = {}",
                  extra.size(), exchange.engine.rank(), wanted, tokens,
                  exchange.options.extra_bytes));
}

std::optional<Error> find_plan_error(const ExchangeState& exchange, const PlanState* plan,
                                     std::string_view call) {
  const int rank = exchange.engine.rank();
  if (plan == nullptr) {
    return Error(
        ErrorCode::stale_plan,
        fmt::format("{}: the plan on rank {} is empty; fix: use the result of plan()", call, rank));
  }
  const auto known = exchange.plans.find(plan->number);
  const bool ours = plan->exchange_id == exchange.id && known != exchange.plans.end() &&
                    known->second.state.lock().get() == plan;
  if (!ours) {
    return Error(ErrorCode::stale_plan,
                 fmt::format("{}: the plan on rank {} belongs to exchange {}, not to exchange {}; "
                             "fix: use a plan of this exchange",
                             call, rank, plan->exchange_id, exchange.id));
  }
  if (plan->placement_version != exchange.placement.version) {
    return Error(ErrorCode::stale_plan,
                 fmt::format("{}: the plan on rank {} was made for placement version {}; the "
                             "exchange has version {}; fix: plan again",
                             call, rank, plan->placement_version, exchange.placement.version));
  }
  return std::nullopt;
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

}  // namespace
}  // namespace detail

using detail::CallerGuard;
using detail::Engine;

// Plan ------------------------------------------------------------------------------------------

std::int64_t Plan::num_rows() const { return state_->rows.num_rows(); }
std::span<const std::int64_t> Plan::expert_counts() const { return state_->expert_counts; }
std::span<const std::int64_t> Plan::expert_offsets() const { return state_->expert_offsets; }
std::span<const std::int32_t> Plan::local_experts() const { return state_->local_experts; }
const PlanSummary& Plan::summary() const { return state_->summary; }
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
  state_ = std::make_shared<detail::ExchangeState>(engine, engine.next_exchange_number(),
                                                   std::move(placement), shape, options);
  engine.add(state_);
}
Exchange::Exchange(Exchange&&) noexcept = default;
Exchange& Exchange::operator=(Exchange&&) noexcept = default;
Exchange::~Exchange() = default;

Pending<Plan> Exchange::start_plan(const Routing& routing) {
  const CallerGuard guard(state_->engine);
  state_->engine.progress();
  const auto operation = std::make_shared<detail::PlanOperation>(state_, routing);
  std::optional<Error> refusal;
  if (const auto problem = plan::find_routing_error(routing, state_->placement.num_experts(),
                                                    state_->engine.rank())) {
    refusal = Error(ErrorCode::invalid_argument, *problem);
  }
  state_->engine.start(operation, refusal);
  return Pending<Plan>(operation, [](detail::Operation& done) {
    return Plan(static_cast<detail::PlanOperation&>(done).result());
  });
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
  auto error = detail::find_matrix_error(*state_, x, {"dispatch", "x", tokens});
  if (!error) error = detail::find_extra_error(*state_, extra, tokens);
  if (error) return detail::refused<ExpertRows>(state_, plan.state(), kKind, *error);
  std::shared_ptr<detail::DispatchOperation> operation;
  try {
    operation = std::make_shared<detail::DispatchOperation>(state_, plan.state(), x, extra);
  } catch (const std::bad_alloc&) {
    return detail::refused<ExpertRows>(state_, plan.state(), kKind,
                                       detail::no_memory_error(*state_, "dispatch"));
  }
  state_->engine.start(operation, std::nullopt);
  return Pending<ExpertRows>(operation, [](detail::Operation& done) {
    auto& dispatch = static_cast<detail::DispatchOperation&>(done);
    const Matrix rows = dispatch.rows();
    const detail::ExchangeState& exchange = dispatch.exchange();
    return ExpertRows(WindowRows(Plan(dispatch.plan()), rows, dispatch.take_lease()),
                      static_cast<std::int64_t>(exchange.extra_offset),
                      exchange.options.extra_bytes);
  });
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
      state.summary.window_bytes,
      fmt::format("output of plan {} of exchange {}", state.number, state_->id));
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
  if (error) return detail::refused<void>(state_, plan.state(), kKind, *error);
  std::shared_ptr<detail::CombineOperation> operation;
  try {
    operation = std::make_shared<detail::CombineOperation>(state_, plan.state(), y, out);
  } catch (const std::bad_alloc&) {
    return detail::refused<void>(state_, plan.state(), kKind,
                                 detail::no_memory_error(*state_, "combine"));
  }
  state_->engine.start(operation, std::nullopt);
  return Pending<void>(operation, [](detail::Operation&) {});
}

void Exchange::combine(const Plan& plan, ConstMatrix y, Matrix out) {
  start_combine(plan, y, out).wait();
}

const Placement& Exchange::placement() const { return state_->placement; }
const RowShape& Exchange::shape() const { return state_->shape; }
const ExchangeOptions& Exchange::options() const { return state_->options; }
std::uint64_t Exchange::metadata_rounds() const { return state_->metadata_rounds; }

// Transport-wide --------------------------------------------------------------------------------

void set_limits(Transport& transport, const TransportLimits& limits) {
  Engine& engine = Engine::of(transport);
  const CallerGuard guard(engine);
  engine.limits() = limits;
  engine.slots().limit_bytes = limits.pool_limit_bytes;
}

std::uint64_t pool_bytes(const Transport& transport) {
  const auto* const engine = dynamic_cast<const Engine*>(transport.attachment.get());
  return engine == nullptr ? 0 : engine->slots().reserved_bytes();
}

void poison_free_slots(Transport& transport, unsigned char value) {
  Engine::of(transport).slots().fill_free(value);
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
