// The thread behind ProgressThread: one round of work at a time, and the transport is free for the
// caller in between.

#include "ferry/progress_thread.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include <fmt/format.h>

#include "base/clock.hpp"
#include "ferry/error.hpp"
#include "transport/sole_use.hpp"

namespace ferry {
namespace detail {

namespace {

// Between rounds that found nothing, each sleep twice the one before. It never yields: where its
// core computes too, it would get the core back only after a whole slice of the scheduler, several
// ms, and a short sleep ends at once. On a link of 1 Gbit/s a fragment takes 500 us, and several
// are in flight, so the longest sleep costs nothing there; shorter ones take more of the core.
constexpr std::chrono::microseconds kFirstSleep{20};
constexpr std::chrono::microseconds kLongestSleep{160};
constexpr int kMostYields = 100;
// After the last call: a send may be done for MPI, and its bytes still wait for room in a socket.
constexpr double kTail_s = 0.02;

/// No signal of the program is handled on a thread made while this lives.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    // Those of a fault come to the thread that made it, and end it where they are blocked.
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace

class ProgressLoop {
 public:
  explicit ProgressLoop(Transport& transport) : transport_(transport), use_(transport.sole_use()) {
    transport.check_caller();
    transport.check_progress_thread();
    if (!use_->take_progress()) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("ProgressThread: the transport of rank {} has one already; fix: make "
                              "one per transport",
                              transport.rank()));
    }
    const SignalsBlocked blocked;
    try {
      thread_ = std::make_unique<std::thread>([this] { run(); });
    } catch (const std::exception& error) {
      use_->give_progress_back();
      throw Error(ErrorCode::resource_exhausted,
                  fmt::format("ProgressThread: no thread on rank {}: {}; fix: raise the limit of "
                              "threads",
                              transport.rank(), error.what()));
    }
    ::pthread_setname_np(thread_->native_handle(), "ferry-progress");
  }
  ProgressLoop(const ProgressLoop&) = delete;
  ProgressLoop& operator=(const ProgressLoop&) = delete;

  ~ProgressLoop() {
    if (use_->is_forked()) {
      static_cast<void>(thread_.release());  // a forked child has no such thread
      return;
    }
    stop_.store(true, std::memory_order_relaxed);
    use_->wake();
    thread_->join();
    use_->give_progress_back();
  }

 private:
  void run() {
    ::prctl(PR_SET_TIMERSLACK, 1UL);  // else each sleep is 50 us longer
    std::chrono::microseconds sleep = kFirstSleep;
    while (!stop_.load(std::memory_order_relaxed)) {
      if (round() == Progress::idle) {
        std::this_thread::sleep_for(sleep);
        sleep = std::min(2 * sleep, kLongestSleep);
      } else {
        sleep = kFirstSleep;
      }
      // The mutex alone is not fair. Few yields: who wants it may have to wait for the caller.
      for (int i = 0; i < kMostYields && use_->is_wanted(); ++i) ::sched_yield();
    }
  }

  /// `done`: nothing needs a round.
  Progress round() {
    const UseHold hold(use_);
    use_->wait_for_work(stop_);
    if (stop_.load(std::memory_order_relaxed)) return Progress::done;
    const Progress moved = transport_.attachment->work();
    const double now_s = base::now_s();
    if (moved != Progress::done) worked_at_s_ = now_s;
    if (now_s - worked_at_s_ < kTail_s) return moved == Progress::done ? Progress::idle : moved;
    use_->no_work();
    return Progress::done;
  }

  Transport& transport_;
  // Shared with the transport and its exchanges.
  const std::shared_ptr<SoleUse> use_;
  std::atomic<bool> stop_{false};
  double worked_at_s_ = 0;  ///< of its thread
  std::unique_ptr<std::thread> thread_;
};

}  // namespace detail

ProgressThread::ProgressThread(Transport& transport)
    : loop_(std::make_unique<detail::ProgressLoop>(transport)) {}
ProgressThread::~ProgressThread() = default;
ProgressThread::ProgressThread(ProgressThread&&) noexcept = default;
ProgressThread& ProgressThread::operator=(ProgressThread&&) noexcept = default;

}  // namespace ferry
