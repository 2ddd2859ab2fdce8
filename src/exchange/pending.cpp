// Where Ferry waits: the only caller of Transport::wait_until.

#include "ferry/pending.hpp"

#include <optional>

#include "exchange/engine.hpp"

namespace ferry::detail {
namespace {

// A rank of this node must be found missing before a rank that waits for it from another node
// gives up on the innocent one in between.
constexpr double kRemotePatience = 1.25;
// Peers that give signs of life without getting on: far more than any useful wait.
constexpr double kStuckFactor = 10;

class OperationWaiter final : public Waiter {
 public:
  OperationWaiter(Engine& engine, const Operation& operation)
      : engine_(engine), operation_(operation) {}

  Progress poll() override {
    const bool advanced = engine_.progress();
    if (operation_.over()) {
      end_stall();
      return Progress::done;
    }
    if (!advanced) engine_.show_waiting(&operation_);
    note_stall(advanced);
    return advanced ? Progress::advanced : Progress::idle;
  }
  std::uint64_t life_sign() override { return engine_.life_sign(operation_.waits_for()); }
  double quiet_limit_s() const override {
    const Topology& topology = engine_.transport().topology();
    const int rank = operation_.waits_for().rank;
    const bool remote = rank >= 0 && !topology.same_node(rank, engine_.rank());
    return engine_.limits().deadline_s * (remote ? kRemotePatience : 1.0);
  }
  // Between nodes only messages show that a rank lives: one that waits for a missing rank must not
  // look missing itself.
  void show_life() override { engine_.network().show_life(); }
  double stuck_limit_s() const override { return engine_.limits().deadline_s * kStuckFactor; }

 private:
  // The host stands still as long as it needs a size or an id that another rank has not sent.
  void note_stall(bool advanced) {
    if (advanced && !stall_began_s_) return;
    const Phase phase = operation_.waits_for().phase;
    if (phase != Phase::metadata && phase != Phase::node_counts) return end_stall();
    if (!stall_began_s_) stall_began_s_ = engine_.transport().now_s();
  }
  void end_stall() {
    if (!stall_began_s_) return;
    operation_.exchange().add_stall((engine_.transport().now_s() - *stall_began_s_) * 1e6);
    stall_began_s_.reset();
  }

  Engine& engine_;
  const Operation& operation_;
  std::optional<double> stall_began_s_;
};

void wait(Engine& engine, Operation& operation) {
  OperationWaiter waiter(engine, operation);
  const WaitOutcome outcome = engine.transport().wait_until(waiter);
  engine.show_waiting(nullptr);
  if (outcome == WaitOutcome::done) return;
  engine.refuse(operation,
                Error(ErrorCode::timeout, engine.describe_wait(operation, waiter.quiet_limit_s())));
  // Nobody waits for the quiet of a peer that gave no sign of life.
  engine.progress();
  if (!operation.over()) {
    operation.abandon();
    operation.end_failing();
  }
  engine.progress();
}

}  // namespace

PendingBase::PendingBase(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}
PendingBase::PendingBase(PendingBase&&) noexcept = default;
PendingBase& PendingBase::operator=(PendingBase&& other) noexcept {
  std::swap(operation_, other.operation_);
  return *this;
}

PendingBase::~PendingBase() {
  if (!operation_) return;
  const std::shared_ptr<SoleUse> use = operation_->exchange().use;
  try {
    if (!operation_->over()) cancel("its Pending was dropped before it was done");
  } catch (const std::exception& error) {
    // Another thread is inside the transport or may not call it, against the rule; there is no
    // memory to tell the others; or this is a forked child. What it worked on may go now.
    const UseHold hold(use);
    operation_->give_up(Error(ErrorCode::cancelled, error.what()));
  }
  const UseHold hold(use);
  operation_.reset();
}

bool PendingBase::progress() {
  Engine& engine = operation_->exchange().engine;
  const CallerGuard guard(engine);
  engine.progress();
  return operation_->over();
}

bool PendingBase::done() const { return operation_->over(); }

void PendingBase::cancel(const std::string& reason) {
  Engine& engine = operation_->exchange().engine;
  const CallerGuard guard(engine);
  engine.refuse(*operation_,
                Error(ErrorCode::cancelled, operation_->describe() + " was cancelled: " + reason));
  engine.progress();
}

void PendingBase::finish() {
  Engine& engine = operation_->exchange().engine;
  const CallerGuard guard(engine);
  if (!operation_->over()) {
    if (const auto error = operation_->find_wait_error()) throw Error(*error);
    wait(engine, *operation_);
  }
  if (operation_->error()) throw Error(*operation_->error());
  if (std::exchange(result_taken_, true)) {
    throw Error(ErrorCode::invalid_argument,
                operation_->describe() + ": wait() was called twice; its result was given once");
  }
}

}  // namespace ferry::detail
