// The part of a dispatch before its plan: see early.hpp.

#include "exchange/early.hpp"

#include <algorithm>

#include "base/check.hpp"
#include "exchange/engine.hpp"

namespace ferry::detail {
namespace {

// Payload that may leave for one node without waiting for the plan.
constexpr std::uint64_t kEarlyBytesPerNode = 64 * 1024;
// However small fragments are: each takes a block of memory at its receiver.
constexpr std::uint64_t kMostEarlyFragments = 64;
// Fragments that are granted ahead of those that have come: enough to keep a link busy.
constexpr std::uint32_t kGrantsAhead = 16;

// Ranks of other nodes whose rows may land here, whatever the routing.
std::vector<int> possible_sources(const ExchangeState& exchange) {
  const Engine& engine = exchange.engine;
  const Topology& topology = engine.transport().topology();
  if (plan::lands_on_rail(plan::info(exchange.options.strategy))) {
    return topology.sources_landing_at(engine.rank());
  }
  std::vector<int> sources;
  for (int rank = 0; rank < topology.num_ranks(); ++rank) {
    if (!topology.same_node(rank, engine.rank())) sources.push_back(rank);
  }
  return sources;
}

void add_boxes(const ExchangeState& exchange, const std::vector<plan::LanePair>& lanes,
               KindFlow& flow) {
  for (const plan::LanePair& pair : lanes) {
    const std::uint64_t rows = exchange.framings.dispatch.rows_per_fragment;
    flow.outboxes.push_back(
        {.peer = pair.dispatch.peer,
         .total = static_cast<std::uint32_t>(plan::num_fragments(pair.dispatch, rows))});
  }
  for (const int source : possible_sources(exchange)) {
    LaneInbox inbox;
    inbox.peer = source;
    flow.inboxes.push_back(std::move(inbox));
  }
}

std::uint32_t early_fragments(const ExchangeState& exchange) {
  if (!plan::lands_on_rail(plan::info(exchange.options.strategy))) return kInitialFragments;
  const std::uint64_t fragment = exchange.framings.dispatch.most_payload_bytes;
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(kEarlyBytesPerNode / fragment, 1, kMostEarlyFragments));
}

// What may leave early on each lane: as much as its receiver expects, and no more than the limit
// per node in all. A receiver that has not made the exchange yet has blocks of the transport's
// size: rows that are too large for them wait for the plan.
void set_agreed_credit(const ExchangeState& exchange, KindFlow& flow) {
  const Transport& transport = exchange.engine.transport();
  const Topology& topology = transport.topology();
  const std::uint64_t fragment = exchange.framings.dispatch.most_payload_bytes;
  if (wire::kFragmentHeaderBytes + fragment > transport.preferred_fragment_bytes()) return;
  std::vector<std::uint64_t> left(topology.num_nodes(), std::max(kEarlyBytesPerNode, fragment));
  for (LaneOutbox& outbox : flow.outboxes) {
    std::uint64_t& budget = left[topology.node_of(outbox.peer)];
    outbox.granted = static_cast<std::uint32_t>(
        std::min<std::uint64_t>({outbox.total, early_fragments(exchange), budget / fragment}));
    budget -= outbox.granted * fragment;
  }
}

}  // namespace

std::unique_ptr<EarlySide> EarlySide::for_gather(ExchangeState& exchange,
                                                 std::uint64_t num_tokens) {
  std::unique_ptr<EarlySide> early(new EarlySide);
  early->grants_ = true;
  early->lanes_ =
      plan::make_gather_lanes(exchange.plan_context(1), exchange.engine.rank(), num_tokens);
  add_boxes(exchange, early->lanes_, early->flow_);
  const std::size_t sources = std::max<std::size_t>(early->flow_.inboxes.size(), 1);
  const std::uint64_t blocks = exchange.engine.limits().gather_staging_bytes / sources /
                               exchange.engine.network().block_bytes();
  early->most_staged_ = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(blocks, 1, 1U << 20U));
  return early;
}

std::unique_ptr<EarlySide> EarlySide::for_plan(ExchangeState& exchange, std::uint32_t plan_number,
                                               std::vector<plan::LanePair> lanes) {
  std::unique_ptr<EarlySide> early(new EarlySide);
  early->plan_use_ = Operation::PlanUse::joins;
  early->plan_number_ = plan_number;
  early->lanes_ = std::move(lanes);
  add_boxes(exchange, early->lanes_, early->flow_);
  set_agreed_credit(exchange, early->flow_);
  early->most_staged_ = early_fragments(exchange);
  return early;
}

void EarlySide::open(const Operation& operation) {
  for (LaneInbox& inbox : flow_.inboxes) {
    grant(operation, inbox, grants_ ? std::min(kGrantsAhead, most_staged_) : most_staged_);
  }
}

void EarlySide::grant(const Operation& operation, LaneInbox& inbox, std::uint32_t fragments) {
  Network& network = operation.exchange().engine.network();
  network.expect(inbox.peer, fragments - inbox.granted);
  inbox.granted = fragments;
  if (!grants_) return;
  network.queue_grant(inbox.peer,
                      {.exchange = operation.exchange().id,
                       .plan = operation.call().plan,
                       .ordinal = 0,
                       .fragments = fragments,
                       .kind = wire::OpKind::dispatch},
                      GrantUrgency::now);
}

bool EarlySide::stage(const Operation& operation, int source, ArrivedFragment fragment) {
  LaneInbox* const inbox = flow_.inbox_of(source);
  if (inbox == nullptr || fragment.header.index != inbox->arrived ||
      inbox->arrived >= inbox->granted) {
    return false;
  }
  ++inbox->arrived;
  operation.exchange().engine.network().settle(source, 1);
  inbox->queue.push_back(std::move(fragment));
  if (grants_ && inbox->granted < most_staged_ &&
      inbox->granted - inbox->arrived <= kGrantsAhead / 2) {
    grant(operation, *inbox, std::min(inbox->arrived + kGrantsAhead, most_staged_));
  }
  return true;
}

void EarlySide::take_grant(int source, const wire::Grant& grant) {
  LaneOutbox* const outbox = flow_.outbox_of(source);
  if (outbox == nullptr) return;  // nothing to send to a rank that would have taken some
  outbox->granted = std::max(outbox->granted, std::min(grant.fragments, outbox->total));
}

bool EarlySide::hand_over(ExchangeState& exchange, KindFlow& to) {
  Network& network = exchange.engine.network();
  bool good = true;
  to.generous_grants = grants_;
  for (LaneInbox& from : flow_.inboxes) {
    LaneInbox* const inbox = to.inbox_of(from.peer);
    const std::uint32_t granted = inbox == nullptr ? 0 : std::min(inbox->total, from.granted);
    good &= from.arrived <= granted;
    // A plan that has fewer fragments needs less memory than was set aside.
    network.settle(from.peer, from.granted - std::max(granted, from.arrived));
    if (inbox == nullptr) continue;
    inbox->granted = std::max(granted, from.arrived);
    inbox->arrived = from.arrived;
    inbox->queue = std::move(from.queue);
  }
  FERRY_ASSERT(to.outboxes.size() == flow_.outboxes.size(), "{} early lanes, {} of the plan",
               flow_.outboxes.size(), to.outboxes.size());
  for (std::size_t i = 0; i < to.outboxes.size(); ++i) {
    LaneOutbox& outbox = to.outboxes[i];
    // Where the credit was agreed, the receiver expects as much of a lane as there is.
    const std::uint32_t agreed = grants_ ? 0 : std::min(outbox.total, early_fragments(exchange));
    outbox.granted = std::max(flow_.outboxes[i].granted, agreed);
    outbox.sent = flow_.outboxes[i].sent;
  }
  flow_ = {};
  return good;
}

void EarlySide::close(ExchangeState& exchange) {
  for (LaneInbox& inbox : flow_.inboxes) {
    exchange.engine.network().settle(inbox.peer, inbox.granted - inbox.arrived);
  }
  flow_ = {};
}

}  // namespace ferry::detail
