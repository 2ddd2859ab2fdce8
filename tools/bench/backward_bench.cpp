// Order inside a repeat: outputs, combine_backward without and with gradients of weights,
// dispatch_backward likewise, bytes, then whole steps.

#include "bench/backward_bench.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "bench/clock.hpp"
#include "bench/rank_bench.hpp"
#include "support/rows.hpp"
#include "support/verify.hpp"
#include "support/verify_backward.hpp"

namespace ferry::bench {
namespace {

std::uint64_t matrix_bytes(const Routing& routing, const RowShape& shape) {
  return static_cast<std::uint64_t>(routing.num_tokens) * static_cast<std::uint64_t>(shape.hidden) *
         element_bytes(shape.dtype);
}

}  // namespace

BackwardBench::BackwardBench(const Setting& setting, const RowShape& shape)
    : setting_(setting),
      shape_(shape),
      grad_out_memory_(matrix_bytes(setting.routing, shape)),
      grad_x_memory_(matrix_bytes(setting.routing, shape)),
      grad_weights_(static_cast<std::size_t>(setting.routing.num_tokens) *
                    static_cast<std::size_t>(setting.routing.num_topk)) {}

Matrix BackwardBench::matrix(const HugeBuffer& memory) const {
  return {memory.data(), shape_.dtype, setting_.routing.num_tokens, shape_.hidden, 0};
}

std::uint64_t BackwardBench::payload_bytes() {
  const std::uint64_t now = setting_.transport.counters().payload_bytes;
  return now - std::exchange(payload_before_, now);
}

std::optional<std::string> BackwardBench::run(const Repeat& repeat, RepeatTimes& times,
                                              CountedBytes& counted, RankRecord& record) {
  const int rank = setting_.transport.rank();
  reference_.emplace(repeat.oracle, static_cast<std::uint64_t>(repeat.number) * 7919 + 11);
  support::fill_grad_out(*reference_, rank, matrix(grad_out_memory_));
  y_.emplace(repeat.exchange.output(repeat.rows.plan()));
  support::run_experts(repeat.rows.plan(), repeat.rows.matrix(), y_->matrix(),
                       setting_.options.weights);
  const bool at_combine = weights_at(WeightMode::at_combine);
  const bool at_expert = weights_at(WeightMode::at_expert);
  const auto sent = [&] { return repeat.exchange.wire_statistics(); };
  const auto row_bytes = [&](WireFormat format) {
    return plain_row_bytes(setting_.options, repeat.exchange, format);
  };
  Fault fault = run_combine_backward(repeat, false, times.combine_backward);
  counted.combine_backward = payload_bytes();
  counted.beyond.combine_backward =
      bytes_beyond(sent_before_.combine_backward, sent().combine_backward,
                   row_bytes(wire_combine_backward(setting_.options)));
  if (!fault && at_combine) {
    fault = run_combine_backward(repeat, true, times.combine_backward_weights);
    counted.grad_weights = payload_bytes() - counted.combine_backward;
  }
  if (fault) return fault;
  support::fill_grad_rows(*reference_, rank, grad_y_->matrix());
  fault = run_dispatch_backward(repeat, false, times.dispatch_backward);
  counted.dispatch_backward = payload_bytes();
  counted.beyond.dispatch_backward =
      bytes_beyond(sent_before_.dispatch_backward, sent().dispatch_backward,
                   row_bytes(wire_dispatch_backward(setting_.options)));
  if (!fault && at_expert) {
    row_weights_ = support::grad_row_weights(*reference_, rank, repeat.rows.plan());
    fault = run_dispatch_backward(repeat, true, times.dispatch_backward_weights);
    counted.grad_weights = payload_bytes() - counted.dispatch_backward;
  }
  if (!fault) fault = check_bytes(repeat.rows.plan().summary(), counted);
  if (fault) return fault;
  StepStalls uncounted;
  const bool warm_up = repeat.number < 0;
  run_step(repeat, false, times.step, warm_up ? uncounted : record.step);
  if (setting_.options.no_reuse) {
    run_step(repeat, true, times.step_no_reuse, warm_up ? uncounted : record.step_no_reuse);
  }
  return std::nullopt;
}

BackwardBench::Fault BackwardBench::run_combine_backward(const Repeat& repeat, bool with_weights,
                                                         Interval& time) {
  const Plan& plan = repeat.rows.plan();
  const CombineBackwardInput input{matrix(grad_out_memory_), y_->matrix()};
  std::optional<std::span<float>> wanted;
  if (with_weights) wanted = grad_weights_;
  grad_y_.reset();
  poison_free_slots(setting_.transport, kPoison);
  std::memset(grad_x_memory_.data(), kPoison, grad_x_memory_.bytes());
  // Untimed, and of poison: rows that it leaves behind cannot pass.
  repeat.exchange.combine_backward(plan, {matrix(grad_x_memory_), y_->matrix()}, wanted);
  std::ranges::fill(grad_weights_, std::numeric_limits<float>::quiet_NaN());
  setting_.stage.line_up();
  payload_bytes();
  sent_before_ = repeat.exchange.wire_statistics();
  time.start_s = now_s();
  grad_y_.emplace(repeat.exchange.combine_backward(plan, input, wanted));
  time.end_s = now_s();
  setting_.stage.drain();
  const int rank = setting_.transport.rank();
  if (auto fault = support::check_grad_y(*reference_, rank, grad_y_->matrix())) return fault;
  return with_weights ? support::check_grad_weights(*reference_, rank, grad_weights_)
                      : std::nullopt;
}

BackwardBench::Fault BackwardBench::run_dispatch_backward(const Repeat& repeat, bool with_weights,
                                                          Interval& time) {
  const Plan& plan = repeat.rows.plan();
  DispatchBackwardInput input{.grad_rows = grad_y_->matrix()};
  DispatchBackwardOutput output{.grad_x = matrix(grad_x_memory_)};
  if (with_weights) {
    input.grad_row_weights = row_weights_;
    output.grad_weights = grad_weights_;
  }
  repeat.exchange.dispatch_backward(plan, input, output);  // untimed
  std::memset(grad_x_memory_.data(), kPoison, grad_x_memory_.bytes());
  std::ranges::fill(grad_weights_, std::numeric_limits<float>::quiet_NaN());
  setting_.stage.line_up();
  payload_bytes();
  sent_before_ = repeat.exchange.wire_statistics();
  time.start_s = now_s();
  repeat.exchange.dispatch_backward(plan, input, output);
  time.end_s = now_s();
  setting_.stage.drain();
  const int rank = setting_.transport.rank();
  if (auto fault = support::check_grad_x(*reference_, rank, output.grad_x)) return fault;
  return with_weights ? support::check_grad_weights(*reference_, rank, grad_weights_)
                      : std::nullopt;
}

BackwardBench::Fault BackwardBench::check_bytes(const PlanSummary& planned,
                                                const CountedBytes& counted) const {
  const bool weights = !weights_at(WeightMode::none);
  const std::uint64_t of_weights = weights ? planned.inter_node_bytes_grad_weights : 0;
  if (counted.combine_backward ==
          planned.inter_node_bytes_combine_backward + counted.beyond.combine_backward &&
      counted.dispatch_backward ==
          planned.inter_node_bytes_dispatch_backward + counted.beyond.dispatch_backward &&
      counted.grad_weights == of_weights) {
    return std::nullopt;
  }
  return fmt::format(
      "rank {}: the transport counted {} + {} + {} bytes of combine_backward, "
      "dispatch_backward and gradients of weights, the plan says {} + {} + {}",
      setting_.transport.rank(), counted.combine_backward, counted.dispatch_backward,
      counted.grad_weights, planned.inter_node_bytes_combine_backward,
      planned.inter_node_bytes_dispatch_backward, of_weights);
}

// The results were checked above; here outputs stand in for what experts would compute, so that
// nothing but the exchange is timed.
void BackwardBench::run_step(const Repeat& repeat, bool plans, Interval& time, StepStalls& stalls) {
  Exchange& exchange = repeat.exchange;
  const bool at_combine = weights_at(WeightMode::at_combine);
  const Matrix grad_x = matrix(grad_x_memory_);
  std::optional<std::span<float>> wanted;
  if (at_combine) wanted = grad_weights_;
  DispatchBackwardInput home{};
  DispatchBackwardOutput out{.grad_x = grad_x};
  if (weights_at(WeightMode::at_expert)) {
    home.grad_row_weights = row_weights_;
    out.grad_weights = grad_weights_;
  }
  const auto step = [&] {
    Plan plan = exchange.plan(setting_.routing);
    const auto next_plan = [&] {
      if (plans) plan = exchange.plan(setting_.routing);
    };
    const ExpertRows rows = exchange.dispatch(plan, repeat.x);
    next_plan();
    exchange.combine(plan, y_->matrix(), grad_x);
    next_plan();
    const GradRows grad_y =
        exchange.combine_backward(plan, {matrix(grad_out_memory_), y_->matrix()}, wanted);
    next_plan();
    home.grad_rows = grad_y.matrix();
    exchange.dispatch_backward(plan, home, out);
  };
  step();  // untimed
  setting_.stage.line_up();
  const StepStalls before{exchange.metadata_rounds(), exchange.host_stalls(), exchange.stall_us()};
  time.start_s = now_s();
  step();
  time.end_s = now_s();
  stalls.metadata_rounds += exchange.metadata_rounds() - before.metadata_rounds;
  stalls.host_stalls += exchange.host_stalls() - before.host_stalls;
  stalls.stall_us += exchange.stall_us() - before.stall_us;
  setting_.stage.drain();
}

}  // namespace ferry::bench
