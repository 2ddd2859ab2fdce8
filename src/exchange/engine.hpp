#pragma once
// The engine of one transport: drives all operations of all its exchanges, hands what arrives to
// them, and carries refusals to every rank. One per transport, made at first use.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "exchange/network.hpp"
#include "exchange/operation.hpp"
#include "exchange/plan_memory.hpp"
#include "exchange/slots.hpp"
#include "exchange/state.hpp"
#include "ferry/exchange.hpp"
#include "ferry/transport.hpp"
#include "transport/sole_use.hpp"

namespace ferry::detail {

class DispatchOperation;

/// What a call shows of a slot, and to whom.
struct Showing {
  std::uint64_t bytes = 0;
  std::span<const std::uint64_t> readers;  ///< ranks of the node with a count above 0
  WindowRole role = WindowRole::main;
};

class Engine final : public TransportAttachment {
 public:
  static Engine& of(Transport& transport);
  explicit Engine(Transport& transport);
  ~Engine() override;

  Transport& transport() const { return transport_; }
  /// Expires when the engine goes; an exchange may be dropped later.
  std::weak_ptr<const bool> alive() const { return alive_; }
  int rank() const { return transport_.rank(); }
  /// Ranks of this node; local indices count in it.
  const std::vector<int>& node_ranks() const { return node_ranks_; }
  int local_index() const { return local_index_; }
  TransportLimits& limits() { return limits_; }
  SlotPool& slots() { return slots_; }
  const SlotPool& slots() const { return slots_; }
  Network& network() { return network_; }
  PlanMemory& plan_memory() { return plan_memory_; }
  const Network& network() const { return network_; }

  // Exchanges
  /// Number of the next exchange; taken by `add`, so that one that was refused takes none.
  std::uint32_t next_exchange_number() const { return next_exchange_; }
  void add(const std::shared_ptr<ExchangeState>& exchange);
  /// Takes back the credit of an exchange that goes away, and says so to the node.
  void let_go(ExchangeState& exchange);
  /// The exchange of barriers and all_gather.
  const std::shared_ptr<ExchangeState>& world();

  // Calls
  /// Takes up an operation: it gets its place, and may take its first steps. With a refusal it
  /// fails at once, here and on every rank.
  void start(const std::shared_ptr<Operation>& operation, const std::optional<Error>& refusal);
  /// The same without a first step.
  void enter(const std::shared_ptr<Operation>& operation, const std::optional<Error>& refusal);
  /// One round of work for everything. True when something moved.
  bool progress();
  Progress work() noexcept override;
  /// Fails a running operation here and on every rank.
  void refuse(Operation& operation, const Error& error);
  /// The operation that makes a plan; null when none does.
  const Operation* find_planning(const ExchangeState& exchange, std::uint32_t plan) const;
  /// Gives what came early for a plan to whoever can take it now.
  void deliver_early(ExchangeState& exchange, std::uint32_t plan);
  /// A finished plan: its credit starts, and what came early for it is handed over.
  void adopt_plan(ExchangeState& exchange, const std::shared_ptr<PlanState>& plan);

  // Node memory
  /// Address of a region of a rank of this node; null while it does not exist.
  std::byte* map(int owner, std::uint64_t key);
  /// Shows a slot for this call to ranks of the node. False while another call shows it, or while
  /// one of them has many notices to read.
  bool publish(const Operation& operation, Slot& slot, const Showing& showing);
  /// Whom the call that shows a slot waits for.
  WaitTarget slot_holder(const Slot& slot) const;
  /// A rank that publish waits for; -1 if none.
  int slow_reader(const Operation& operation, std::span<const std::uint64_t> readers) const;
  /// The window of a rank of this node for this call; null while it is not there.
  const ShownWindow* find_window(const Operation& operation, WindowRole role, int local_rank) const;
  /// Keeps a slot until each rank of the node has released it or left the plan.
  void retire(std::unique_ptr<SlotLease> lease, const Operation& operation);

  // Waiting
  void show_waiting(const Operation* operation);
  std::uint64_t life_sign(const WaitTarget& target);
  /// The text of a timeout: who was waited for, to the end of the chain in this node.
  std::string describe_wait(const Operation& operation, double waited_s);

 private:
  friend class CallerGuard;
  struct Retiring {
    std::unique_ptr<SlotLease> lease;
    // Shared with the caller's handle; kept until the slot is free.
    std::shared_ptr<ExchangeState> exchange;
    std::uint32_t plan;
    std::uint64_t turn;
  };

  // engine.cpp
  bool step_calls();
  bool settle_call(ExchangeState& exchange, Operation& operation);
  /// Something that peers need is not with them yet, though no call runs.
  bool owes_peers() const;
  /// The transport cannot go on: every call ends here and, where that can be told, everywhere.
  void end_calls(const Error& error) noexcept;
  bool release_retired();
  int missing_release(const Retiring& retiring) const;
  void fail_all(const Error& error);
  void drop_dead_plans(ExchangeState& exchange);
  void retire_flow(ExchangeState::KnownPlan& known);

  // arrivals.cpp
  bool receive();
  void handle(Arrival arrival);
  void handle_fragment(Arrival arrival);
  void deliver_fragment(ExchangeState& exchange, int source, ArrivedFragment fragment);
  void handle_control(Arrival arrival);
  void handle_metadata(Arrival arrival);
  void apply_grant(ExchangeState& exchange, int source, const wire::Grant& grant);
  bool read_boards();
  void handle_window(ExchangeState& exchange, int local_rank, const Notice& notice);
  static DispatchOperation* find_early(const ExchangeState& exchange, std::uint32_t plan);
  static bool is_coming(const ExchangeState& exchange, std::uint32_t plan);
  static bool is_wanted(const ExchangeState& exchange, const wire::CallId& call);
  bool check_order(ExchangeState& exchange, const wire::CallId& call, int source);
  std::shared_ptr<ExchangeState> find_exchange(std::uint32_t id);
  void refuse_message(int source, const std::string& why);
  void refuse_call(ExchangeState& exchange, const wire::CallId& call, const std::string& why);

  // poison.cpp
  void broadcast(ExchangeState& exchange, const Poison& poison);
  void apply(ExchangeState& exchange, const Poison& poison);
  void apply_to_place(ExchangeState& exchange, const Poison& poison);
  bool fail_plan(ExchangeState& exchange, const wire::CallId& call, const Error& error);
  void leave_failed_plans(ExchangeState& exchange);

  // Watched by exchanges.
  std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);
  Transport& transport_;
  const std::vector<int>& node_ranks_;
  const int local_index_;
  TransportLimits limits_;
  SlotPool slots_;
  PlanMemory plan_memory_;
  Network network_;
  std::uint32_t next_exchange_ = 0;
  // Also held by callers and operations; an exchange nobody holds is dropped.
  std::map<std::uint32_t, std::weak_ptr<ExchangeState>> exchanges_;
  std::shared_ptr<ExchangeState> world_;
  std::map<std::pair<int, std::uint64_t>, std::byte*> mapped_;
  std::vector<Retiring> retiring_;
  std::vector<std::unique_ptr<NodeBoard>> closing_;   ///< of exchanges that went, with notices left
  std::vector<std::shared_ptr<Operation>> stepping_;  ///< reused from round to round
  /// Messages for exchanges that this rank has not made yet.
  std::map<std::uint32_t, std::vector<Arrival>> ahead_;
  bool any_running_ = false;  ///< a call was not over at the end of the last round
  std::atomic<const void*> caller_{nullptr};
  int caller_depth_ = 0;
};

/// Held during every call from outside. Errors: wrong_thread when another thread is inside, other
/// than a progress thread; peer_failed in a forked child.
class CallerGuard {
 public:
  explicit CallerGuard(Engine& engine);
  ~CallerGuard();
  CallerGuard(const CallerGuard&) = delete;
  CallerGuard& operator=(const CallerGuard&) = delete;

 private:
  Engine& engine_;
  std::optional<UseHold> hold_;
};

/// Region key of the control block of an exchange.
constexpr std::uint64_t control_key(std::uint32_t exchange) { return (1ULL << 63U) | exchange; }

}  // namespace ferry::detail
