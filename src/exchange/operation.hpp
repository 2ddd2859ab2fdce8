#pragma once
// An operation of an exchange: a resumable sequence of steps. It never waits; the engine calls
// step() until the operation says that it is over.
// Life: running -> succeeded
//               -> failing (an error is known; peers may still read memory of the caller) -> failed

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "exchange/state.hpp"
#include "ferry/error.hpp"
#include "wire/headers.hpp"

namespace ferry::detail {

/// Phases in which an operation can wait for a peer; shown in errors.
enum class Phase : std::uint8_t {
  none,
  metadata,        ///< its routing has not arrived
  node_counts,     ///< it has not published the counts of the node
  window_granted,  ///< it has not offered its window
  rows,            ///< its rows have not arrived
  rows_pushed,     ///< it has not written all rows into this rank's window
  credit,          ///< it has not granted memory for more fragments
  outputs,         ///< its expert outputs are not there yet
  partial_sums,    ///< its partial sums have not arrived
  values,          ///< its gradients of weights have not arrived
  outputs_read,    ///< it has not finished reading this rank's outputs
  sends,           ///< it has not taken what was sent to it
  earlier_call,    ///< it has not ended an earlier call
};
std::string_view to_string(Phase phase);

/// Two ranks made different calls at one place: the error that names both.
Error different_calls(const wire::CallId& a, int rank_a, const wire::CallId& b, int rank_b);

struct WaitTarget {
  int rank = -1;
  Phase phase = Phase::none;
};

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  /// Moves on as far as possible without waiting. True when something moved.
  virtual bool step() = 0;
  /// Whom step() needs next.
  virtual WaitTarget waits_for() const = 0;
  /// After a failure: true once no peer touches memory that the caller gets back.
  virtual bool quiet() { return true; }

  /// Why the caller cannot wait for this operation yet.
  virtual std::optional<Error> find_wait_error() const { return std::nullopt; }

  /// Called when a failure is reported before that: keeps what peers may still touch.
  virtual void abandon() {}

  void fail(const Error& error);
  /// Ends now, whatever peers still do: what they may touch is kept.
  void give_up(const Error& error);
  bool running() const { return state_ == State::running; }
  bool failing() const { return state_ == State::failing; }
  /// May be asked while another thread works on it.
  bool over() const {
    const State state = state_;
    return state == State::succeeded || state == State::failed;
  }
  const std::optional<Error>& error() const { return error_; }
  void end_failing() { state_ = State::failed; }

  const wire::CallId& call() const { return call_; }
  ExchangeState& exchange() const { return *exchange_; }
  /// Null while the plan is being made.
  const std::shared_ptr<PlanState>& plan() const { return plan_; }
  /// "dispatch (call 3.1 of exchange 0, plan 2) on rank 0"
  std::string describe() const;
  /// Takes the next place in the order of calls. Called once, when the operation starts.
  void take_place();

  int sends_in_flight = 0;  ///< of this operation; kept by the engine

  /// The plan that it works on.
  enum class PlanUse : std::uint8_t {
    known,  ///< it exists
    opens,  ///< gets its number with this call
    joins,  ///< has its number, from another call, and is being made
  };

 protected:
  Operation(std::shared_ptr<ExchangeState> exchange, std::shared_ptr<PlanState> plan,
            wire::OpKind kind);
  /// `plan_number` for a plan that is being made.
  Operation(std::shared_ptr<ExchangeState> exchange, wire::OpKind kind, PlanUse use,
            std::uint32_t plan_number = kNoPlan);
  void set_plan(std::shared_ptr<PlanState> plan) { plan_ = std::move(plan); }
  void succeed() { state_ = State::succeeded; }
  Engine& engine() const;

 private:
  friend class Engine;
  enum class State : std::uint8_t { running, failing, succeeded, failed };

  // Shared by the caller's handle and by every operation of the exchange.
  std::shared_ptr<ExchangeState> exchange_;
  // Shared by the caller's Plan and by every operation on it; empty while planning.
  std::shared_ptr<PlanState> plan_;
  const PlanUse plan_use_;
  wire::CallId call_;
  std::atomic<State> state_ = State::running;
  std::optional<Error> error_;
};

}  // namespace ferry::detail
