// Numbers that come home: see home_values.hpp.

#include "exchange/home_values.hpp"

#include <algorithm>

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
      list_(static_cast<std::size_t>(begins_.back())) {
  const std::uint64_t per_fragment = operation.exchange().framings.values.rows_per_fragment;
  for (const plan::LanePair& pair : operation.plan()->rows.outgoing) {
    receivers_.emplace_back(pair, Way::values, per_fragment);
  }
}

bool HomeValues::step(Operation& operation, KindFlow& flow) {
  const ExchangeState& exchange = operation.exchange();
  bool advanced = false;
  for (std::size_t i = 0; i < receivers_.size() && operation.running(); ++i) {
    LaneReceiver& receiver = receivers_[i];
    LaneInbox& inbox = flow.inboxes[i];
    if (inbox.ordinal != operation.call().ordinal) continue;
    if (!receiver.done()) receiver.grant_through(operation, inbox, receiver.range());
    while (const auto taken = receiver.take(operation, inbox, exchange.framings.values)) {
      const std::byte* const payload = taken->arrived.payload();
      float* const place = &list_[static_cast<std::size_t>(begins_[i]) + taken->fragment.first];
      exchange.engine.transport().pack_rows({.hidden = taken->fragment.count,
                                             .rows = std::span(&payload, 1),
                                             .out = reinterpret_cast<std::byte*>(place)});
      advanced = true;
    }
    if (operation.running() && receiver.done()) receiver.end_use(operation, inbox);
  }
  return advanced;
}

bool HomeValues::done() const {
  return std::ranges::all_of(receivers_, [](const LaneReceiver& lane) { return lane.done(); });
}

int HomeValues::missing_rank() const {
  for (const LaneReceiver& receiver : receivers_) {
    if (!receiver.done()) return receiver.lane().peer;
  }
  return -1;
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
