// Exchange::combine_backward: see combine_backward.hpp.

#include "exchange/combine_backward.hpp"

#include "exchange/engine.hpp"

namespace ferry::detail {
namespace {

wire::OpKind kind_of(bool with_weights) {
  return with_weights ? wire::OpKind::combine_backward_weights : wire::OpKind::combine_backward;
}

}  // namespace

CombineBackwardOperation::CombineBackwardOperation(std::shared_ptr<ExchangeState> exchange,
                                                   std::shared_ptr<PlanState> plan,
                                                   ConstMatrix grad_out,
                                                   const std::optional<WeightGradients>& weights)
    : Operation(std::move(exchange), std::move(plan), kind_of(weights.has_value())),
      grad_out_(grad_out),
      weighted_(this->exchange().weighted()),
      flow_(this->plan()->flow->call(call().kind)),
      windows_(this->plan()->rows.rows_to),
      senders_(this->plan()->rows.outgoing, Way::back, this->exchange().framings.combine_backward),
      receivers_(this->plan()->rows.landing, Way::back, this->exchange().framings.combine_backward,
                 this->exchange().crossings.combine_backward) {
  if (!weights) return;
  const plan::RankPlan& rows = this->plan()->rows;
  weights_.emplace(
      Weights{.out = weights->out,
              .y = ShownRows(weights->y, WindowRole::outputs),
              .outputs = PeerWindows(rows.rows_to, WindowRole::outputs),
              .senders = LaneSenders(rows.landing, Way::values, this->exchange().framings.values),
              .home = HomeValues(*this),
              .products = {},
              .num_products = std::vector<std::uint32_t>(rows.landing.size())});
  for (const plan::LanePair& pair : rows.landing) {
    weights_->products.emplace_back(pair.back().targets.size());
  }
}

bool CombineBackwardOperation::windows_complete() const {
  return windows_.complete() && (!weights_ || weights_->outputs.complete());
}

bool CombineBackwardOperation::step() {
  bool advanced = own_.show(*this);
  if (weights_) advanced |= weights_->y.step(*this);
  advanced |= windows_.resolve(*this);
  if (weights_) advanced |= weights_->outputs.resolve(*this);
  if (!running()) return true;
  advanced |= send_some();
  if (windows_complete()) {
    advanced |= land_some();
    if (!running()) return true;  // nothing is written any more
    advanced |= push_home();
    advanced |= finish();
  }
  if (weights_) {
    advanced |= send_products();
    advanced |= weights_->home.step(*this, flow_.values);
  }
  if (!running() || !all_here()) return advanced;
  if (weights_) {
    weights_->home.write(*this, weights_->out);
    weights_->y.end();
  }
  own_.end();
  succeed();
  return true;
}

bool CombineBackwardOperation::send_some() {
  return senders_.send(
      *this, flow_.rows,
      [this](std::size_t lane, const plan::Fragment& fragment, std::byte* payload) {
        sources_.clear();
        for (std::uint32_t i = 0; i < fragment.count; ++i) {
          sources_.push_back(grad_out_.row(senders_.lane(lane).tokens[fragment.first + i]));
        }
        return exchange().packers.combine_backward.pack(engine().transport(),
                                                        exchange().shape.dtype, sources_, payload);
      });
}

bool CombineBackwardOperation::land_some() {
  return receivers_.land(
      *this, flow_.rows,
      [this](std::size_t lane, const LaneReceiver::Taken& taken) { land(lane, taken); });
}

void CombineBackwardOperation::land(std::size_t lane_at, const LaneReceiver::Taken& taken) {
  const Crossing& crossing = exchange().crossings.combine_backward;
  land_rows(lane_at, taken, false);
  push(crossing.format);
  if (taken.rows.any_escalated()) {
    land_rows(lane_at, taken, true);
    push(crossing.escalated);
  }
  if (!weights_) return;
  const std::uint32_t end_item = taken.fragment.first + taken.fragment.count;
  weights_->num_products[lane_at] = receivers_.lane(lane_at).target_begin[end_item];
}

void CombineBackwardOperation::land_rows(std::size_t lane_at, const LaneReceiver::Taken& taken,
                                         bool escalated) {
  const plan::Lane& lane = receivers_.lane(lane_at);
  rows_.clear();
  targets_.clear();
  pusher_.clear();
  for (std::uint32_t i = 0; i < taken.fragment.count; ++i) {
    if (taken.rows.escalated(i) != escalated) continue;
    const std::uint32_t item = taken.fragment.first + i;
    for (std::uint32_t t = lane.target_begin[item]; t < lane.target_begin[item + 1]; ++t) {
      add_target(lane.targets[t], weights_ ? &weights_->products[lane_at][t] : nullptr);
    }
    add_row(taken.rows.row(i));
  }
}

bool CombineBackwardOperation::push_home() {
  const plan::RankPlan& rows = plan()->rows;
  if (next_token_ == rows.num_tokens) return false;
  rows_.clear();
  targets_.clear();
  pusher_.clear();
  const std::uint64_t most = kPushBytesPerStep / exchange().row_bytes + 1;
  const std::uint32_t first = rows.home_begin[next_token_];
  for (; next_token_ < rows.num_tokens && rows.home_begin[next_token_] < first + most;
       ++next_token_) {
    for (std::uint32_t t = rows.home_begin[next_token_]; t < rows.home_begin[next_token_ + 1];
         ++t) {
      add_target(rows.home_targets[t], weights_ ? &weights_->home.of_home()[t] : nullptr);
    }
    add_row(grad_out_.row(static_cast<std::int64_t>(next_token_)));
  }
  push(exchange().shape.dtype);
  return true;
}

void CombineBackwardOperation::add_target(const plan::Target& target, float* product) {
  const std::uint64_t offset = target.row * exchange().window_stride_bytes;
  std::byte* const out = windows_.data(target.local_rank) + offset;
  if (!weighted_) {
    pusher_.add_target(out);
    return;
  }
  kernels::ScaleTarget scaled{.out = out, .weight = target.weight};
  if (product != nullptr) {
    scaled.y = weights_->outputs.data(target.local_rank) + offset;
    scaled.dot = product;
  }
  targets_.push_back(scaled);
}

void CombineBackwardOperation::add_row(const std::byte* row) {
  if (!weighted_) {
    pusher_.add_row(row);
    return;
  }
  const std::uint32_t first = rows_.empty() ? 0 : rows_.back().first + rows_.back().count;
  rows_.push_back({row, first, static_cast<std::uint32_t>(targets_.size()) - first});
}

void CombineBackwardOperation::push(const kernels::RowFormat& rows) {
  Transport& transport = engine().transport();
  const RowShape& shape = exchange().shape;
  if (!weighted_) {
    pusher_.push(transport, shape.hidden, rows, shape.dtype);
    return;
  }
  transport.scale_rows({.source = rows,
                        .target_dtype = shape.dtype,
                        .hidden = shape.hidden,
                        .rows = rows_,
                        .targets = targets_});
}

bool CombineBackwardOperation::send_products() {
  Weights& weights = *weights_;
  const auto ready = [&](std::size_t lane, const plan::Fragment& fragment) {
    return fragment.first + fragment.count <= weights.num_products[lane];
  };
  const auto fill = [&](std::size_t lane, const plan::Fragment& fragment, std::byte* payload) {
    const auto* const first =
        reinterpret_cast<const std::byte*>(&weights.products[lane][fragment.first]);
    engine().transport().pack_rows(
        {.hidden = fragment.count, .rows = std::span(&first, 1), .out = payload});
    return Packed{.bytes = fragment.count * sizeof(float)};
  };
  return weights.senders.send(*this, flow_.values, fill, ready);
}

// Tells the node that this rank has written, and read, all that it will.
bool CombineBackwardOperation::finish() {
  if (wrote_ || !running() || next_token_ < plan()->rows.num_tokens || !receivers_.done()) {
    return false;
  }
  windows_.raise(*this, PeerWindows::Flag::written);
  if (weights_) weights_->outputs.raise(*this, PeerWindows::Flag::released);
  wrote_ = true;
  return true;
}

bool CombineBackwardOperation::all_here() const {
  if (!wrote_ || !own_.shown() || !senders_.done() || sends_in_flight > 0) return false;
  if (own_.missing_writer(*this) >= 0) return false;
  if (!weights_) return true;
  return weights_->senders.done() && weights_->home.done() && weights_->y.shown() &&
         weights_->y.missing_reader(*this) < 0;
}

WaitTarget CombineBackwardOperation::waits_for() const {
  if (failing()) {
    const bool read = weights_ && weights_->y.shown();
    return {read ? weights_->y.missing_reader(*this) : -1, Phase::outputs_read};
  }
  if (const int rank = windows_.missing_rank(*this); rank >= 0) {
    return {rank, Phase::window_granted};
  }
  if (!own_.shown())
    return {engine().slow_reader(*this, plan()->rows.rows_from), Phase::earlier_call};
  if (weights_ && !weights_->y.shown()) return weights_->y.waits_for(*this);
  if (weights_) {
    if (const int rank = weights_->outputs.missing_rank(*this); rank >= 0) {
      return {rank, Phase::outputs};
    }
  }
  if (const int rank = receivers_.missing_rank(); rank >= 0) return {rank, Phase::rows};
  if (const int rank = senders_.starved_peer(flow_.rows, call().ordinal); rank >= 0) {
    return {rank, Phase::credit};
  }
  if (const int rank = own_.missing_writer(*this); rank >= 0) return {rank, Phase::rows_pushed};
  if (weights_) {
    if (const int rank = weights_->senders.starved_peer(flow_.values, call().ordinal); rank >= 0) {
      return {rank, Phase::credit};
    }
    if (const int rank = weights_->home.missing_rank(); rank >= 0) return {rank, Phase::values};
    if (const int rank = weights_->y.missing_reader(*this); rank >= 0) {
      return {rank, Phase::outputs_read};
    }
  }
  return {plan()->rows.outgoing.empty() ? -1 : plan()->rows.outgoing.front().dispatch.peer,
          Phase::sends};
}

bool CombineBackwardOperation::quiet() {
  own_.give_back(*this);
  return !weights_ || weights_->y.quiet(*this);
}

void CombineBackwardOperation::abandon() {
  own_.give_back(*this);
  if (weights_) weights_->y.abandon(*this);
}

}  // namespace ferry::detail
