// What is wrong with the arguments of a call: see checks.hpp.

#include "exchange/checks.hpp"

#include <fmt/format.h>

#include "exchange/engine.hpp"
#include "plan/membership.hpp"

namespace ferry::detail {

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

std::optional<Error> find_input_error(const ExchangeState& exchange, const DispatchInput& input,
                                      const Expected& expected) {
  if (auto error = find_matrix_error(exchange, input.x, expected)) return error;
  const std::int64_t wanted = expected.rows * exchange.options.extra_bytes;
  if (static_cast<std::int64_t>(input.extra.size()) == wanted) return std::nullopt;
  return Error(ErrorCode::invalid_argument,
               fmt::format("{}: extra has {} bytes on rank {}; allowed: {}, because num_tokens = "
                           "{} and extra_bytes = {}",
                           expected.call, input.extra.size(), exchange.engine.rank(), wanted,
                           expected.rows, exchange.options.extra_bytes));
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

namespace {

// What is wrong with a list of FP32 numbers, one for each weight.
std::optional<Error> find_numbers_error(const ExchangeState& exchange, std::size_t size,
                                        const Expected& expected) {
  if (size == static_cast<std::size_t>(expected.rows)) return std::nullopt;
  return Error(
      ErrorCode::invalid_argument,
      fmt::format("{}: {} has {} numbers on rank {}; allowed: {}, from the plan", expected.call,
                  expected.name, size, exchange.engine.rank(), expected.rows));
}

std::int64_t num_weights(const PlanState& plan) {
  return static_cast<std::int64_t>(plan.rows.num_tokens) * plan.num_topk;
}

// Gradients of weights are asked for where nobody applied weights in that direction.
std::optional<Error> find_weights_misuse(const ExchangeState& exchange, std::string_view call,
                                         WeightMode needed) {
  if (exchange.options.weights == needed) return std::nullopt;
  return Error(ErrorCode::invalid_argument,
               fmt::format("{}: gradients of weights on rank {}, but the exchange has weights {}; "
                           "allowed with weights {}; fix: leave them out",
                           call, exchange.engine.rank(), to_string(exchange.options.weights),
                           to_string(needed)));
}

}  // namespace

std::optional<Error> find_combine_backward_error(
    const ExchangeState& exchange, const PlanState& plan, const CombineBackwardInput& input,
    const std::optional<std::span<float>>& grad_weights) {
  constexpr std::string_view kCall = "combine_backward";
  const auto tokens = static_cast<std::int64_t>(plan.rows.num_tokens);
  auto error = find_matrix_error(exchange, input.grad_out, {kCall, "grad_out", tokens});
  if (error || !grad_weights) return error;
  error = find_weights_misuse(exchange, kCall, WeightMode::at_combine);
  if (!error && input.y.data == nullptr && plan.rows.num_rows() > 0) {
    error = Error(ErrorCode::invalid_argument,
                  fmt::format("{}: grad_weights without y on rank {}; fix: give the outputs that "
                              "combine read, or leave grad_weights out",
                              kCall, exchange.engine.rank()));
  }
  if (!error) error = find_matrix_error(exchange, input.y, {kCall, "y", plan.rows.num_rows()});
  if (error) return error;
  return find_numbers_error(exchange, grad_weights->size(),
                            {kCall, "grad_weights", num_weights(plan)});
}

std::optional<Error> find_dispatch_backward_error(const ExchangeState& exchange,
                                                  const PlanState& plan,
                                                  const DispatchBackwardInput& input,
                                                  const DispatchBackwardOutput& output) {
  constexpr std::string_view kCall = "dispatch_backward";
  const std::int64_t rows = plan.rows.num_rows();
  const auto tokens = static_cast<std::int64_t>(plan.rows.num_tokens);
  auto error = find_matrix_error(exchange, input.grad_rows, {kCall, "grad_rows", rows});
  if (!error) error = find_matrix_error(exchange, output.grad_x, {kCall, "grad_x", tokens});
  if (error || (!input.grad_row_weights && !output.grad_weights)) return error;
  error = find_weights_misuse(exchange, kCall, WeightMode::at_expert);
  if (error) return error;
  if (!input.grad_row_weights || !output.grad_weights) {
    return Error(ErrorCode::invalid_argument,
                 fmt::format("dispatch_backward: {} without {} on rank {}; fix: give both, or none",
                             input.grad_row_weights ? "grad_row_weights" : "grad_weights",
                             input.grad_row_weights ? "grad_weights" : "grad_row_weights",
                             exchange.engine.rank()));
  }
  const auto per_row = static_cast<std::int64_t>(exchange.weights_per_row(plan.num_topk));
  error = find_numbers_error(exchange, input.grad_row_weights->size(),
                             {kCall, "grad_row_weights", rows * per_row});
  if (error) return error;
  return find_numbers_error(exchange, output.grad_weights->size(),
                            {kCall, "grad_weights", num_weights(plan)});
}

std::optional<Error> find_routing_refusal(const ExchangeState& exchange, const Routing& routing) {
  const auto problem =
      plan::find_routing_error(routing, exchange.placement.num_experts(), exchange.engine.rank());
  if (problem) return Error(ErrorCode::invalid_argument, *problem);
  const std::uint64_t limit = exchange.engine.limits().num_tokens_limit;
  if (static_cast<std::uint64_t>(routing.num_tokens) <= limit) return std::nullopt;
  return Error(ErrorCode::limit_exceeded,
               fmt::format("plan: num_tokens = {} on rank {}; allowed: {}; fix: raise "
                           "num_tokens_limit on all ranks, or plan fewer tokens at once",
                           routing.num_tokens, exchange.engine.rank(), limit));
}

std::optional<Error> find_gather_misuse(const ExchangeState& exchange, const Operation& gather) {
  const int rank = exchange.engine.rank();
  if (&gather.exchange() != &exchange) {
    return Error(ErrorCode::invalid_argument,
                 fmt::format("plan: the dispatch given on rank {} was started on exchange {}, not "
                             "on exchange {}",
                             rank, gather.exchange().id, exchange.id));
  }
  if (!gather.plan() && exchange.engine.find_planning(exchange, gather.call().plan) == nullptr) {
    return std::nullopt;
  }
  return Error(ErrorCode::invalid_argument,
               fmt::format("plan: the dispatch given on rank {} has a plan already; fix: give each "
                           "start_gather to one plan",
                           rank));
}

std::optional<Error> find_joined_refusal(const ExchangeState& exchange, const Routing& routing,
                                         const Operation& gather) {
  if (gather.error()) return gather.error();
  if (auto refusal = find_routing_refusal(exchange, routing)) return refusal;
  const std::int64_t rows = static_cast<const DispatchOperation&>(gather).input().x.rows;
  if (rows == routing.num_tokens) return std::nullopt;
  return Error(ErrorCode::invalid_argument,
               fmt::format("plan: num_tokens = {} on rank {}, but start_gather was given {} rows; "
                           "fix: route the same tokens",
                           routing.num_tokens, exchange.engine.rank(), rows));
}

}  // namespace ferry::detail
