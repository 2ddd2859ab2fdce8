// The engine of one transport: see engine.hpp. Here: its calls and the node memory they share.

#include "exchange/engine.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include <fmt/format.h>

#include "base/check.hpp"
#include "base/log.hpp"
#include "exchange/dispatch.hpp"

namespace ferry::detail {
namespace {

// Its address is a name of the calling thread.
thread_local char thread_marker;

}  // namespace

CallerGuard::CallerGuard(Engine& engine) : engine_(engine) {
  engine.transport_.check_caller();
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
  if (engine.caller_depth_++ == 0) hold_.emplace(engine.transport_.sole_use());
}

CallerGuard::~CallerGuard() {
  hold_.reset();
  if (--engine_.caller_depth_ == 0) engine_.caller_.store(nullptr, std::memory_order_release);
}

Engine& Engine::of(Transport& transport) {
  transport.check_caller();  // what an engine makes, the node sees
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
    const std::shared_ptr<ExchangeState> exchange = weak.lock();
    if (!exchange) continue;
    exchange->calls.clear();
    exchange->board->leave();
    exchange->board->flush();
  }
  for (const std::unique_ptr<NodeBoard>& board : closing_) board->flush();
}

const std::shared_ptr<ExchangeState>& Engine::world() { return world_; }

void Engine::add(const std::shared_ptr<ExchangeState>& exchange) {
  const Framings& framings = exchange->framings;
  for (const plan::Framing* const framing :
       {&framings.dispatch, &framings.combine, &framings.combine_backward,
        &framings.dispatch_backward, &framings.values}) {
    network_.grow_blocks(wire::kFragmentHeaderBytes + framing->most_payload_bytes);
  }
  exchanges_[exchange->id] = exchange;
  next_exchange_ = exchange->id + 1;
  // Peers may have made the exchange earlier and used it already.
  if (auto waiting = ahead_.extract(exchange->id)) {
    for (Arrival& arrival : waiting.mapped()) handle(std::move(arrival));
  }
}

void Engine::start(const std::shared_ptr<Operation>& operation,
                   const std::optional<Error>& refusal) {
  enter(operation, refusal);
  try {
    progress();
  } catch (const std::exception& error) {
    // The caller gets no handle, so nothing may touch its memory any more.
    operation->give_up(Error(ErrorCode::peer_failed, error.what()));
    throw;
  }
}

void Engine::enter(const std::shared_ptr<Operation>& operation,
                   const std::optional<Error>& own_refusal) {
  ExchangeState& exchange = operation->exchange();
  std::optional<Error> refusal = std::exchange(exchange.refusal_of_next, std::nullopt);
  if (!refusal) refusal = own_refusal;
  drop_dead_plans(exchange);
  operation->take_place();
  const wire::CallId& call = operation->call();
  exchange.calls.emplace(call.place, operation);
  transport_.sole_use()->work_came();
  std::erase_if(exchange.refused_ahead, [&](const auto& one) { return one.first < call.place; });
  if (const Error* const failure = exchange.failures.find(call.plan)) {
    operation->fail(*failure);  // every rank knows, or is about to
  } else if (refusal) {
    refuse(*operation, *refusal);
  } else {
    if (auto ahead = exchange.refused_ahead.extract(call.place)) apply(exchange, ahead.mapped());
    if (operation->running()) check_order(exchange, call, rank());
  }
}

bool Engine::progress() {
  std::atomic<std::uint64_t>& heartbeat = world_->board->own().heartbeat();
  heartbeat.store(heartbeat.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  if (const std::optional<std::string> text = transport_.aborted()) {
    fail_all(Error(ErrorCode::peer_failed, *text));
  }
  bool advanced = network_.collect_sent();
  advanced |= read_boards();
  advanced |= step_calls();
  advanced |= release_retired();
  // Late, because a look for messages may give the core away. Who polls now and then needs what it
  // brought to be used at once.
  if (receive()) {
    step_calls();
    advanced = true;
  }
  // Without a call that runs, nobody may look again for long: a replay must not wait for its grant.
  network_.flush_grants(!advanced || !any_running_);
  return advanced;
}

Progress Engine::work() noexcept {
  try {
    if (progress()) return Progress::advanced;
    return any_running_ || owes_peers() ? Progress::idle : Progress::done;
  } catch (const Error& error) {
    end_calls(error);
  } catch (const std::bad_alloc&) {
    end_calls(Error(ErrorCode::resource_exhausted, "progress thread: no memory"));
  } catch (const std::exception& error) {
    end_calls(Error(ErrorCode::peer_failed, error.what()));
  }
  return Progress::done;  // a next call finds out by itself
}

// Where the caller polls it gets the exception, and the handles that it drops tell the others.
void Engine::end_calls(const Error& error) noexcept {
  try {
    for (const auto& [id, weak] : exchanges_) {
      const std::shared_ptr<ExchangeState> exchange = weak.lock();
      if (!exchange) continue;
      const auto calls = exchange->calls;
      for (const auto& [place, operation] : calls) refuse(*operation, error);
    }
  } catch (const std::exception&) {
    // The network is gone; what follows needs none.
  }
  try {
    fail_all(error);
  } catch (const std::exception&) {
    // No memory for the text: the callers find out at their deadline.
  }
}

bool Engine::owes_peers() const {
  if (!closing_.empty() || network_.is_sending()) return true;
  return std::ranges::any_of(exchanges_, [](const auto& entry) {
    const std::shared_ptr<ExchangeState> exchange = entry.second.lock();
    return exchange && exchange->board->has_backlog();
  });
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
    for (const auto& [place, operation] : exchange->calls) stepping_.push_back(operation);
    for (const auto& operation : stepping_) advanced |= settle_call(*exchange, *operation);
    stepping_.clear();
    any_running_ |= !exchange->calls.empty();
    leave_failed_plans(*exchange);
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
  const wire::CallId& call = operation.call();
  if (!operation.over() || exchange.calls.erase(call.place) == 0) return advanced;
  exchange.windows.erase(ExchangeState::CallKey(call));
  if (operation.error()) {
    base::log(LogLevel::info, "{} failed ({}): {}", operation.describe(),
              to_string(operation.error()->code()), operation.error()->what());
  }
  if (wire::opens_plan(call.kind) && operation.error()) {
    // Ends without a plan: a dispatch that began beside it has nothing to go on with.
    if (DispatchOperation* const early = find_early(exchange, call.plan)) {
      early->fail(*operation.error());
    }
  }
  return true;
}

void Engine::fail_all(const Error& error) {
  for (const auto& [id, weak] : exchanges_) {
    const std::shared_ptr<ExchangeState> exchange = weak.lock();
    if (!exchange) continue;
    for (const auto& [place, operation] : exchange->calls) {
      operation->fail(error);
      operation->end_failing();  // the job is over; nobody waits for quiet
    }
  }
}

void Engine::refuse(Operation& operation, const Error& error) {
  if (!operation.running()) return;
  // Cut here and not on the way, so that all ranks get the same text.
  const std::string text = std::string(error.what()).substr(0, wire::kPoisonTextBytes);
  const Poison poison{operation.call(), Error(error.code(), text)};
  broadcast(operation.exchange(), poison);
  // While it still runs: a dispatch that began beside its plan takes it along.
  apply(operation.exchange(), poison);
  operation.fail(poison.error);
}

void Engine::adopt_plan(ExchangeState& exchange, const std::shared_ptr<PlanState>& plan) {
  exchange.plans[plan->number] = {plan, plan->flow};
  base::log(
      LogLevel::debug,
      "plan {} of exchange {} on rank {}: {} tokens; {} rows in {} bytes come; to other nodes "
      "{} rows in {} bytes, back {} rows in {} bytes",
      plan->number, exchange.id, rank(), plan->rows.num_tokens, plan->summary.rows_received,
      plan->summary.window_bytes, plan->summary.inter_node_rows_dispatch,
      plan->summary.inter_node_bytes_dispatch, plan->summary.inter_node_rows_combine,
      plan->summary.inter_node_bytes_combine);
  DispatchOperation* const early = find_early(exchange, plan->number);
  plan->flow->for_each([&](wire::OpKind kind, const KindFlow& flow) {
    if (kind == wire::OpKind::dispatch && early != nullptr) return;
    for (const LaneInbox& inbox : flow.inboxes) network_.expect(inbox.peer, inbox.granted);
  });
  if (early != nullptr) early->take_plan(plan);
  deliver_early(exchange, plan->number);
  if (exchange.failures.find(plan->number) != nullptr) retire_flow(exchange.plans[plan->number]);
}

void Engine::deliver_early(ExchangeState& exchange, std::uint32_t plan) {
  std::vector<ExchangeState::Early> rest;
  for (ExchangeState::Early& early : std::exchange(exchange.early, {})) {
    if (early.plan != plan) {
      rest.push_back(std::move(early));
    } else if (early.fragment) {
      deliver_fragment(exchange, early.peer, std::move(*early.fragment));
    } else {
      apply_grant(exchange, early.peer, early.grant);
    }
  }
  for (ExchangeState::Early& early : rest) exchange.early.push_back(std::move(early));
}

const Operation* Engine::find_planning(const ExchangeState& exchange, std::uint32_t plan) const {
  for (const auto& [place, operation] : exchange.calls) {
    const wire::CallId& call = operation->call();
    if (call.kind == wire::OpKind::plan && call.plan == plan) return operation.get();
  }
  return nullptr;
}

DispatchOperation* Engine::find_early(const ExchangeState& exchange, std::uint32_t plan) {
  for (const auto& [place, operation] : exchange.calls) {
    if (operation->call().plan != plan || operation->plan() || !operation->running()) continue;
    if (auto* const dispatch = dynamic_cast<DispatchOperation*>(operation.get())) return dispatch;
  }
  return nullptr;
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
  std::erase_if(exchange.windows, [&](const auto& entry) {
    return !is_coming(exchange, entry.first.plan) && !exchange.plans.contains(entry.first.plan);
  });
  for (const std::uint32_t plan : exchange.failures.known()) {
    const bool retiring = std::ranges::any_of(retiring_, [&](const Retiring& one) {
      return one.exchange.get() == &exchange && one.plan == plan;
    });
    if (exchange.plans.contains(plan) || is_coming(exchange, plan) || retiring) continue;
    if (exchange.failures.all_left(plan)) exchange.failures.forget(plan);
  }
}

void Engine::retire_flow(ExchangeState::KnownPlan& known) {
  if (!known.flow) return;
  known.flow->for_each([&](wire::OpKind, KindFlow& flow) {
    for (LaneInbox& inbox : flow.inboxes) {
      network_.settle(inbox.peer, inbox.granted - inbox.arrived);
      inbox.queue.clear();
    }
  });
  known.flow.reset();
}

void Engine::let_go(ExchangeState& exchange) {
  for (auto& [number, known] : exchange.plans) retire_flow(known);
  exchange.board->leave();
  exchange.board->flush();
  if (exchange.board->has_backlog()) closing_.push_back(std::move(exchange.board));
}

std::byte* Engine::map(int owner, std::uint64_t key) {
  const auto known = mapped_.find({owner, key});
  if (known != mapped_.end()) return known->second;
  std::byte* const address = transport_.map_region(owner, key);
  if (address != nullptr) mapped_[{owner, key}] = address;
  return address;
}

bool Engine::publish(const Operation& operation, Slot& slot, const Showing& showing) {
  const std::span<const std::uint64_t> readers = showing.readers;
  if (slot.shown || slow_reader(operation, readers) >= 0) return false;
  ExchangeState& exchange = operation.exchange();
  const Notice notice{.call = operation.call(),
                      .region_key = slot.key,
                      .turn = slot.turn + 1,
                      .bytes = showing.bytes,
                      .kind = NoticeKind::window,
                      .role = showing.role};
  handle_window(exchange, local_index_, notice);
  slot.shown = true;
  slot.shown_by = operation.weak_from_this();
  ++slot.turn;
  for (std::size_t reader = 0; reader < readers.size(); ++reader) {
    if (readers[reader] > 0) exchange.board->post(static_cast<int>(reader), notice);
  }
  exchange.board->flush();
  return true;
}

int Engine::slow_reader(const Operation& operation, std::span<const std::uint64_t> readers) const {
  for (std::size_t reader = 0; reader < readers.size(); ++reader) {
    const int local = static_cast<int>(reader);
    if (readers[reader] > 0 && operation.exchange().board->is_full(local)) {
      return node_ranks_[local];
    }
  }
  return -1;
}

WaitTarget Engine::slot_holder(const Slot& slot) const {
  const std::shared_ptr<const Operation> shower = slot.shown_by.lock();
  if (shower && !shower->over()) return shower->waits_for();
  for (const Retiring& retiring : retiring_) {
    if (&retiring.lease->slot() == &slot) return {missing_release(retiring), Phase::earlier_call};
  }
  return {};
}

const ShownWindow* Engine::find_window(const Operation& operation, WindowRole role,
                                       int local_rank) const {
  const auto& windows = operation.exchange().windows;
  const auto found = windows.find(ExchangeState::CallKey(operation.call()));
  if (found == windows.end()) return nullptr;
  const std::vector<ShownWindow>& shown = found->second[static_cast<std::size_t>(role)];
  return shown.empty() || !shown[local_rank].there ? nullptr : &shown[local_rank];
}

void Engine::retire(std::unique_ptr<SlotLease> lease, const Operation& operation) {
  const std::uint64_t turn = lease->slot().turn;
  retiring_.push_back({std::move(lease), operation.exchange_, operation.call().plan, turn});
}

// A rank of the node that may still touch the slot; -1 if none.
int Engine::missing_release(const Retiring& retiring) const {
  const Slot& slot = retiring.lease->slot();
  for (int local = 0; local < static_cast<int>(node_ranks_.size()); ++local) {
    if (retiring.exchange->has_left(retiring.plan, local)) continue;
    const Line& line = slot.layout.released(slot.base, local);
    if (!transport_.reached(line.value, retiring.turn)) return node_ranks_[local];
  }
  return -1;
}

bool Engine::release_retired() {
  return std::erase_if(retiring_, [this](Retiring& retiring) {
           if (missing_release(retiring) >= 0) return false;
           retiring.lease->slot().shown = false;
           return true;
         }) > 0;
}

}  // namespace ferry::detail
