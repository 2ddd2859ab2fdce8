// The fragments of one call: see lanes.hpp.

#include "exchange/lanes.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "exchange/engine.hpp"

namespace ferry::detail {
namespace {

const plan::Lane& direction(const plan::LanePair& pair, bool back) {
  return back ? pair.back() : pair.dispatch;
}

}  // namespace

LaneSenders::LaneSenders(const std::vector<plan::LanePair>& pairs, bool back,
                         const plan::Framing& framing) {
  lanes_.reserve(pairs.size());
  for (const plan::LanePair& pair : pairs) {
    const plan::Lane& lane = direction(pair, back);
    lanes_.push_back({&pair, &lane, plan::FragmentCursor(lane, framing.rows_per_fragment)});
    open_ += lanes_.back().cursor.at_end() ? 0 : 1;
  }
}

std::optional<LaneSenders::Next> LaneSenders::next(Operation& operation, KindFlow& flow,
                                                   std::uint32_t ordinal) {
  const Network& network = operation.exchange().engine.network();
  const Lane* best = nullptr;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    const std::size_t at = (turn_ + i) % lanes_.size();
    const Lane& lane = lanes_[at];
    if (lane.cursor.at_end()) continue;
    const plan::Fragment& fragment = lane.cursor.current();
    if (best != nullptr && best->cursor.current().range <= fragment.range) continue;
    if (!flow.outboxes[at].may_send(ordinal, fragment.index)) continue;
    if (!network.may_send_fragment(flow.outboxes[at].peer)) continue;
    best = &lane;
    picked_ = at;
  }
  if (best == nullptr) return std::nullopt;
  return Next{best->pair, best->lane, best->cursor.current()};
}

void LaneSenders::advance() {
  lanes_[picked_].cursor.advance();
  open_ -= lanes_[picked_].cursor.at_end() ? 1 : 0;
  turn_ = picked_ + 1;
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

LaneReceiver::LaneReceiver(const plan::LanePair& pair, bool back, std::uint64_t rows_per_fragment)
    : pair_(&pair),
      lane_(&direction(pair, back)),
      rows_per_fragment_(rows_per_fragment),
      cursor_(*lane_, rows_per_fragment) {}

std::optional<LaneReceiver::Taken> LaneReceiver::take(Operation& operation, LaneInbox& inbox,
                                                      const plan::Framing& framing) {
  if (inbox.queue.empty() || cursor_.at_end()) return std::nullopt;
  Taken taken{cursor_.current(), std::move(inbox.queue.front())};
  inbox.queue.pop_front();
  const wire::FragmentHeader& header = taken.arrived.header;
  const std::uint64_t expected_bytes = taken.fragment.count * framing.row_bytes;
  if (header.call.use != operation.call().use || header.num_rows != taken.fragment.count ||
      header.payload_bytes != expected_bytes) {
    operation.exchange().engine.refuse(
        operation,
        Error(ErrorCode::corrupt_message,
              fmt::format("{}: fragment {} of rank {} is of call {} and has {} rows in {} bytes; "
                          "the plan says call {} and {} rows in {} bytes",
                          operation.describe(), header.index, inbox.peer, header.call.use,
                          header.num_rows, header.payload_bytes, operation.call().use,
                          taken.fragment.count, expected_bytes)));
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
                       .kind = operation.call().kind},
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
                       .kind = operation.call().kind},
                      GrantUrgency::idle);
}

}  // namespace ferry::detail
