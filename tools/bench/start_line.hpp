#pragma once
// Where the ranks of this process meet before something is timed. ferry::barrier comes before it,
// so no rank has work left for another; this one only makes the ranks start together, without the
// latency with which a barrier between nodes lets them go.

#include <atomic>
#include <stdexcept>
#include <thread>

namespace ferry::bench {

/// Thrown to free a rank whose peer has failed; the peer's own exception is the one to show.
class StartLineBroken : public std::runtime_error {
 public:
  StartLineBroken() : std::runtime_error("another rank of the bench failed") {}
};

class StartLine {
 public:
  explicit StartLine(int num_ranks) : num_ranks_(num_ranks) {}

  /// Returns once every rank has arrived. Errors: StartLineBroken
  void arrive_and_wait() {
    const int round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_ranks_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    while (round_.load(std::memory_order_acquire) == round) {
      if (broken_.load(std::memory_order_acquire)) throw StartLineBroken();
      std::this_thread::yield();
    }
  }

  /// Frees all ranks that wait or will wait.
  void break_off() { broken_.store(true, std::memory_order_release); }

 private:
  const int num_ranks_;
  std::atomic<int> arrived_{0};
  std::atomic<int> round_{0};
  std::atomic<bool> broken_{false};
};

}  // namespace ferry::bench
