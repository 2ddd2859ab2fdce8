// The window that the node fills: see written_window.hpp.

#include "exchange/written_window.hpp"

#include <vector>

#include "exchange/engine.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::detail {

bool WrittenWindow::show(Operation& operation) {
  if (shown_) return false;
  const PlanState& plan = *operation.plan();
  Engine& engine = operation.exchange().engine;
  if (!lease_) {
    lease_ = engine.slots().take(plan.slot_bytes, operation.describe());
    clear_alignment_rows(operation);
  }
  shown_ = engine.publish(operation, lease_->slot(),
                          {.bytes = plan.slot_bytes, .readers = plan.rows.rows_from});
  if (shown_) turn_ = lease_->slot().turn;
  return shown_;
}

// Nobody writes the rows between the experts' rows.
void WrittenWindow::clear_alignment_rows(const Operation& operation) const {
  const ExchangeState& exchange = operation.exchange();
  if (exchange.options.row_alignment == 1) return;
  const plan::RankPlan& rows = operation.plan()->rows;
  std::vector<kernels::SumRow> empty;
  for (std::size_t expert = 0; expert < rows.expert_counts.size(); ++expert) {
    for (std::int64_t row = rows.expert_offsets[expert] + rows.expert_counts[expert];
         row < rows.expert_offsets[expert + 1]; ++row) {
      empty.push_back(
          {lease_->slot().data() + static_cast<std::uint64_t>(row) * exchange.window_stride_bytes,
           0, 0});
    }
  }
  Transport& transport = exchange.engine.transport();
  transport.sum_rows(
      {.out = exchange.shape.dtype, .hidden = exchange.shape.hidden, .rows = empty, .terms = {}});
  if (exchange.options.extra_bytes == 0) return;
  for (kernels::SumRow& row : empty) row.out += exchange.extra_offset;
  transport.sum_rows(
      {.out = kExtraDtype, .hidden = exchange.extra_elements(), .rows = empty, .terms = {}});
}

int WrittenWindow::missing_writer(const Operation& operation) const {
  const std::vector<std::uint64_t>& writers = operation.plan()->rows.rows_from;
  const Slot& slot = lease_->slot();
  const Engine& engine = operation.exchange().engine;
  for (int local = 0; local < static_cast<int>(writers.size()); ++local) {
    if (writers[local] == 0) continue;
    const Line& line = slot.layout.written(slot.base, local);
    if (!engine.transport().reached(line.value, turn_)) return engine.node_ranks()[local];
  }
  return -1;
}

Matrix WrittenWindow::rows(const Operation& operation) const {
  const ExchangeState& exchange = operation.exchange();
  return {.data = lease_->slot().data(),
          .dtype = exchange.shape.dtype,
          .rows = operation.plan()->rows.num_rows(),
          .columns = exchange.shape.hidden,
          .row_stride_bytes = static_cast<std::int64_t>(exchange.window_stride_bytes)};
}

void WrittenWindow::give_back(const Operation& operation) {
  if (lease_ && shown_) operation.exchange().engine.retire(std::move(lease_), operation);
  lease_.reset();
}

}  // namespace ferry::detail
