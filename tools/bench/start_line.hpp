#pragma once
// Where ranks meet before something is timed. A barrier of Ferry comes before it, so no rank has
// work left for another; this one only makes the ranks start together, without the latency with
// which a barrier between nodes lets them go.

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
  StartLine() = default;
  StartLine(const StartLine&) = delete;
  StartLine& operator=(const StartLine&) = delete;
  virtual ~StartLine() = default;

  /// Returns once every rank has arrived.
  /// Errors: StartLineBroken, or peer_failed of a job's ranks
  virtual void arrive_and_wait() = 0;
  /// Frees all ranks that wait or will wait. For ranks of a job Transport::abort does.
  virtual void break_off() {}
};

/// Of ranks that are threads of this process.
class ThreadLine final : public StartLine {
 public:
  explicit ThreadLine(int num_ranks) : num_ranks_(num_ranks) {}

  void arrive_and_wait() override {
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

  void break_off() override { broken_.store(true, std::memory_order_release); }

 private:
  const int num_ranks_;
  std::atomic<int> arrived_{0};
  std::atomic<int> round_{0};
  std::atomic<bool> broken_{false};
};

}  // namespace ferry::bench
