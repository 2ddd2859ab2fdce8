#pragma once
// Rows of this rank that ranks of its node read during one call, and FP32 numbers behind them where
// the call has some. Rows that already lie in a window of this rank are read there; anything else
// is copied into one first.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "exchange/operation.hpp"
#include "exchange/row_pusher.hpp"
#include "exchange/slots.hpp"
#include "ferry/matrix.hpp"

namespace ferry::detail {

class ShownRows {
 public:
  using Values = std::optional<std::span<const float>>;

  ShownRows(ConstMatrix rows, WindowRole role, Values values = std::nullopt)
      : rows_(rows), role_(role), values_(values) {}

  /// Takes a slot, copies into it where needed, and shows it. True when something moved.
  bool step(Operation& operation);
  bool shown() const { return shown_; }
  /// A rank that may still read; -1 if none. Requires: shown()
  int missing_reader(const Operation& operation) const;
  /// Whom step() waits for. Requires: !shown()
  WaitTarget waits_for(const Operation& operation) const;
  /// Nobody reads any more.
  void end();

  /// After a failure: true once nobody reads any more.
  bool quiet(const Operation& operation);
  /// Keeps the slot for those who still read.
  void abandon(const Operation& operation);

 private:
  bool take_slot(Operation& operation);
  bool may_stay(const Operation& operation) const;
  void write_values(Operation& operation) const;
  bool copy_some(Operation& operation);
  bool show(Operation& operation);

  const ConstMatrix rows_;
  const WindowRole role_;
  const Values values_;
  std::unique_ptr<SlotLease> lease_;
  std::uint64_t turn_ = 0;
  std::int64_t copied_rows_ = 0;
  bool shown_ = false;
  RowPusher pusher_;
};

}  // namespace ferry::detail
