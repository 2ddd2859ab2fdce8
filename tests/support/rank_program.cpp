// Runs the coroutine of every rank: on threads, or on the stepped transport in an order drawn from
// a seed and with a step limit, so that no test hangs.

#include "support/rank_program.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

#include <fmt/format.h>

#include "base/environment.hpp"
#include "ferry/progress_thread.hpp"
#include "ferry/threads.hpp"
#include "support/mpi_program.hpp"
#include "transport/stepped.hpp"

namespace ferry::support {

Failure describe_exception(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& failed) {
    return {failed.code(), failed.what()};
  } catch (const std::exception& failed) {
    return {std::nullopt, failed.what()};
  }
}

void require(const std::optional<std::string>& fault) {
  if (fault) throw std::runtime_error(*fault);
}

void require(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error(text);
}

std::string_view to_string(TransportKind kind) {
  switch (kind) {
    case TransportKind::threads: return "threads";
    case TransportKind::stepped: return "stepped";
  }
  return "unknown";
}

bool wants_progress_threads() { return base::environment("FERRY_TEST_PROGRESS") == "thread"; }

namespace {

/// Holds the state of a meeting. Ranks that are processes have no mutex in common.
class MeetingLock {
 public:
  explicit MeetingLock(Meeting::State& state) : state_(state) {
    while (state_.locked.exchange(1) != 0) std::this_thread::yield();
  }
  MeetingLock(const MeetingLock&) = delete;
  MeetingLock& operator=(const MeetingLock&) = delete;
  ~MeetingLock() { state_.locked.store(0); }

  void close_if_complete() {
    if (state_.arrived < state_.members) return;
    state_.arrived = 0;
    ++state_.round;
  }

 private:
  Meeting::State& state_;
};

}  // namespace

std::uint64_t Meeting::arrive() {
  MeetingLock lock(state_);
  const std::uint64_t round = state_.round;
  ++state_.arrived;
  lock.close_if_complete();
  return round;
}

bool Meeting::is_over(std::uint64_t round) const { return state_.round > round; }

void Meeting::wait(std::uint64_t round) {
  while (!is_over(round)) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

void Meeting::leave() {
  MeetingLock lock(state_);
  --state_.members;
  if (state_.arrived > 0) lock.close_if_complete();
}

bool PauseAwaiter::await_ready() {
  if (context.blocking_) std::this_thread::sleep_for(std::chrono::microseconds(steps));
  return context.blocking_;
}

bool MeetAwaiter::await_ready() {
  round = context.meeting_.arrive();
  if (context.blocking_ && moving != nullptr) {
    while (!context.meeting_.is_over(round)) {
      moving->progress();
      std::this_thread::yield();
    }
  } else if (context.blocking_) {
    context.meeting_.wait(round);
  }
  return context.blocking_ || context.meeting_.is_over(round);
}

bool ProgramResult::ok() const {
  return hang.empty() && std::none_of(failures.begin(), failures.end(),
                                      [](const auto& failure) { return failure.has_value(); });
}

std::string ProgramResult::describe() const {
  std::string text = hang;
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank]) continue;
    text += fmt::format("rank {} ended with: {}\n", rank, failures[rank]->text);
  }
  return text;
}

/// Drives the bodies of one program.
class Runner {
 public:
  Runner(const ProgramOptions& options, const Body& body) : options_(options), body_(body) {
    meeting_state_.members = options.topology.num_ranks();
    result_.failures.resize(static_cast<std::size_t>(options.topology.num_ranks()));
  }

  ProgramResult run() {
    switch (options_.transport) {
      case TransportKind::threads: MpiProgram::is_on() ? run_processes() : run_threads(); break;
      case TransportKind::stepped: run_stepped(); break;
    }
    return std::move(result_);
  }

 private:
  struct Rank {
    std::unique_ptr<RankContext> context;
    std::optional<Task> task;
    bool ended = false;
    std::uint64_t held_until = 0;
  };

  void run_threads() {
    threads::Options options;
    options.topology = options_.topology;
    try {
      threads::run(options, [this](Transport& transport) { run_blocking(transport, meeting_); });
    } catch (...) {
      // Every rank has noted its own error. A run that fails without any has failed by itself.
      const Failure failure = describe_exception(std::current_exception());
      if (result_.ok()) result_.hang = "threads::run failed: " + failure.text + "\n";
    }
  }

  void run_processes() {
    MpiProgram program(options_.topology);
    program.run(
        [this](Transport& transport, Meeting& meeting) { run_blocking(transport, meeting); },
        result_.failures);
  }

  void run_blocking(Transport& transport, Meeting& meeting) {
    std::optional<ProgressThread> progress;
    if (wants_progress_threads()) progress.emplace(transport);
    set_limits(transport, {.deadline_s = options_.deadline_s});
    RankContext context(transport, meeting, true);
    {
      const Task task = body_(context);
      task.handle().resume();
      const std::exception_ptr error = task.handle().promise().error;
      meeting.leave();
      if (!error) return;
      result_.failures[static_cast<std::size_t>(transport.rank())] = describe_exception(error);
      std::rethrow_exception(error);
    }
  }

  void run_stepped() {
    world_.emplace(stepped::Options{options_.topology, options_.seed, options_.max_delay_steps,
                                    options_.fragment_bytes});
    if (options_.corrupt_first) {
      world_->corrupt_next(options_.corrupt_first->first, options_.corrupt_first->second);
    }
    std::vector<Rank> ranks(result_.failures.size());
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      ranks[r].context =
          std::make_unique<RankContext>(world_->transport(static_cast<int>(r)), meeting_, false);
      ranks[r].task.emplace(body_(*ranks[r].context));
      ranks[r].context->suspend(ranks[r].task->handle(), [] { return true; });
    }
    std::size_t running = ranks.size();
    while (running > 0) {
      if (++result_.steps > options_.step_limit) {
        report_hang(ranks);
        break;
      }
      if (world_->draw(3) == 0) world_->step();
      inject(ranks);
      Rank& rank = ranks[world_->draw(ranks.size())];
      if (rank.ended || is_held(rank)) continue;
      step(rank);
      if (rank.ended) --running;
      note_distance(ranks);
    }
    ranks.clear();  // operations end while the world still stands
    world_.reset();
  }

  // One round of work for a rank, and its body goes on if what it waits for is there.
  void step(Rank& rank) {
    RankContext& context = *rank.context;
    const int number = context.rank();
    try {
      if (context.pending_ != nullptr) context.pending_->progress();
      if (!context.ready_()) return;
      context.pending_ = nullptr;
      std::exchange(context.resume_, {}).resume();
    } catch (...) {
      end(rank, std::current_exception());
      return;
    }
    if (!rank.task->handle().done()) return;
    const std::exception_ptr error = rank.task->handle().promise().error;
    end(rank, error);
    if (error) {
      world_->transport(number).abort(
          fmt::format("rank {} failed: {}", number, describe_exception(error).text));
    }
  }

  void end(Rank& rank, const std::exception_ptr& error) {
    rank.ended = true;
    meeting_.leave();
    if (!error) return;
    result_.failures[static_cast<std::size_t>(rank.context->rank())] = describe_exception(error);
  }

  bool is_held(Rank& rank) {
    if (options_.max_hold_steps == 0) return false;
    if (result_.steps < rank.held_until) return true;
    if (world_->draw(400) != 0) return false;
    rank.held_until = result_.steps + world_->draw(options_.max_hold_steps);
    return true;
  }

  void inject(std::vector<Rank>& ranks) {
    if (!options_.injection || result_.injected) return;
    const Injection& injection = *options_.injection;
    Rank& rank = ranks[static_cast<std::size_t>(injection.rank)];
    detail::PendingBase* const pending = rank.context->pending_;
    if (result_.steps < injection.step || rank.ended || !rank.context->may_inject_) return;
    if (pending == nullptr || pending->done()) return;
    pending->cancel(injection.reason);
    result_.injected = true;
  }

  void note_distance(const std::vector<Rank>& ranks) {
    const auto by_calls = [](const Rank& a, const Rank& b) {
      return a.context->calls_ended_ < b.context->calls_ended_;
    };
    const auto [low, high] = std::minmax_element(ranks.begin(), ranks.end(), by_calls);
    result_.calls_ahead =
        std::max(result_.calls_ahead, high->context->calls_ended_ - low->context->calls_ended_);
  }

  void report_hang(const std::vector<Rank>& ranks) {
    result_.hang =
        fmt::format("no end after {} steps (seed {}, {} ranks on {}):\n", options_.step_limit,
                    options_.seed, ranks.size(), options_.topology.describe());
    for (const Rank& rank : ranks) {
      const RankContext& context = *rank.context;
      const std::string_view state = rank.ended                    ? "ended"
                                     : context.pending_ != nullptr ? "waits for an operation"
                                                                   : "is suspended";
      result_.hang += fmt::format("  rank {}: {}, {} calls ended, {}\n", context.rank(), state,
                                  context.calls_ended_, context.place_);
    }
  }

  const ProgramOptions& options_;
  const Body& body_;
  Meeting::State meeting_state_;
  Meeting meeting_{meeting_state_};
  std::optional<stepped::World> world_;
  ProgramResult result_;
};

void gather_by_rank(std::vector<std::uint64_t>& values) {
  if (MpiProgram::is_on()) MpiProgram::gather(values);
}

void gather_by_rank(std::vector<std::optional<Failure>>& failures) {
  if (MpiProgram::is_on()) MpiProgram::gather(failures);
}

ProgramResult run_program(const ProgramOptions& options, const Body& body) {
  return Runner(options, body).run();
}

}  // namespace ferry::support
