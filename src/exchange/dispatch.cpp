// Exchange::dispatch: see dispatch.hpp.

#include "exchange/dispatch.hpp"

#include <utility>

#include <fmt/format.h>

#include "exchange/engine.hpp"

namespace ferry::detail {

DispatchOperation::DispatchOperation(std::shared_ptr<ExchangeState> exchange,
                                     std::shared_ptr<PlanState> plan, DispatchInput input)
    : Operation(std::move(exchange), std::move(plan), wire::OpKind::dispatch),
      input_(input),
      windows_(this->plan()->rows.rows_to),
      senders_(this->plan()->rows.outgoing, Way::out, this->exchange().framings.dispatch) {
  flow_ = &this->plan()->flow->rows(wire::OpKind::dispatch);
  make_receivers();
}

DispatchOperation::DispatchOperation(std::shared_ptr<ExchangeState> exchange,
                                     std::unique_ptr<EarlySide> early, DispatchInput input)
    : Operation(std::move(exchange), wire::OpKind::dispatch, early->plan_use(),
                early->plan_number()),
      input_(input),
      early_(std::move(early)),
      flow_(&early_->flow()),
      windows_({}),
      senders_(early_->lanes(), Way::out, this->exchange().framings.dispatch) {}

void DispatchOperation::make_receivers() {
  receivers_ = LaneReceivers(plan()->rows.landing, Way::out, exchange().framings.dispatch,
                             exchange().crossings.dispatch);
}

void DispatchOperation::open_early() {
  if (!std::exchange(opened_, true)) early_->open(*this);
}

void DispatchOperation::take_plan(std::shared_ptr<PlanState> plan) {
  open_early();  // peers count on its credit, however fast the plan was
  set_plan(std::move(plan));
  windows_ = PeerWindows(this->plan()->rows.rows_to);
  make_receivers();
  flow_ = &this->plan()->flow->rows(wire::OpKind::dispatch);
  const bool good = early_->hand_over(exchange(), *flow_);
  this->plan()->flow->call(wire::OpKind::dispatch).next_ordinal = 1;
  early_lanes_ = early_->take_lanes();
  early_.reset();
  if (good) return;
  engine().refuse(*this, Error(ErrorCode::corrupt_message,
                               describe() + ": more fragments came than the plan has"));
}

bool DispatchOperation::step_early() {
  if (!opened_) {
    open_early();
    engine().deliver_early(exchange(), call().plan);
  }
  return running() && send_some();
}

bool DispatchOperation::step() {
  if (early_) return step_early();
  bool advanced = own_.show(*this);
  advanced |= windows_.resolve(*this);
  if (!running()) return true;
  advanced |= send_some();
  if (windows_.complete()) {
    advanced |= land_some();
    if (!running()) return true;  // nothing is written any more
    advanced |= push_home();
    advanced |= finish_writing();
  }
  if (!running() || !wrote_ || !own_.shown() || !senders_.done() || sends_in_flight > 0 ||
      own_.missing_writer(*this) >= 0) {
    return advanced;
  }
  own_.end();
  succeed();
  return true;
}

bool DispatchOperation::send_some() {
  return senders_.send(
      *this, *flow_, [this](std::size_t lane, const plan::Fragment& fragment, std::byte* payload) {
        return pack_rows(senders_.lane(lane), fragment, payload);
      });
}

// The rows of a fragment, then their extra bytes.
Packed DispatchOperation::pack_rows(const plan::Lane& lane, const plan::Fragment& fragment,
                                    std::byte* payload) {
  const std::span<const std::uint32_t> tokens =
      std::span(lane.tokens).subspan(fragment.first, fragment.count);
  sources_.clear();
  for (const std::uint32_t token : tokens) sources_.push_back(input_.x.row(token));
  Transport& transport = engine().transport();
  const Crossing& crossing = exchange().crossings.dispatch;
  Packed packed =
      exchange().packers.dispatch.pack(transport, exchange().shape.dtype, sources_, payload);
  if (crossing.extra_bytes == 0) return packed;
  sources_.clear();
  for (const std::uint32_t token : tokens) sources_.push_back(extra_row(token));
  transport.pack_rows({.source_dtype = kExtraDtype,
                       .wire = kExtraDtype,
                       .hidden = exchange().extra_elements(),
                       .rows = sources_,
                       .out = payload + packed.bytes});
  packed.bytes += fragment.count * crossing.extra_bytes;
  return packed;
}

bool DispatchOperation::land_some() {
  return receivers_.land(*this, *flow_, [this](std::size_t lane, const LaneReceiver::Taken& taken) {
    land(receivers_.lane(lane), taken);
  });
}

void DispatchOperation::land(const plan::Lane& lane, const LaneReceiver::Taken& taken) {
  const Crossing& crossing = exchange().crossings.dispatch;
  land_rows(lane, taken, false);
  push(crossing.format);
  if (!taken.rows.any_escalated()) return;
  land_rows(lane, taken, true);
  push(crossing.escalated);
}

void DispatchOperation::land_rows(const plan::Lane& lane, const LaneReceiver::Taken& taken,
                                  bool escalated) {
  clear_pushers();
  const std::byte* const extra = taken.rows.extra();
  for (std::uint32_t i = 0; i < taken.fragment.count; ++i) {
    if (taken.rows.escalated(i) != escalated) continue;
    const std::uint32_t item = taken.fragment.first + i;
    for (std::uint32_t t = lane.target_begin[item]; t < lane.target_begin[item + 1]; ++t) {
      add_target(lane.targets[t]);
    }
    add_row(taken.rows.row(i), extra + i * exchange().crossings.dispatch.extra_bytes);
  }
}

bool DispatchOperation::push_home() {
  const plan::RankPlan& rows = plan()->rows;
  if (next_token_ == rows.num_tokens) return false;
  clear_pushers();
  const std::uint64_t most = kPushBytesPerStep / exchange().row_bytes + 1;
  for (; next_token_ < rows.num_tokens && pusher_.num_targets() < most; ++next_token_) {
    for (std::uint32_t t = rows.home_begin[next_token_]; t < rows.home_begin[next_token_ + 1];
         ++t) {
      add_target(rows.home_targets[t]);
    }
    add_row(input_.x.row(static_cast<std::int64_t>(next_token_)), extra_row(next_token_));
  }
  push(exchange().shape.dtype);
  return true;
}

void DispatchOperation::clear_pushers() {
  pusher_.clear();
  extra_pusher_.clear();
}

void DispatchOperation::add_target(const plan::Target& target) {
  std::byte* const row = target_row(target, windows_.data(target.local_rank));
  pusher_.add_target(row);
  if (exchange().options.extra_bytes > 0) {
    extra_pusher_.add_target(row + exchange().extra_offset);
  }
}

void DispatchOperation::add_row(const std::byte* row, const std::byte* extra) {
  pusher_.add_row(row);
  if (exchange().options.extra_bytes > 0) extra_pusher_.add_row(extra);
}

void DispatchOperation::push(const kernels::RowFormat& rows) {
  pusher_.push(engine().transport(), exchange().shape.hidden, rows, exchange().shape.dtype);
  if (exchange().options.extra_bytes == 0) return;
  extra_pusher_.push(engine().transport(), exchange().extra_elements(), kExtraDtype, kExtraDtype);
}

const std::byte* DispatchOperation::extra_row(std::uint64_t token) const {
  return input_.extra.data() + token * static_cast<std::uint64_t>(exchange().options.extra_bytes);
}

bool DispatchOperation::finish_writing() {
  if (wrote_ || !running() || next_token_ < plan()->rows.num_tokens || !receivers_.done()) {
    return false;
  }
  windows_.raise(*this, PeerWindows::Flag::written);
  wrote_ = true;
  return true;
}

std::byte* DispatchOperation::target_row(const plan::Target& target, std::byte* window) const {
  return window + target.row * exchange().window_stride_bytes;
}

std::optional<Error> DispatchOperation::find_wait_error() const {
  if (!early_ || engine().find_planning(exchange(), call().plan) != nullptr) return std::nullopt;
  return Error(ErrorCode::invalid_argument,
               fmt::format("{}: wait() before its plan was started; fix: call plan(routing, "
                           "gathering) first",
                           describe()));
}

WaitTarget DispatchOperation::waits_for() const {
  if (early_) {
    const Operation* const planning = engine().find_planning(exchange(), call().plan);
    return planning != nullptr ? planning->waits_for() : WaitTarget{};
  }
  if (const int rank = windows_.missing_rank(*this); rank >= 0) {
    return {rank, Phase::window_granted};
  }
  if (!own_.shown())
    return {engine().slow_reader(*this, plan()->rows.rows_from), Phase::earlier_call};
  if (const int rank = receivers_.missing_rank(); rank >= 0) return {rank, Phase::rows};
  if (const int rank = senders_.starved_peer(*flow_, call().ordinal); rank >= 0) {
    return {rank, Phase::credit};
  }
  if (const int rank = own_.missing_writer(*this); rank >= 0) return {rank, Phase::rows_pushed};
  return {plan()->rows.outgoing.empty() ? -1 : plan()->rows.outgoing.front().dispatch.peer,
          Phase::sends};
}

bool DispatchOperation::quiet() {
  if (early_ && opened_) early_->close(exchange());
  early_.reset();
  own_.give_back(*this);
  return true;
}

}  // namespace ferry::detail
