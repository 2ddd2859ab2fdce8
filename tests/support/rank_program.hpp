#pragma once
// One test body for every transport. A body is a coroutine that all ranks run:
//
//   Task body(RankContext& context) {
//     Exchange exchange(context.transport(), ...);
//     Plan plan = co_await exchange.start_plan(routing);   // its result, or its error is thrown
//   }
//
// On the threads transport co_await waits; on the stepped one it suspends, and a scheduler with a
// seed decides which rank makes a step next, who is held back and when messages move. A program
// never hangs: threads have a deadline, steps a limit that ends it with the state of every rank.
// Under a launcher the programs of the threads transport run on the processes of its MPI job
// (mpi_program.hpp): a body then shares no memory with those of other ranks.

#include <atomic>
#include <coroutine>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/pending.hpp"
#include "ferry/topology.hpp"
#include "ferry/transport.hpp"

namespace ferry::support {

class RankContext;
class Runner;
class Meeting;

/// The body of one rank, or a part of it that a body awaits. Starts when it is awaited.
class [[nodiscard]] Task {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;

  explicit Task(Handle handle) : handle_(handle) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&&) = delete;
  ~Task() {
    if (handle_) handle_.destroy();
  }
  Handle handle() const { return handle_; }

 private:
  Handle handle_;
};

/// How an operation or a rank failed; `code` is empty for what is no ferry::Error.
struct Failure {
  std::optional<ErrorCode> code;
  std::string text;
};
Failure describe_exception(const std::exception_ptr& error);

/// FERRY_TEST_PROGRESS=thread: ranks that are threads or processes have a ProgressThread each.
bool wants_progress_threads();

/// `co_await failure_of([&] { return exchange.start_plan(routing); })` gives the Failure of a call,
/// thrown at once or later, or nothing when it succeeded.
template <typename Start>
struct FailureOf {
  Start start;
};
template <typename Start>
FailureOf<Start> failure_of(Start start) {
  return {std::move(start)};
}

/// `co_await pause(n)`: this rank does nothing for n steps (stepped) or about n us (threads).
struct Pause {
  std::uint64_t steps = 0;
};
inline Pause pause(std::uint64_t steps) { return {steps}; }

/// `co_await meet()`: returns when every rank that still runs is here. Meanwhile no operation of
/// this rank moves, unless a Pending of it is given to be progressed.
struct Meet {
  detail::PendingBase* moving = nullptr;
};
inline Meet meet() { return {}; }
inline Meet meet(detail::PendingBase& moving) { return {&moving}; }

class RankContext {
 public:
  RankContext(Transport& transport, Meeting& meeting, bool blocking)
      : transport_(transport), meeting_(meeting), blocking_(blocking) {}

  Transport& transport() const { return transport_; }
  int rank() const { return transport_.rank(); }
  int num_ranks() const { return transport_.topology().num_ranks(); }
  /// Names what the rank is about, for the report of a program that does not end.
  void at(std::string place) { place_ = std::move(place); }
  /// From now on no operation of this rank is cancelled by an Injection.
  void end_injection() { may_inject_ = false; }

 private:
  friend struct Task::promise_type;
  friend class Runner;
  template <typename Result>
  friend struct PendingAwaiter;
  template <typename Start>
  friend struct FailureAwaiter;
  friend struct PauseAwaiter;
  friend struct MeetAwaiter;

  // REQUIRES: `resume` is suspended; it goes on once `ready` says so.
  void suspend(std::coroutine_handle<> resume, std::function<bool()> ready,
               detail::PendingBase* pending = nullptr) {
    resume_ = resume;
    ready_ = std::move(ready);
    pending_ = pending;
  }

  Transport& transport_;
  Meeting& meeting_;
  bool blocking_;
  std::string place_ = "before its first call";
  std::uint64_t calls_ended_ = 0;
  bool may_inject_ = true;

  std::coroutine_handle<> resume_;
  std::function<bool()> ready_;
  detail::PendingBase* pending_ = nullptr;
};

/// Where ranks wait for each other outside the library. Ranks that are processes share its state.
class Meeting {
 public:
  struct State {
    std::atomic<std::uint32_t> locked{0};
    std::atomic<int> members{0};
    std::atomic<int> arrived{0};
    std::atomic<std::uint64_t> round{0};
  };

  explicit Meeting(State& state) : state_(state) {}
  /// Comes to the current round and gives its number.
  std::uint64_t arrive();
  bool is_over(std::uint64_t round) const;
  void wait(std::uint64_t round);
  /// A rank that has ended is waited for no more.
  void leave();

 private:
  State& state_;
};

template <typename Result>
struct PendingAwaiter {
  RankContext& context;
  Pending<Result>& pending;

  bool await_ready() const { return context.blocking_ || pending.done(); }
  void await_suspend(std::coroutine_handle<> resume) {
    context.suspend(
        resume, [this] { return pending.done(); }, &pending);
  }
  Result await_resume() {
    ++context.calls_ended_;
    return pending.wait();
  }
};

template <typename Start>
struct FailureAwaiter {
  using Started = decltype(std::declval<Start&>()());

  RankContext& context;
  Start start;
  std::optional<Started> pending{};
  std::optional<Failure> failure{};

  bool await_ready() {
    try {
      pending.emplace(start());
    } catch (...) {
      failure = describe_exception(std::current_exception());
    }
    return failure || context.blocking_ || pending->done();
  }
  void await_suspend(std::coroutine_handle<> resume) {
    context.suspend(
        resume, [this] { return pending->done(); }, &*pending);
  }
  std::optional<Failure> await_resume() {
    ++context.calls_ended_;
    if (failure) return failure;
    try {
      pending->wait();
    } catch (...) {
      failure = describe_exception(std::current_exception());
    }
    return failure;
  }
};

struct PauseAwaiter {
  RankContext& context;
  std::uint64_t steps;

  bool await_ready();
  void await_suspend(std::coroutine_handle<> resume) {
    context.suspend(resume, [this] { return steps-- == 0; });
  }
  void await_resume() const {}
};

struct MeetAwaiter {
  RankContext& context;
  detail::PendingBase* moving;
  std::uint64_t round = 0;

  bool await_ready();
  void await_suspend(std::coroutine_handle<> resume) {
    context.suspend(
        resume, [this] { return context.meeting_.is_over(round); }, moving);
  }
  void await_resume() const {}
};

struct Task::promise_type {
  // A coroutine finds its rank among its arguments: first in a function, second in a member or in a
  // lambda, whose object comes first.
  template <typename... Rest>
  explicit promise_type(RankContext& rank_context, Rest&&...) : context(&rank_context) {}
  template <typename Self, typename... Rest>
  promise_type(Self&&, RankContext& rank_context, Rest&&...) : context(&rank_context) {}

  Task get_return_object() { return Task(Handle::from_promise(*this)); }
  std::suspend_always initial_suspend() noexcept { return {}; }
  auto final_suspend() noexcept {
    struct ToCaller {
      bool await_ready() noexcept { return false; }
      std::coroutine_handle<> await_suspend(Handle ended) noexcept {
        const auto next = ended.promise().caller;
        return next ? next : std::noop_coroutine();
      }
      void await_resume() noexcept {}
    };
    return ToCaller{};
  }
  void return_void() {}
  void unhandled_exception() { error = std::current_exception(); }

  template <typename Result>
  PendingAwaiter<Result> await_transform(Pending<Result>& pending) {
    return {*context, pending};
  }
  template <typename Result>
  PendingAwaiter<Result> await_transform(Pending<Result>&& pending) {
    return {*context, pending};  // the temporary lives until the co_await expression ends
  }
  template <typename Start>
  FailureAwaiter<Start> await_transform(FailureOf<Start> call) {
    return {*context, std::move(call.start)};
  }
  PauseAwaiter await_transform(Pause wanted) { return {*context, wanted.steps}; }
  MeetAwaiter await_transform(Meet wanted) { return {*context, wanted.moving}; }
  auto await_transform(Task&& part) {
    struct Part {
      Handle callee;
      bool await_ready() const { return false; }
      std::coroutine_handle<> await_suspend(std::coroutine_handle<> resume) {
        callee.promise().caller = resume;
        return callee;
      }
      void await_resume() const {
        if (callee.promise().error) std::rethrow_exception(callee.promise().error);
      }
    };
    return Part{part.handle()};
  }

  RankContext* context;
  std::coroutine_handle<> caller;
  std::exception_ptr error;
};

enum class TransportKind : std::uint8_t { threads, stepped };
std::string_view to_string(TransportKind kind);

/// At the first step from `step` on at which `rank` waits for an operation, that is cancelled.
struct Injection {
  std::uint64_t step = 0;
  int rank = 0;
  std::string reason;
};

struct ProgramOptions {
  TransportKind transport = TransportKind::threads;
  Topology topology = Topology::single_node(1);
  double deadline_s = 60;  ///< threads: of the library's own waits

  // Stepped only
  std::uint64_t seed = 1;
  int max_delay_steps = 40;
  std::uint64_t fragment_bytes = 1024;
  /// A rank makes no step for up to that many, now and then; 0 = never.
  std::uint64_t max_hold_steps = 0;
  std::uint64_t step_limit = 2'000'000;
  /// A bit of the first payload message from one rank to another flips on the way.
  std::optional<std::pair<int, int>> corrupt_first{};
  std::optional<Injection> injection{};
};

struct ProgramResult {
  std::vector<std::optional<Failure>> failures;  ///< by rank: what its body ended with
  std::string hang;  ///< the state of all ranks, when the step limit was reached
  std::uint64_t steps = 0;
  std::uint64_t calls_ahead = 0;  ///< most calls that a rank had ended before another one
  bool injected = false;

  bool ok() const;
  /// All failures and the hang, one per line.
  std::string describe() const;
};

using Body = std::function<Task(RankContext&)>;

/// Runs `body` on every rank. Returns when all have ended; throws nothing that a body threw.
ProgramResult run_program(const ProgramOptions& options, const Body& body);

/// Values that bodies wrote, one per rank. Under a launcher, where a process knows those of its own
/// rank, all of them become known; else nothing changes. Called on every process.
void gather_by_rank(std::vector<std::uint64_t>& values);
void gather_by_rank(std::vector<std::optional<Failure>>& failures);

/// Throws std::runtime_error with the text if there is one: for checks inside a body.
void require(const std::optional<std::string>& fault);
/// Throws std::runtime_error with `text` unless `condition` holds.
void require(bool condition, const std::string& text);

}  // namespace ferry::support
