#pragma once
// One thread at a time works on a transport: the caller's, or the one of a ProgressThread. Held
// during every call from outside and every round of the progress thread, so a wait for it is short
// but for one case: a progress thread waits while the caller waits, which does the same work.

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

namespace ferry::detail {

class SoleUse {
 public:
  SoleUse();
  ~SoleUse();
  SoleUse(const SoleUse&) = delete;
  SoleUse& operator=(const SoleUse&) = delete;

  /// Of the thread that holds it. A forked child gets it at once: it has no other threads, and
  /// the parent's may hold its copy for ever.
  void lock();
  /// False where another thread holds it. Not in a forked child.
  bool try_lock() { return !is_forked() && mutex_.try_lock(); }
  void unlock();

  /// Another thread waits in lock().
  bool is_wanted() const { return waiting_.load(std::memory_order_relaxed) > 0; }
  /// This process was forked from the one that made the object.
  bool is_forked() const;

  // For the progress thread -----------------------------------------------------------------------
  /// False where there is one already.
  bool take_progress();
  void give_progress_back();
  /// Says that a call runs that needs rounds of work. Requires: held
  void work_came();
  /// Requires: held
  void no_work() { has_work_ = false; }
  /// Gives it away until there is work, or until `stop`. Requires: held once, by a lock
  void wait_for_work(const std::atomic<bool>& stop);
  /// Wakes wait_for_work.
  void wake();

 private:
  void unmap_marker();

  std::recursive_mutex mutex_;
  std::unique_ptr<std::condition_variable_any> woken_;
  std::atomic<int> waiting_{0};
  const pid_t process_;
  unsigned char* marker_ = nullptr;  ///< of its own page: 1, and 0 in a forked child; or null
  bool has_work_ = false;
  bool has_progress_ = false;
};

/// Holds it in a scope. Keeps the object too: what is destroyed meanwhile may hold the last other
/// handle.
class UseHold {
 public:
  explicit UseHold(std::shared_ptr<SoleUse> use) : use_(std::move(use)) { use_->lock(); }
  ~UseHold() { use_->unlock(); }
  UseHold(const UseHold&) = delete;
  UseHold& operator=(const UseHold&) = delete;

 private:
  // Shared by the transport, what was made with it, and whoever holds it.
  const std::shared_ptr<SoleUse> use_;
};

}  // namespace ferry::detail
