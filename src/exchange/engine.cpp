// The engine of one transport: see engine.hpp. Here: its calls and the node memory they share.

#include "exchange/engine.hpp"

#include <algorithm>
#include <new>

#include <fmt/format.h>

#include "base/check.hpp"

namespace ferry::detail {
namespace {

// Its address is a name of the calling thread.
thread_local char thread_marker;

}  // namespace

CallerGuard::CallerGuard(Engine& engine) : engine_(engine) {
  const void* const self = &thread_marker;
  const void* expected = nullptr;
  if (!engine.caller_.compare_exchange_strong(expected, self, std::memory_order_acquire) &&
      expected != self) {
    throw Error(ErrorCode::wrong_thread,
                fmt::format("rank {}: a second thread called Ferry while another one was inside; a "
                            "transport with all its exchanges serves one thread at a time; fix: "
                            "make the calls of one transport from one thread, or lock around them",
                            engine.rank()));
  }
  ++engine.caller_depth_;
}

CallerGuard::~CallerGuard() {
  if (--engine_.caller_depth_ == 0) engine_.caller_.store(nullptr, std::memory_order_release);
}

Engine& Engine::of(Transport& transport) {
  if (!transport.attachment) transport.attachment = std::make_unique<Engine>(transport);
  auto* const engine = dynamic_cast<Engine*>(transport.attachment.get());
  FERRY_ASSERT(engine != nullptr, "the transport carries something that is not an engine");
  return *engine;
}

Engine::Engine(Transport& transport)
    : transport_(transport),
      node_ranks_(transport.topology().ranks_of(transport.node())),
      local_index_(transport.topology().local_index(transport.rank())),
      slots_(transport),
      network_(transport, limits_) {
  // One expert and one column: this exchange only carries bytes of all_gather.
  world_ = std::make_shared<ExchangeState>(*this, next_exchange_number(), Placement::from_map({0}),
                                           RowShape{.hidden = 1, .dtype = DType::f32},
                                           ExchangeOptions{});
  add(world_);
}

// Calls hold their exchange, and the exchange its calls: what is still there is let go here.
Engine::~Engine() {
  alive_.reset();
  for (const auto& [id, weak] : exchanges_) {
    if (const std::shared_ptr<ExchangeState> exchange = weak.lock()) exchange->calls.clear();
  }
}

const std::shared_ptr<ExchangeState>& Engine::world() { return world_; }

void Engine::add(const std::shared_ptr<ExchangeState>& exchange) {
  network_.grow_blocks(
      wire::kFragmentHeaderBytes +
      std::max(exchange->dispatch_framing.row_bytes * exchange->dispatch_framing.rows_per_fragment,
               exchange->combine_framing.row_bytes * exchange->combine_framing.rows_per_fragment));
  exchanges_[exchange->id] = exchange;
  next_exchange_ = exchange->id + 1;
  // Peers may have made the exchange earlier and used it already.
  if (auto waiting = ahead_.extract(exchange->id)) {
    for (Arrival& arrival : waiting.mapped()) {
      if (arrival.kind == MessageKind::metadata)
        handle_metadata(std::move(arrival));
      else
        handle_control(std::move(arrival));
    }
  }
}

void Engine::start(const std::shared_ptr<Operation>& operation,
                   const std::optional<Error>& refusal) {
  ExchangeState& exchange = operation->exchange();
  drop_dead_plans(exchange);
  const std::uint64_t use = operation->call().use;
  exchange.calls.emplace(use, operation);
  exchange.past[use % exchange.past.size()] = {use, operation->call().plan, operation->call().kind};
  const auto poisoned = exchange.poisoned_plans.find(operation->call().plan);
  if (auto ahead = exchange.poison_ahead.extract(use)) {
    apply(exchange, ahead.mapped());
  } else if (poisoned != exchange.poisoned_plans.end()) {
    refuse(*operation, Error(poisoned->second));
  } else if (refusal) {
    refuse(*operation, *refusal);
  }
  progress();
}

bool Engine::progress() {
  std::atomic<std::uint64_t>& heartbeat = world_->own_control().heartbeat();
  heartbeat.store(heartbeat.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (const std::optional<std::string> text = transport_.aborted()) {
    fail_all(Error(ErrorCode::peer_failed, *text));
  }
  bool advanced = network_.collect_sent();
  advanced |= receive();
  advanced |= read_boards();
  advanced |= flush_boards();
  advanced |= step_calls();
  advanced |= release_retired();
  // Without a call that runs, nobody may look again for long: a replay must not wait for its grant.
  network_.flush_grants(!advanced || !any_running_);
  return advanced;
}

bool Engine::step_calls() {
  bool advanced = false;
  any_running_ = false;
  for (auto at = exchanges_.begin(); at != exchanges_.end();) {
    const std::shared_ptr<ExchangeState> exchange = at->second.lock();
    if (!exchange) {
      at = exchanges_.erase(at);
      continue;
    }
    ++at;
    // A step may end calls of the exchange, so the list is taken first.
    stepping_.clear();
    for (const auto& [use, operation] : exchange->calls) stepping_.push_back(operation);
    for (const auto& operation : stepping_) advanced |= settle_call(*exchange, *operation);
    stepping_.clear();
    any_running_ |= !exchange->calls.empty();
    update_finished(*exchange);
  }
  return advanced;
}

bool Engine::settle_call(ExchangeState& exchange, Operation& operation) {
  bool advanced = false;
  if (operation.running()) {
    try {
      advanced = operation.step();
    } catch (const Error& error) {
      refuse(operation, error);
    } catch (const std::bad_alloc&) {
      refuse(operation, Error(ErrorCode::resource_exhausted,
                              operation.describe() + ": no memory; fix: free some on this rank"));
    } catch (const std::exception& error) {
      refuse(operation, Error(ErrorCode::peer_failed, operation.describe() + ": " + error.what()));
    }
  }
  if (operation.failing() && operation.quiet()) operation.end_failing();
  if (operation.over()) advanced |= exchange.calls.erase(operation.call().use) > 0;
  return advanced;
}

// A failing call counts as finished: it waits for others, but touches nothing of theirs.
void Engine::update_finished(ExchangeState& exchange) {
  std::uint64_t below = exchange.next_use;
  for (const auto& [use, operation] : exchange.calls) {
    if (!operation->running()) continue;
    below = use;
    break;
  }
  std::atomic<std::uint64_t>& flag = exchange.own_control().finished_below();
  if (!transport_.reached(flag, below)) transport_.raise_flag(flag, below);
}

void Engine::fail_all(const Error& error) {
  for (const auto& [id, weak] : exchanges_) {
    const std::shared_ptr<ExchangeState> exchange = weak.lock();
    if (!exchange) continue;
    for (const auto& [use, operation] : exchange->calls) {
      operation->fail(error);
      operation->end_failing();  // the job is over; nobody waits for quiet
    }
  }
}

void Engine::refuse(Operation& operation, const Error& error) {
  if (!operation.running()) return;
  // Cut here and not on the way, so that all ranks get the same text.
  const std::string text = std::string(error.what()).substr(0, wire::kPoisonTextBytes);
  const Poison poison{operation.call(), rank(), Error(error.code(), text)};
  apply(operation.exchange(), poison);
  broadcast(operation.exchange(), poison);
}

void Engine::adopt_plan(ExchangeState& exchange, const std::shared_ptr<PlanState>& plan) {
  exchange.plans[plan->number] = {plan, plan->flow};
  for (const wire::OpKind kind : {wire::OpKind::dispatch, wire::OpKind::combine}) {
    for (const LaneInbox& inbox : plan->flow->kind(kind).inboxes) {
      network_.expect(inbox.peer, inbox.granted);
    }
  }
  std::vector<ExchangeState::Early> rest;
  for (ExchangeState::Early& early : std::exchange(exchange.early, {})) {
    if (early.plan != plan->number) {
      rest.push_back(std::move(early));
    } else if (early.fragment) {
      deliver_fragment(exchange, early.peer, std::move(*early.fragment));
    } else {
      apply_grant(exchange, early.peer, early.grant);
    }
  }
  for (ExchangeState::Early& early : rest) exchange.early.push_back(std::move(early));
  if (exchange.poisoned_plans.contains(plan->number)) retire_flow(exchange.plans[plan->number]);
}

void Engine::drop_dead_plans(ExchangeState& exchange) {
  for (auto at = exchange.plans.begin(); at != exchange.plans.end();) {
    if (!at->second.state.expired()) {
      ++at;
      continue;
    }
    retire_flow(at->second);
    at = exchange.plans.erase(at);
  }
  std::erase_if(exchange.poisoned_plans, [&](const auto& entry) {
    return !exchange.plans.contains(entry.first) && !is_coming(exchange, entry.first);
  });
}

void Engine::retire_flow(ExchangeState::KnownPlan& known) {
  if (!known.flow) return;
  for (const wire::OpKind kind : {wire::OpKind::dispatch, wire::OpKind::combine}) {
    for (LaneInbox& inbox : known.flow->kind(kind).inboxes) {
      network_.settle(inbox.peer, inbox.granted - inbox.arrived);
      inbox.queue.clear();
    }
  }
  known.flow.reset();
}

void Engine::settle_plans(ExchangeState& exchange) {
  for (auto& [number, known] : exchange.plans) retire_flow(known);
  board_backlog_.erase(exchange.id);
}

std::byte* Engine::map(int owner, std::uint64_t key) {
  const auto known = mapped_.find({owner, key});
  if (known != mapped_.end()) return known->second;
  std::byte* const address = transport_.map_region(owner, key);
  if (address != nullptr) mapped_[{owner, key}] = address;
  return address;
}

bool Engine::node_is_past(ExchangeState& exchange, std::uint64_t use) {
  for (int local = 0; local < static_cast<int>(node_ranks_.size()); ++local) {
    ControlBlock* const control = exchange.control_of(local);
    if (control == nullptr || !transport_.reached(control->finished_below(), use + 1)) return false;
  }
  return true;
}

int Engine::cell_holder(const Operation& operation) {
  const std::uint64_t use = operation.call().use;
  if (use < kCells) return -1;
  for (int local = 0; local < static_cast<int>(node_ranks_.size()); ++local) {
    ControlBlock* const control = operation.exchange().control_of(local);
    if (control == nullptr || !transport_.reached(control->finished_below(), use - kCells + 1)) {
      return node_ranks_[local];
    }
  }
  return -1;
}

bool Engine::publish(const Operation& operation, Slot& slot, std::uint64_t bytes) {
  if (slot.shown || cell_holder(operation) >= 0) return false;
  slot.shown = true;
  ++slot.turn;
  Cell& cell = operation.exchange().own_control().cell(operation.call().use);
  cell.region_key = slot.key;
  cell.turn = slot.turn;
  cell.bytes = bytes;
  cell.plan = operation.call().plan;
  cell.kind = operation.call().kind;
  transport_.raise_flag(cell.ready, operation.call().use + 1);
  return true;
}

const Cell* Engine::find_cell(Operation& operation, int local_rank) {
  ControlBlock* const control = operation.exchange().control_of(local_rank);
  const wire::CallId& call = operation.call();
  if (control == nullptr) return nullptr;
  const Cell& cell = control->cell(call.use);
  if (!transport_.reached(cell.ready, call.use + 1)) return nullptr;
  if (cell.kind == call.kind && cell.plan == call.plan) return &cell;
  wire::CallId other = call;
  other.kind = cell.kind;
  other.plan = cell.plan;
  refuse(operation, different_calls(call, rank(), other, node_ranks_[local_rank]));
  return nullptr;
}

void Engine::retire(std::unique_ptr<SlotLease> lease, const Operation& operation) {
  retiring_.push_back({std::move(lease), operation.exchange_, operation.call().use});
}

bool Engine::release_retired() {
  return std::erase_if(retiring_, [this](Retiring& retiring) {
           if (!node_is_past(*retiring.exchange, retiring.use)) return false;
           retiring.lease->slot().shown = false;
           return true;
         }) > 0;
}

}  // namespace ferry::detail
