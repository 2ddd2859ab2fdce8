// Rows of this rank that its node reads: see shown_rows.hpp.

#include "exchange/shown_rows.hpp"

#include <algorithm>

#include "exchange/engine.hpp"

namespace ferry::detail {
namespace {

constexpr std::uint64_t kCopyBytesPerStep = 1U << 20U;

}  // namespace

bool ShownRows::step(Operation& operation) {
  bool advanced = take_slot(operation);
  advanced |= copy_some(operation);
  return show(operation) || advanced;
}

bool ShownRows::take_slot(Operation& operation) {
  if (lease_) return false;
  const ExchangeState& exchange = operation.exchange();
  SlotPool& slots = exchange.engine.slots();
  const std::uint64_t bytes = operation.plan()->slot_bytes;
  if (rows_.stride_bytes() == static_cast<std::int64_t>(exchange.window_stride_bytes)) {
    lease_ = slots.find(rows_.data);
  }
  if (lease_ && may_stay(operation)) {
    copied_rows_ = rows_.rows;
  } else {
    lease_ = slots.take(bytes, operation.describe());
  }
  return true;
}

// Numbers are written behind the rows: in a slot that was taken for a larger plan, those are rows
// of the caller.
bool ShownRows::may_stay(const Operation& operation) const {
  const std::uint64_t bytes = operation.plan()->slot_bytes;
  const Slot& slot = lease_->slot();
  return values_ ? slot.wanted_bytes == bytes : slot.capacity_bytes >= bytes;
}

void ShownRows::write_values(Operation& operation) const {
  if (!values_ || values_->empty()) return;
  const std::byte* const values = reinterpret_cast<const std::byte*>(values_->data());
  operation.exchange().engine.transport().pack_rows(
      {.hidden = static_cast<std::int64_t>(values_->size()),
       .rows = std::span(&values, 1),
       .out = lease_->slot().data() + operation.plan()->summary.window_bytes});
}

bool ShownRows::copy_some(Operation& operation) {
  if (copied_rows_ == rows_.rows) return false;
  const ExchangeState& exchange = operation.exchange();
  const auto stride = static_cast<std::int64_t>(exchange.window_stride_bytes);
  const auto most = static_cast<std::int64_t>(kCopyBytesPerStep / exchange.row_bytes + 1);
  const std::int64_t end = std::min(rows_.rows, copied_rows_ + most);
  pusher_.clear();
  for (; copied_rows_ < end; ++copied_rows_) {
    pusher_.add_target(lease_->slot().data() + copied_rows_ * stride);
    pusher_.add_row(rows_.row(copied_rows_));
  }
  pusher_.push(exchange.engine.transport(), exchange.shape.hidden, exchange.shape.dtype,
               exchange.shape.dtype);
  return true;
}

bool ShownRows::show(Operation& operation) {
  if (shown_ || copied_rows_ < rows_.rows || lease_->slot().shown) return false;
  write_values(operation);  // not before: another call may still show what stands there
  const PlanState& plan = *operation.plan();
  shown_ = operation.exchange().engine.publish(
      operation, lease_->slot(),
      {.bytes = plan.slot_bytes, .readers = plan.rows.rows_from, .role = role_});
  if (shown_) turn_ = lease_->slot().turn;
  return shown_;
}

int ShownRows::missing_reader(const Operation& operation) const {
  const std::vector<std::uint64_t>& readers = operation.plan()->rows.rows_from;
  const Slot& slot = lease_->slot();
  const Engine& engine = operation.exchange().engine;
  for (int local = 0; local < static_cast<int>(readers.size()); ++local) {
    if (readers[local] == 0) continue;
    if (engine.transport().reached(slot.layout.released(slot.base, local).value, turn_)) continue;
    // After a failure readers give up instead of reading to the end.
    if (operation.failing() && operation.exchange().has_left(operation.call().plan, local)) {
      continue;
    }
    return engine.node_ranks()[local];
  }
  return -1;
}

WaitTarget ShownRows::waits_for(const Operation& operation) const {
  const Engine& engine = operation.exchange().engine;
  if (lease_ && lease_->slot().shown) return engine.slot_holder(lease_->slot());
  return {engine.slow_reader(operation, operation.plan()->rows.rows_from), Phase::earlier_call};
}

void ShownRows::end() {
  if (shown_) lease_->slot().shown = false;
  lease_.reset();
}

bool ShownRows::quiet(const Operation& operation) {
  if (lease_ && shown_ && missing_reader(operation) >= 0) return false;
  end();
  return true;
}

void ShownRows::abandon(const Operation& operation) {
  if (lease_) operation.exchange().engine.retire(std::move(lease_), operation);
}

}  // namespace ferry::detail
