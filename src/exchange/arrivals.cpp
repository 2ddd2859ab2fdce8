// What the engine does with messages that arrived: each goes to the plan or call that its header
// names. What comes for an exchange, plan or call that this rank has not reached yet is kept: a
// peer can be ahead only by what it has credit for. What comes for one that is over is dropped.
// Notices of ranks of the node are messages too, though they take another way.

#include <algorithm>

#include <fmt/format.h>

#include "exchange/dispatch.hpp"
#include "exchange/engine.hpp"

namespace ferry::detail {
namespace {

// Enough to keep links busy; few enough that other work gets its turn.
constexpr int kArrivalsPerRound = 16;

}  // namespace

bool Engine::receive() {
  int count = 0;
  for (; count < kArrivalsPerRound; ++count) {
    std::optional<Arrival> arrival = network_.poll();
    if (!arrival) break;
    const int source = arrival->source;
    handle(std::move(*arrival));
    network_.replenish(source);
  }
  return count > 0;
}

void Engine::handle(Arrival arrival) {
  switch (arrival.kind) {
    case MessageKind::payload: handle_fragment(std::move(arrival)); break;
    case MessageKind::metadata: handle_metadata(std::move(arrival)); break;
    case MessageKind::control: handle_control(std::move(arrival)); break;
  }
}

std::shared_ptr<ExchangeState> Engine::find_exchange(std::uint32_t id) {
  const auto found = exchanges_.find(id);
  return found == exchanges_.end() ? nullptr : found->second.lock();
}

namespace {

std::string unusable(int rank, int source, const std::string& why) {
  return fmt::format(
      "rank {} received a message from rank {} that it cannot use: {}; fix: check "
      "the network between them and that both run the same version",
      rank, source, why);
}

/// The problem with a header, or with the group that it is from.
std::optional<std::string> group_problem(std::optional<std::string> problem,
                                         std::uint32_t generation) {
  if (problem || generation == kGeneration) return problem;
  return fmt::format("generation is {}; expected {}", generation, kGeneration);
}

}  // namespace

// A message whose header cannot be trusted names no call that could be failed alone, and whoever
// needs it may ask for it much later.
void Engine::refuse_message(int source, const std::string& why) {
  transport_.abort(unusable(rank(), source, why));
}

// The header is sound, so the call that it names ends, and nothing else.
void Engine::refuse_call(ExchangeState& exchange, const wire::CallId& call,
                         const std::string& why) {
  const Poison poison{call, Error(ErrorCode::corrupt_message, why)};
  broadcast(exchange, poison);
  apply(exchange, poison);
}

void Engine::handle_fragment(Arrival arrival) {
  ArrivedFragment fragment;
  const auto message = arrival.block.memory().first(arrival.fragment_bytes);
  if (arrival.truncated) {
    refuse_message(arrival.source, fmt::format("its size is more than the {} bytes of a fragment",
                                               arrival.block.memory().size()));
    return;
  }
  const auto head = message.first(std::min(message.size(), wire::kFragmentHeaderBytes));
  auto problem = wire::decode(head, fragment.header);
  problem = group_problem(std::move(problem), fragment.header.call.generation);
  if (problem) {
    refuse_message(arrival.source, *problem);
    return;
  }
  fragment.block = std::move(arrival.block);
  // A grant rides along for whatever call: it counts even if the fragment does not.
  if (const wire::Grant& grant = fragment.header.grant; grant.fragments > 0) {
    if (const auto target = find_exchange(grant.exchange)) {
      apply_grant(*target, arrival.source, grant);
    }
  }
  const std::uint32_t id = fragment.header.call.exchange;
  const std::shared_ptr<ExchangeState> exchange = find_exchange(id);
  if (!exchange) {
    // Rows of plan_and_dispatch need no answer of this rank: they can be there before its exchange,
    // in memory that was set aside for another one.
    if (id >= next_exchange_) {
      arrival.block = std::move(fragment.block);
      ahead_[id].push_back(std::move(arrival));
    }
    return;
  }
  const auto payload = message.subspan(wire::kFragmentHeaderBytes);
  if (payload.size() != fragment.header.payload_bytes) {
    refuse_call(*exchange, fragment.header.call,
                unusable(rank(), arrival.source,
                         fmt::format("payload_bytes is {}, but {} bytes came with the fragment",
                                     fragment.header.payload_bytes, payload.size())));
    return;
  }
  if (fragment.header.has_crc && transport_.checksum(payload) != fragment.header.payload_crc) {
    const wire::FragmentHeader& header = fragment.header;
    refuse_call(*exchange, header.call,
                unusable(rank(), arrival.source,
                         fmt::format("payload_crc of fragment {} of {} (call {}) does not fit its "
                                     "bytes",
                                     header.index, to_string(header.call.kind),
                                     wire::place_text(header.call.place))));
    return;
  }
  deliver_fragment(*exchange, arrival.source, std::move(fragment));
}

void Engine::deliver_fragment(ExchangeState& exchange, int source, ArrivedFragment fragment) {
  const wire::FragmentHeader& header = fragment.header;
  if (!check_order(exchange, header.call, source)) return;
  const auto known = exchange.plans.find(header.call.plan);
  if (known == exchange.plans.end()) {
    DispatchOperation* const early = find_early(exchange, header.call.plan);
    if (early != nullptr && early->takes_fragments() &&
        wire::same_call(header.call, early->call())) {
      const wire::FragmentHeader copy = header;
      if (early->early()->stage(*early, source, std::move(fragment))) return;
      refuse_call(exchange, copy.call,
                  unusable(rank(), source,
                           fmt::format("fragment {} before plan {} came out of turn or without "
                                       "credit",
                                       copy.index, copy.call.plan)));
    } else if (is_coming(exchange, header.call.plan)) {
      exchange.early.push_back({source, header.call.plan, std::move(fragment), {}});
    }
    return;
  }
  if (!known->second.flow) return;  // poisoned: received and thrown away
  KindFlow* const flow = known->second.flow->find(header.call.kind, header.stream);
  if (flow == nullptr) {
    refuse_call(
        exchange, header.call,
        unusable(rank(), source, fmt::format("a fragment of {}", to_string(header.call.kind))));
    return;
  }
  LaneInbox* const inbox = flow->inbox_of(source);
  if (inbox == nullptr || header.call.ordinal != inbox->ordinal || header.index != inbox->arrived ||
      inbox->arrived >= inbox->granted) {
    refuse_call(exchange, header.call,
                unusable(rank(), source,
                         fmt::format("fragment {} of use {} of plan {} came out of turn or "
                                     "without credit",
                                     header.index, header.call.ordinal, header.call.plan)));
    return;
  }
  ++inbox->arrived;
  network_.settle(source, 1);
  inbox->queue.push_back(std::move(fragment));
}

// True when this rank is making the plan, or has yet to: plans are numbered in the order of calls.
bool Engine::is_coming(const ExchangeState& exchange, std::uint32_t plan) {
  if (plan >= exchange.next_plan) return true;
  return std::ranges::any_of(exchange.calls, [plan](const auto& call) {
    const Operation& operation = *call.second;
    return operation.call().plan == plan && operation.running() && !operation.plan();
  });
}

// True while no rank is known to have made another call at the same place.
bool Engine::check_order(ExchangeState& exchange, const wire::CallId& call, int source) {
  if (exchange.failures.order_lost()) return true;
  const CallOrder::Entry* const other = source == rank()
                                            ? exchange.order.note_own(call, source)
                                            : exchange.order.note_foreign(call, source);
  if (other == nullptr) return true;
  const Poison poison{call, different_calls(other->call, other->rank, call, source)};
  broadcast(exchange, poison);
  apply(exchange, poison);
  return false;
}

bool Engine::read_boards() {
  bool advanced = false;
  for (const auto& [id, weak] : exchanges_) {
    const std::shared_ptr<ExchangeState> exchange = weak.lock();
    if (!exchange) continue;
    advanced |= exchange->board->flush();
    while (const auto unread = exchange->board->peek()) {
      advanced = true;
      const Notice& notice = unread->notice;
      switch (notice.kind) {
        case NoticeKind::window: handle_window(*exchange, unread->local_rank, notice); break;
        case NoticeKind::refusal: apply(*exchange, {notice.call, *unread->refusal}); break;
        case NoticeKind::left:
          exchange->failures.mark_left(notice.call.plan, unread->local_rank);
          break;
      }
      exchange->board->acknowledge(*unread);
    }
  }
  std::erase_if(closing_, [](const std::unique_ptr<NodeBoard>& board) {
    board->flush();
    return !board->has_backlog();
  });
  return advanced;
}

void Engine::handle_window(ExchangeState& exchange, int local_rank, const Notice& notice) {
  if (!check_order(exchange, notice.call, node_ranks_[local_rank])) return;
  if (!is_wanted(exchange, notice.call)) return;
  std::vector<ShownWindow>& windows =
      exchange.windows[ExchangeState::CallKey(notice.call)][static_cast<std::size_t>(notice.role)];
  windows.resize(node_ranks_.size());
  windows[local_rank] = {notice.region_key, notice.turn, notice.bytes, true};
}

// True when this rank makes the call, or may yet make it.
bool Engine::is_wanted(const ExchangeState& exchange, const wire::CallId& call) {
  const bool running = std::ranges::any_of(exchange.calls, [&](const auto& entry) {
    return wire::same_call(entry.second->call(), call) && entry.second->running();
  });
  if (running) return true;
  if (wire::opens_plan(call.kind)) return is_coming(exchange, call.plan);
  const auto known = exchange.plans.find(call.plan);
  if (known == exchange.plans.end()) return is_coming(exchange, call.plan);
  return known->second.flow && call.ordinal >= known->second.flow->call(call.kind).next_ordinal;
}

void Engine::apply_grant(ExchangeState& exchange, int source, const wire::Grant& grant) {
  const auto known = exchange.plans.find(grant.plan);
  if (known == exchange.plans.end()) {
    DispatchOperation* const early = find_early(exchange, grant.plan);
    if (early != nullptr && grant.kind == wire::OpKind::dispatch && grant.ordinal == 0) {
      early->early()->take_grant(source, grant);
    } else if (is_coming(exchange, grant.plan)) {
      exchange.early.push_back({source, grant.plan, std::nullopt, grant});
    }
    return;
  }
  if (!known->second.flow) return;
  KindFlow* const flow = known->second.flow->find(grant.kind, grant.stream);
  if (flow == nullptr) return;
  LaneOutbox* const outbox = flow->outbox_of(source);
  if (flow->generous_grants && grant.ordinal == 0) {
    if (outbox == nullptr || outbox->ordinal != 0) return;
    outbox->granted = std::max(outbox->granted, std::min(grant.fragments, outbox->total));
    return;
  }
  if (outbox == nullptr || grant.fragments > outbox->total) {
    refuse_message(source,
                   fmt::format("a grant of {} fragments for plan {}, which has no such lane",
                               grant.fragments, grant.plan));
    return;
  }
  if (grant.ordinal > outbox->ordinal) {
    if (grant.ordinal != outbox->ordinal + 1 || outbox->sent != outbox->total) {
      refuse_message(source, fmt::format("a grant for use {} of plan {}, which has sent {} of {} "
                                         "fragments of use {}",
                                         grant.ordinal, grant.plan, outbox->sent, outbox->total,
                                         outbox->ordinal));
      return;
    }
    outbox->ordinal = grant.ordinal;
    outbox->granted = grant.fragments;
    outbox->sent = 0;
  } else if (grant.ordinal == outbox->ordinal && grant.fragments > outbox->granted) {
    outbox->granted = grant.fragments;
  }
}

void Engine::handle_control(Arrival arrival) {
  wire::ControlMessage message;
  auto problem = wire::decode(arrival.bytes, message);
  const auto* const granting = std::get_if<wire::GrantMessage>(&message);
  const auto* const poison = std::get_if<wire::PoisonMessage>(&message);
  problem = group_problem(std::move(problem),
                          granting != nullptr ? granting->generation : poison->call.generation);
  if (problem) {
    refuse_message(arrival.source, *problem);
    return;
  }
  if (granting != nullptr && granting->grant.fragments == 0) return;  // a sign of life
  const std::uint32_t id = granting != nullptr ? granting->grant.exchange : poison->call.exchange;
  const std::shared_ptr<ExchangeState> exchange = find_exchange(id);
  if (!exchange) {
    if (id >= next_exchange_) ahead_[id].push_back(std::move(arrival));
    return;
  }
  if (granting != nullptr) {
    apply_grant(*exchange, arrival.source, granting->grant);
    return;
  }
  apply(*exchange, {poison->call, Error(poison->code, poison->text)});
}

void Engine::handle_metadata(Arrival arrival) {
  wire::MetadataHeader header;
  const auto head = std::span<const std::byte>(arrival.bytes)
                        .first(std::min(arrival.bytes.size(), wire::kMetadataHeaderBytes));
  auto problem = wire::decode(head, header);
  problem = group_problem(std::move(problem), header.call.generation);
  if (problem) {
    refuse_message(arrival.source, *problem);
    return;
  }
  const std::shared_ptr<ExchangeState> exchange = find_exchange(header.call.exchange);
  if (!exchange) {
    if (header.call.exchange >= next_exchange_) {
      ahead_[header.call.exchange].push_back(std::move(arrival));
    }
    return;
  }
  if (!check_order(*exchange, header.call, arrival.source)) return;
  if (!is_coming(*exchange, header.call.plan)) {
    // The plan was made of what all ranks sent for it, or it failed here before this came.
    const auto known = exchange->plans.find(header.call.plan);
    if (known == exchange->plans.end() || !known->second.flow) return;
    refuse_call(*exchange, header.call,
                unusable(rank(), arrival.source,
                         fmt::format("metadata of plan {}, which is made", header.call.plan)));
    return;
  }
  exchange->metadata[header.call.plan].push_back({arrival.source, std::move(arrival.bytes)});
}

}  // namespace ferry::detail
