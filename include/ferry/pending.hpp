#pragma once
// An operation that was started and may not be finished.

#include <memory>
#include <string>
#include <utility>

namespace ferry {

namespace detail {

class Operation;

/// The part of Pending that does not depend on the result.
class PendingBase {
 public:
  PendingBase(PendingBase&&) noexcept;
  PendingBase& operator=(PendingBase&&) noexcept;
  ~PendingBase();

  /// One round of work for all operations on this transport. True once this one has ended.
  bool progress();
  /// True once this operation has ended, well or not; wait() then returns at once.
  bool done() const;
  /// Gives up: the operation fails on every rank with this text. x and out are free at once; y that
  /// lies in a window only when done() is true, because peers may still read it.
  void cancel(const std::string& reason);

  Operation& operation() const { return *operation_; }

 protected:
  explicit PendingBase(std::shared_ptr<Operation> operation);
  /// Waits, then throws the operation's error if it failed.
  void finish();

 private:
  // Shared by this handle and the engine, which drives it until all duties to peers are done.
  std::shared_ptr<Operation> operation_;
  bool result_taken_ = false;
};

}  // namespace detail

/// Requires: buffers given at the start stay alive until done. Dropping an unfinished Pending
///           cancels it on all ranks. A Pending must go before its transport.
/// Polling:  with no wait() running, call progress() about every 100 us; peers that need rows from
///           this rank wait meanwhile.
template <typename Result>
class Pending : public detail::PendingBase {
 public:
  using Take = Result (*)(detail::Operation&);
  Pending(std::shared_ptr<detail::Operation> operation, Take take)
      : PendingBase(std::move(operation)), take_(take) {}

  /// Drives all operations of the transport until this one ends; gives its result once.
  /// Errors: whatever the operation failed with, the same text on every rank.
  Result wait() {
    finish();
    return take_(operation());
  }

 private:
  Take take_;
};

}  // namespace ferry
