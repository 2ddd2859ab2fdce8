// The fragments of one call: see lanes.hpp.

#include "exchange/lanes.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "exchange/engine.hpp"

namespace ferry::detail {
namespace {

constexpr int kFragmentsPerStep = 4;
// Fragments of a lane that land before the next lane has its turn.
constexpr int kLandingsPerStep = 4;

wire::Stream stream_of(Way way) {
  return way == Way::values ? wire::Stream::values : wire::Stream::rows;
}

}  // namespace

const plan::Lane& lane_of(const plan::LanePair& pair, Way way) {
  switch (way) {
    case Way::out: return pair.dispatch;
    case Way::back: return pair.back();
    case Way::values: return pair.values;
  }
  return pair.dispatch;
}

LaneSenders::LaneSenders(const std::vector<plan::LanePair>& pairs, Way way,
                         const plan::Framing& framing)
    : stream_(stream_of(way)) {
  lanes_.reserve(pairs.size());
  for (const plan::LanePair& pair : pairs) {
    const plan::Lane& lane = lane_of(pair, way);
    lanes_.push_back({&lane, plan::FragmentCursor(lane, framing.rows_per_fragment)});
    open_ += lanes_.back().cursor.at_end() ? 0 : 1;
  }
}

bool LaneSenders::send(Operation& operation, KindFlow& flow, const Fill& fill, const Ready& ready) {
  Network& network = operation.exchange().engine.network();
  int sent = 0;
  for (; sent < kFragmentsPerStep; ++sent) {
    Lane* const picked = pick(operation, flow, ready);
    if (picked == nullptr) break;
    const plan::Fragment& fragment = picked->cursor.current();
    Block block = network.take_block();
    const auto at = static_cast<std::size_t>(picked - lanes_.data());
    const Packed packed = fill(at, fragment, block.memory().data() + wire::kFragmentHeaderBytes);
    network.send_fragment(picked->lane->peer,
                          {.call = operation.call(),
                           .stream = stream_,
                           .index = static_cast<std::uint32_t>(fragment.index),
                           .num_rows = fragment.count,
                           .payload_bytes = static_cast<std::uint32_t>(packed.bytes),
                           .has_crc = operation.exchange().options.checksum_payload,
                           .packing = packed.packing},
                          std::move(block), operation.shared_from_this());
    ++flow.outboxes[at].sent;
    picked->cursor.advance();
    open_ -= picked->cursor.at_end() ? 1 : 0;
    turn_ = at + 1;
  }
  return sent > 0;
}

LaneSenders::Lane* LaneSenders::pick(const Operation& operation, const KindFlow& flow,
                                     const Ready& ready) {
  const Network& network = operation.exchange().engine.network();
  Lane* best = nullptr;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    const std::size_t at = (turn_ + i) % lanes_.size();
    Lane& lane = lanes_[at];
    if (lane.cursor.at_end()) continue;
    const plan::Fragment& fragment = lane.cursor.current();
    if (best != nullptr && best->cursor.current().range <= fragment.range) continue;
    if (!flow.outboxes[at].may_send(operation.call().ordinal, fragment.index)) continue;
    if (!network.may_send_fragment(flow.outboxes[at].peer)) continue;
    if (ready && !ready(at, fragment)) continue;
    best = &lane;
  }
  return best;
}

int LaneSenders::starved_peer(const KindFlow& flow, std::uint32_t ordinal) const {
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i].cursor.at_end()) continue;
    if (!flow.outboxes[i].may_send(ordinal, lanes_[i].cursor.current().index)) {
      return flow.outboxes[i].peer;
    }
  }
  return -1;
}

LaneReceiver::LaneReceiver(const plan::LanePair& pair, Way way, std::uint64_t rows_per_fragment)
    : lane_(&lane_of(pair, way)),
      stream_(stream_of(way)),
      rows_per_fragment_(rows_per_fragment),
      cursor_(*lane_, rows_per_fragment) {}

std::optional<LaneReceiver::Taken> LaneReceiver::take(Operation& operation, LaneInbox& inbox,
                                                      const Crossing& crossing) {
  if (inbox.queue.empty() || cursor_.at_end()) return std::nullopt;
  Taken taken{cursor_.current(), std::move(inbox.queue.front()), {}};
  inbox.queue.pop_front();
  const wire::FragmentHeader& header = taken.arrived.header;
  Engine& engine = operation.exchange().engine;
  std::optional<std::string> problem;
  if (header.num_rows != taken.fragment.count) {
    problem = fmt::format("{} rows in {} bytes; the plan says {} rows in {} bytes", header.num_rows,
                          header.payload_bytes, taken.fragment.count,
                          taken.fragment.count * (crossing.row_bytes() + crossing.extra_bytes));
  } else {
    problem = taken.rows.find(engine.transport(), crossing, header, taken.arrived.payload());
  }
  if (problem) {
    engine.refuse(operation,
                  Error(ErrorCode::corrupt_message,
                        fmt::format("{}: fragment {} of rank {} has {}", operation.describe(),
                                    header.index, inbox.peer, *problem)));
    return std::nullopt;
  }
  cursor_.advance();
  return taken;
}

void LaneReceiver::grant_through(Operation& operation, LaneInbox& inbox, std::uint64_t working_on) {
  const ExchangeState& exchange = operation.exchange();
  const std::uint64_t through =
      working_on + static_cast<std::uint64_t>(exchange.options.ranges_in_flight);
  if (through <= granted_range_) return;
  const std::uint64_t end = std::min<std::uint64_t>(through, lane_->num_ranges());
  for (std::uint64_t range = granted_range_; range < end; ++range) {
    const std::uint64_t items = lane_->range_begin[range + 1] - lane_->range_begin[range];
    granted_fragments_ += (items + rows_per_fragment_ - 1) / rows_per_fragment_;
  }
  granted_range_ = through;
  const auto fragments = static_cast<std::uint32_t>(granted_fragments_);
  if (fragments <= inbox.granted) return;
  Network& network = exchange.engine.network();
  network.expect(inbox.peer, fragments - inbox.granted);
  inbox.granted = fragments;
  network.queue_grant(inbox.peer,
                      {.exchange = exchange.id,
                       .plan = operation.call().plan,
                       .ordinal = inbox.ordinal,
                       .fragments = fragments,
                       .kind = operation.call().kind,
                       .stream = stream_},
                      GrantUrgency::now);
}

void LaneReceiver::end_use(Operation& operation, LaneInbox& inbox) {
  if (ended_) return;
  ended_ = true;
  ++inbox.ordinal;
  inbox.arrived = 0;
  inbox.granted = std::min(inbox.total, kInitialFragments);
  if (inbox.granted == 0) return;
  Network& network = operation.exchange().engine.network();
  network.expect(inbox.peer, inbox.granted);
  network.queue_grant(inbox.peer,
                      {.exchange = operation.exchange().id,
                       .plan = operation.call().plan,
                       .ordinal = inbox.ordinal,
                       .fragments = inbox.granted,
                       .kind = operation.call().kind,
                       .stream = stream_},
                      GrantUrgency::idle);
}

LaneReceivers::LaneReceivers(const std::vector<plan::LanePair>& pairs, Way way,
                             const plan::Framing& framing, const Crossing& crossing)
    : crossing_(&crossing) {
  lanes_.reserve(pairs.size());
  for (const plan::LanePair& pair : pairs) {
    lanes_.emplace_back(pair, way, framing.rows_per_fragment);
  }
}

bool LaneReceivers::land(Operation& operation, KindFlow& flow, const Land& land) {
  bool advanced = false;
  for (std::size_t i = 0; i < lanes_.size() && operation.running(); ++i) {
    LaneReceiver& receiver = lanes_[i];
    LaneInbox& inbox = flow.inboxes[i];
    // An earlier use of the plan still lands, or this one is done.
    if (inbox.ordinal != operation.call().ordinal) continue;
    if (!receiver.done()) receiver.grant_through(operation, inbox, receiver.range());
    for (int taken = 0; taken < kLandingsPerStep; ++taken) {
      const auto fragment = receiver.take(operation, inbox, *crossing_);
      if (!fragment) break;
      land(i, *fragment);
      advanced = true;
    }
    if (operation.running() && receiver.done()) receiver.end_use(operation, inbox);
  }
  return advanced;
}

int LaneReceivers::missing_rank() const {
  const auto open =
      std::ranges::find_if(lanes_, [](const LaneReceiver& lane) { return !lane.done(); });
  return open == lanes_.end() ? -1 : open->lane().peer;
}

}  // namespace ferry::detail
