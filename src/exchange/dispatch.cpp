// Exchange::dispatch: see dispatch.hpp.

#include "exchange/dispatch.hpp"

#include <algorithm>

#include "exchange/engine.hpp"

namespace ferry::detail {
namespace {

// Bytes pushed between two looks at the network: long enough to hide the look, short enough that a
// link does not run dry meanwhile.
constexpr std::uint64_t kPushBytesPerStep = 1U << 20U;
constexpr int kLandingsPerStep = 4;

}  // namespace

DispatchOperation::DispatchOperation(std::shared_ptr<ExchangeState> exchange,
                                     std::shared_ptr<PlanState> plan, ConstMatrix x)
    : Operation(std::move(exchange), std::move(plan), wire::OpKind::dispatch),
      x_(x),
      windows_(this->plan()->rows.rows_to),
      senders_(this->plan()->rows.outgoing, false, this->exchange().dispatch_framing) {
  flow_ = &this->plan()->flow->kind(wire::OpKind::dispatch);
  for (const plan::LanePair& pair : this->plan()->rows.landing) {
    receivers_.emplace_back(pair, false, this->exchange().dispatch_framing.rows_per_fragment);
  }
}

bool DispatchOperation::step() {
  bool advanced = show_window();
  advanced |= windows_.resolve(*this);
  if (!running()) return true;
  advanced |= send_some();
  if (windows_.complete()) {
    advanced |= land_some();
    advanced |= push_home();
    advanced |= finish_writing();
  }
  if (!running() || !wrote_ || !shown_ || !senders_.done() || sends_in_flight > 0 ||
      missing_writer() >= 0) {
    return advanced;
  }
  lease_->slot().shown = false;
  succeed();
  return true;
}

bool DispatchOperation::show_window() {
  if (shown_) return false;
  if (!lease_) lease_ = engine().slots().take(plan()->summary.window_bytes, describe());
  shown_ = engine().publish(*this, lease_->slot(), plan()->summary.window_bytes);
  if (shown_) turn_ = lease_->slot().turn;
  return shown_;
}

bool DispatchOperation::send_some() {
  return senders_.send(
      *this, *flow_,
      [this](const plan::Lane& lane, const plan::Fragment& fragment, std::byte* payload) {
        sources_.clear();
        for (std::uint32_t i = 0; i < fragment.count; ++i) {
          sources_.push_back(x_.row(lane.tokens[fragment.first + i]));
        }
        engine().transport().pack_rows({.source_dtype = exchange().shape.dtype,
                                        .wire_dtype = *exchange().options.wire_dispatch,
                                        .hidden = exchange().shape.hidden,
                                        .rows = sources_,
                                        .out = payload});
      });
}

bool DispatchOperation::land_some() {
  bool advanced = false;
  for (std::size_t i = 0; i < receivers_.size() && running(); ++i) {
    LaneReceiver& receiver = receivers_[i];
    LaneInbox& inbox = flow_->inboxes[i];
    if (inbox.ordinal != call().ordinal)
      continue;  // an earlier use of the plan, or this one is done
    if (!receiver.done()) receiver.grant_through(*this, inbox, receiver.range());
    for (int taken = 0; taken < kLandingsPerStep; ++taken) {
      const auto fragment = receiver.take(*this, inbox, exchange().dispatch_framing);
      if (!fragment) break;
      land(receiver, *fragment);
      advanced = true;
    }
    if (running() && receiver.done()) receiver.end_use(*this, inbox);
  }
  return advanced;
}

void DispatchOperation::land(const LaneReceiver& receiver, const LaneReceiver::Taken& taken) {
  const plan::Lane& lane = receiver.lane();
  pusher_.clear();
  for (std::uint32_t i = 0; i < taken.fragment.count; ++i) {
    const std::uint32_t item = taken.fragment.first + i;
    for (std::uint32_t t = lane.target_begin[item]; t < lane.target_begin[item + 1]; ++t) {
      pusher_.add_target(target_row(lane.targets[t]));
    }
    pusher_.add_row(taken.arrived.payload() + i * exchange().dispatch_framing.row_bytes);
  }
  pusher_.push(engine().transport(), exchange().shape.hidden, *exchange().options.wire_dispatch,
               exchange().shape.dtype);
}

bool DispatchOperation::push_home() {
  const plan::RankPlan& rows = plan()->rows;
  if (next_token_ == rows.num_tokens) return false;
  pusher_.clear();
  const std::uint64_t most = kPushBytesPerStep / exchange().row_bytes + 1;
  for (; next_token_ < rows.num_tokens && pusher_.num_targets() < most; ++next_token_) {
    for (std::uint32_t t = rows.home_begin[next_token_]; t < rows.home_begin[next_token_ + 1];
         ++t) {
      pusher_.add_target(target_row(rows.home_targets[t]));
    }
    pusher_.add_row(x_.row(static_cast<std::int64_t>(next_token_)));
  }
  pusher_.push(engine().transport(), exchange().shape.hidden, exchange().shape.dtype,
               exchange().shape.dtype);
  return true;
}

bool DispatchOperation::finish_writing() {
  if (wrote_ || !running() || next_token_ < plan()->rows.num_tokens || !all_landed()) return false;
  windows_.raise(*this, PeerWindows::Flag::written);
  wrote_ = true;
  return true;
}

bool DispatchOperation::all_landed() const {
  return std::ranges::all_of(receivers_, [](const LaneReceiver& lane) { return lane.done(); });
}

int DispatchOperation::missing_writer() const {
  const std::vector<std::uint64_t>& rows_from = plan()->rows.rows_from;
  const Slot& slot = lease_->slot();
  for (int local = 0; local < static_cast<int>(rows_from.size()); ++local) {
    if (rows_from[local] == 0) continue;
    const Line& line = slot.layout.written(slot.base, local);
    if (!engine().transport().reached(line.value, turn_)) return engine().node_ranks()[local];
  }
  return -1;
}

std::byte* DispatchOperation::target_row(const plan::Target& target) const {
  return windows_.data(target.local_rank) + target.row * exchange().window_stride_bytes;
}

Matrix DispatchOperation::rows() const {
  return {.data = lease_->slot().data(),
          .dtype = exchange().shape.dtype,
          .rows = plan()->rows.num_rows(),
          .columns = exchange().shape.hidden,
          .row_stride_bytes = static_cast<std::int64_t>(exchange().window_stride_bytes)};
}

WaitTarget DispatchOperation::waits_for() const {
  if (const int rank = windows_.missing_rank(*this); rank >= 0) {
    return {rank, Phase::window_granted};
  }
  for (std::size_t i = 0; i < receivers_.size(); ++i) {
    if (!receivers_[i].done()) return {flow_->inboxes[i].peer, Phase::rows};
  }
  if (const int rank = senders_.starved_peer(*flow_, call().ordinal); rank >= 0) {
    return {rank, Phase::credit};
  }
  if (const int rank = missing_writer(); rank >= 0) return {rank, Phase::rows_pushed};
  return {plan()->rows.outgoing.empty() ? -1 : plan()->rows.outgoing.front().dispatch.peer,
          Phase::sends};
}

bool DispatchOperation::quiet() {
  if (lease_ && shown_) engine().retire(std::move(lease_), *this);
  lease_.reset();
  return true;
}

}  // namespace ferry::detail
