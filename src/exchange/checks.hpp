#pragma once
// What is wrong with the arguments of a call: the texts that name rank, value and what is allowed.
// Nothing where they may be used.

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "exchange/dispatch.hpp"
#include "exchange/state.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/routing.hpp"

namespace ferry::detail {

/// An argument, and how many rows or numbers it must have.
struct Expected {
  std::string_view call;
  std::string_view name;
  std::int64_t rows;
};

/// Shape, dtype and strides.
std::optional<Error> find_matrix_error(const ExchangeState& exchange, const ConstMatrix& matrix,
                                       const Expected& expected);
/// The same for what is to be dispatched.
std::optional<Error> find_input_error(const ExchangeState& exchange, const DispatchInput& input,
                                      const Expected& expected);
/// A plan that is empty, of another exchange or of another placement.
std::optional<Error> find_plan_error(const ExchangeState& exchange, const PlanState* plan,
                                     std::string_view call);
std::optional<Error> find_combine_backward_error(
    const ExchangeState& exchange, const PlanState& plan, const CombineBackwardInput& input,
    const std::optional<std::span<float>>& grad_weights);
std::optional<Error> find_dispatch_backward_error(const ExchangeState& exchange,
                                                  const PlanState& plan,
                                                  const DispatchBackwardInput& input,
                                                  const DispatchBackwardOutput& output);
std::optional<Error> find_routing_refusal(const ExchangeState& exchange, const Routing& routing);
/// Why a plan cannot take up a dispatch at all: it belongs to another exchange, or has its plan.
std::optional<Error> find_gather_misuse(const ExchangeState& exchange, const Operation& gather);
/// What is wrong with the plan of a dispatch that has begun.
std::optional<Error> find_joined_refusal(const ExchangeState& exchange, const Routing& routing,
                                         const Operation& gather);

}  // namespace ferry::detail
