// Numbers that come home: see home_values.hpp.

#include "exchange/home_values.hpp"

#include "exchange/engine.hpp"
#include "kernels/row_kernels.hpp"
#include "plan/weight_places.hpp"

namespace ferry::detail {
namespace {

std::uint32_t values_per_target(const Operation& operation) {
  return static_cast<std::uint32_t>(
      operation.exchange().weights_per_row(operation.plan()->num_topk));
}

}  // namespace

HomeValues::HomeValues(const Operation& operation)
    : begins_(plan::value_begins(operation.plan()->rows, values_per_target(operation))),
      list_(static_cast<std::size_t>(begins_.back())),
      receivers_(operation.plan()->rows.outgoing, Way::values, operation.exchange().framings.values,
                 operation.exchange().crossings.values) {}

bool HomeValues::step(Operation& operation, KindFlow& flow) {
  Transport& transport = operation.exchange().engine.transport();
  return receivers_.land(operation, flow, [&](std::size_t lane, const LaneReceiver::Taken& taken) {
    const std::byte* const payload = taken.rows.row(0);
    float* const place = &list_[static_cast<std::size_t>(begins_[lane]) + taken.fragment.first];
    transport.pack_rows({.hidden = taken.fragment.count,
                         .rows = std::span(&payload, 1),
                         .out = reinterpret_cast<std::byte*>(place)});
  });
}

void HomeValues::write(const Operation& operation, std::span<float> grad_weights) const {
  PlanState& plan = *operation.plan();
  const ExchangeState& exchange = operation.exchange();
  if (plan.weight_places.empty() && !plan.slot_experts.empty()) {
    plan.weight_places = plan::weight_places(
        {plan.slot_experts, plan.num_topk},
        {exchange.engine.transport().topology(), exchange.experts, exchange.token_major()},
        plan.rows);
  }
  for (std::size_t slot = 0; slot < grad_weights.size(); ++slot) {
    const std::int64_t place = plan.weight_places[slot];
    grad_weights[slot] = place < 0 ? 0.0F : list_[static_cast<std::size_t>(place)];
  }
}

}  // namespace ferry::detail
