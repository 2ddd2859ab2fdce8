// How a refusal reaches every rank of an exchange: the rank that refuses writes it on its board,
// which the ranks of its node read, and sends it to every rank of other nodes. Nobody relays: the
// one that should may have left already.

#include <algorithm>
#include <cstring>

#include "exchange/engine.hpp"

namespace ferry::detail {

void Engine::broadcast(ExchangeState& exchange, const Poison& poison) {
  post_on_board(exchange, poison);
  const std::vector<std::byte> message =
      wire::encode(wire::PoisonMessage{.call = poison.call,
                                       .origin = static_cast<std::uint32_t>(poison.origin),
                                       .code = poison.error.code(),
                                       .text = poison.error.what()});
  const Topology& topology = transport_.topology();
  for (int target = 0; target < topology.num_ranks(); ++target) {
    if (topology.same_node(target, rank())) continue;
    network_.send(target, MessageKind::control, message);
  }
}

void Engine::post_on_board(ExchangeState& exchange, const Poison& poison) {
  if (node_ranks_.size() == 1) return;
  std::vector<Poison>& backlog = board_backlog_[exchange.id];
  if (backlog.empty() && board_has_room(exchange)) {
    write_entry(exchange, poison);
  } else {
    backlog.push_back(poison);
  }
}

bool Engine::board_has_room(ExchangeState& exchange) {
  const std::uint64_t next = exchange.own_control().poison_count().load(std::memory_order_relaxed);
  if (next < kBoardEntries) return true;
  for (int local = 0; local < static_cast<int>(node_ranks_.size()); ++local) {
    if (local == local_index_) continue;
    ControlBlock* const control = exchange.control_of(local);
    if (control == nullptr ||
        !transport_.reached(control->poisons_read(local_index_), next - kBoardEntries + 1)) {
      return false;
    }
  }
  return true;
}

void Engine::write_entry(ExchangeState& exchange, const Poison& poison) {
  std::atomic<std::uint64_t>& count = exchange.own_control().poison_count();
  const std::uint64_t number = count.load(std::memory_order_relaxed);
  PoisonEntry& entry = exchange.own_control().entry(number);
  const std::string_view text = poison.error.what();
  entry.use = poison.call.use;
  entry.plan = poison.call.plan;
  entry.kind = poison.call.kind;
  entry.origin = static_cast<std::uint32_t>(poison.origin);
  entry.code = static_cast<std::uint32_t>(poison.error.code());
  entry.length = static_cast<std::uint32_t>(std::min(text.size(), wire::kPoisonTextBytes));
  std::memcpy(entry.text, text.data(), entry.length);
  transport_.raise_flag(count, number + 1);
}

bool Engine::flush_boards() {
  bool advanced = false;
  for (auto& [id, backlog] : board_backlog_) {
    const std::shared_ptr<ExchangeState> exchange = find_exchange(id);
    while (exchange && !backlog.empty() && board_has_room(*exchange)) {
      write_entry(*exchange, backlog.front());
      backlog.erase(backlog.begin());
      advanced = true;
    }
  }
  return advanced;
}

bool Engine::read_boards() {
  bool advanced = false;
  for (const auto& [id, weak] : exchanges_) {
    const std::shared_ptr<ExchangeState> exchange = weak.lock();
    if (!exchange) continue;
    for (int local = 0; local < static_cast<int>(node_ranks_.size()); ++local) {
      ControlBlock* const control = exchange->control_of(local);
      if (local == local_index_ || control == nullptr) continue;
      std::atomic<std::uint64_t>& read = exchange->own_control().poisons_read(local);
      const std::uint64_t next = read.load(std::memory_order_relaxed);
      if (!transport_.reached(control->poison_count(), next + 1)) continue;
      const PoisonEntry& entry = control->entry(next);
      const Poison poison{.call = {.generation = 1,
                                   .exchange = id,
                                   .use = entry.use,
                                   .plan = entry.plan,
                                   .kind = entry.kind},
                          .origin = static_cast<int>(entry.origin),
                          .error = Error(static_cast<ErrorCode>(entry.code),
                                         std::string(entry.text, entry.length))};
      transport_.raise_flag(read, next + 1);
      apply(*exchange, poison);
      advanced = true;
    }
  }
  return advanced;
}

// The plan of a poisoned call is poisoned with it: ranks that already ended that call must end the
// next one on the plan, and calls on it that still run lose peers that will not go on. Where this
// rank made the call on another plan than the one that refused it, both plans are lost.
void Engine::apply(ExchangeState& exchange, const Poison& poison) {
  const std::uint64_t use = poison.call.use;
  std::uint32_t own_plan = kNoPlan;
  if (use >= exchange.next_use) {
    exchange.poison_ahead.emplace(use, poison);
  } else if (const auto call = exchange.calls.find(use); call != exchange.calls.end()) {
    own_plan = call->second->call().plan;
    call->second->fail(poison.error);
  } else if (const auto& past = exchange.past[use % exchange.past.size()]; past.use == use) {
    own_plan = past.plan;
  }
  std::vector<Poison> collateral;
  for (const std::uint32_t plan : {poison.call.plan, own_plan}) {
    if (plan == kNoPlan || exchange.poisoned_plans.contains(plan)) continue;
    poison_plan(exchange, plan, poison.error);
    for (const auto& [number, operation] : exchange.calls) {
      if (!operation->running() || operation->call().plan != plan) continue;
      if (operation->call().kind == wire::OpKind::plan) continue;  // it still ends as elsewhere
      operation->fail(poison.error);
      // Ranks that read this refusal poison the plan that it names. Another one only this rank
      // knows of, so the others must be told what else ends.
      if (plan != poison.call.plan) collateral.push_back({operation->call(), rank(), poison.error});
    }
  }
  for (const Poison& other : collateral) broadcast(exchange, other);
}

void Engine::poison_plan(ExchangeState& exchange, std::uint32_t plan, const Error& error) {
  exchange.poisoned_plans.emplace(plan, error);
  if (const auto known = exchange.plans.find(plan); known != exchange.plans.end()) {
    retire_flow(known->second);
  }
}

}  // namespace ferry::detail
