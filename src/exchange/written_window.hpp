#pragma once
// The window of this rank that ranks of its node fill during one call: the rows that dispatch or
// combine_backward brings.

#include <cstdint>
#include <memory>

#include "exchange/operation.hpp"
#include "exchange/slots.hpp"
#include "ferry/matrix.hpp"

namespace ferry::detail {

class WrittenWindow {
 public:
  /// Takes a slot and shows it to those who write. True when it was shown now.
  bool show(Operation& operation);
  bool shown() const { return shown_; }
  /// A rank that has not written all its rows; -1 if none. Requires: shown()
  int missing_writer(const Operation& operation) const;
  Matrix rows(const Operation& operation) const;
  /// Everybody has written.
  void end() { lease_->slot().shown = false; }
  /// The slot, for the handle that the caller gets.
  std::unique_ptr<SlotLease> take_lease() { return std::move(lease_); }
  /// After a failure: keeps the slot for those who may still write.
  void give_back(const Operation& operation);

 private:
  void clear_alignment_rows(const Operation& operation) const;

  std::unique_ptr<SlotLease> lease_;
  std::uint64_t turn_ = 0;
  bool shown_ = false;
};

}  // namespace ferry::detail
