// Exchange::combine: see combine.hpp.

#include "exchange/combine.hpp"

#include <algorithm>
#include <utility>

#include "base/check.hpp"
#include "exchange/engine.hpp"

namespace ferry::detail {
namespace {

// Rows that come home for combine, or gradients of dispatch_backward.
bool of_gradients(const RowsHome& rows) { return rows.kind != wire::OpKind::combine; }

// Targets stand in tree order: marks where a rank's group and the node's group end.
void mark_groups(std::span<kernels::SumTerm> terms, std::span<const plan::Target> targets) {
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const bool last = i + 1 == terms.size();
    terms[i].ends_rank = last || targets[i + 1].local_rank != targets[i].local_rank;
    terms[i].ends_node = last;
  }
}

}  // namespace

CombineOperation::CombineOperation(std::shared_ptr<ExchangeState> exchange,
                                   std::shared_ptr<PlanState> plan, const RowsHome& rows,
                                   const std::optional<WeightsHome>& weights)
    : Operation(std::move(exchange), std::move(plan), rows.kind),
      out_(rows.out),
      weights_(weights),
      crossing_(of_gradients(rows) ? this->exchange().crossings.dispatch_backward
                                   : this->exchange().crossings.combine),
      packer_(of_gradients(rows) ? this->exchange().packers.dispatch_backward
                                 : this->exchange().packers.combine),
      framing_(of_gradients(rows) ? this->exchange().framings.dispatch_backward
                                  : this->exchange().framings.combine),
      weighted_(rows.kind == wire::OpKind::combine && this->exchange().weighted()),
      flow_(this->plan()->flow->call(rows.kind)),
      own_(rows.rows, WindowRole::main,
           weights ? ShownRows::Values(weights->of_rows) : std::nullopt),
      windows_(this->plan()->rows.rows_to),
      senders_(this->plan()->rows.landing, Way::back, framing_) {
  for (const plan::LanePair& pair : this->plan()->rows.outgoing) {
    lanes_.push_back({LaneReceiver(pair, Way::back, framing_.rows_per_fragment), {}, 0});
  }
  group_lanes();
  if (!weights_) return;
  value_senders_.emplace(this->plan()->rows.landing, Way::values, this->exchange().framings.values);
  home_values_.emplace(*this);
}

void CombineOperation::group_lanes() {
  const Topology& topology = engine().transport().topology();
  std::size_t lane = 0;
  for (int node = 0; node < topology.num_nodes(); ++node) {
    NodeGroup group{.home = node == engine().transport().node(), .first_lane = lane};
    while (lane < lanes_.size() && topology.node_of(lanes_[lane].receiver.lane().peer) == node) {
      ++lane;
    }
    group.end_lane = lane;
    if (group.home || group.end_lane > group.first_lane) groups_.push_back(group);
  }
  FERRY_ASSERT(lane == lanes_.size(), "lanes are not in the order of nodes");
}

bool CombineOperation::step() {
  bool advanced = own_.step(*this);
  advanced |= windows_.resolve(*this);
  if (!running()) return true;
  if (windows_.complete()) {
    advanced |= send_some();
    advanced |= sum_home();
    if (!running()) return true;
    if (weights_) {
      advanced |= send_values();
      advanced |= take_values();
    }
    if (!running()) return true;
    advanced |= finish_reading();
  }
  if (!own_.shown() || !read_all_ || sends_in_flight > 0 || own_.missing_reader(*this) >= 0 ||
      (weights_ && !home_values_->done())) {
    return advanced;
  }
  if (weights_) home_values_->write(*this, weights_->out);
  own_.end();
  succeed();
  return true;
}

bool CombineOperation::send_some() {
  return senders_.send(
      *this, flow_.rows,
      [this](std::size_t lane, const plan::Fragment& fragment, std::byte* payload) {
        return fill_partials(senders_.lane(lane), fragment, payload);
      });
}

// What goes back for each item: its output as it is where an item is one (token, expert), else the
// weighted sum of its outputs on this node.
Packed CombineOperation::fill_partials(const plan::Lane& lane, const plan::Fragment& fragment,
                                       std::byte* payload) {
  const bool raw = plan::info(exchange().options.strategy).unit == plan::RowUnit::token_expert;
  Transport& transport = engine().transport();
  // Sums whose size depends on them are packed when they are there.
  const kernels::RowFormat format =
      crossing_.varies() ? kernels::RowFormat(DType::f32) : crossing_.format;
  const std::uint64_t row_bytes = format.row_bytes(crossing_.hidden);
  std::byte* const sums = crossing_.varies() ? scratch(fragment.count * row_bytes) : payload;
  terms_.clear();
  sums_.clear();
  sources_.clear();
  for (std::uint32_t i = 0; i < fragment.count; ++i) {
    const std::uint32_t item = fragment.first + i;
    const auto first = static_cast<std::uint32_t>(terms_.size());
    const std::span<const plan::Target> targets =
        std::span(lane.targets)
            .subspan(lane.target_begin[item],
                     lane.target_begin[item + 1] - lane.target_begin[item]);
    for (const plan::Target& target : targets) terms_.push_back(output_term(target));
    if (raw) {
      sources_.push_back(terms_.back().row);
      continue;
    }
    mark_groups(std::span(terms_).subspan(first), targets);
    sums_.push_back({sums + i * row_bytes, first, static_cast<std::uint32_t>(targets.size())});
  }
  if (raw) return packer_.pack(transport, exchange().shape.dtype, sources_, payload);
  transport.sum_rows({.out = format, .hidden = crossing_.hidden, .rows = sums_, .terms = terms_});
  if (!crossing_.varies()) return packer_.count_plain(fragment.count);
  for (const kernels::SumRow& sum : sums_) sources_.push_back(sum.out);
  return packer_.pack(transport, DType::f32, sources_, payload);
}

std::byte* CombineOperation::scratch(std::uint64_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  return scratch_.data();
}

bool CombineOperation::sum_home() {
  const std::uint64_t num_ranges = plan()->rows.num_ranges();
  bool advanced = false;
  if (range_ < num_ranges) {
    if (!stage_range() || !running()) return false;
    sum_range();
    ++range_;
    advanced = true;
  }
  if (range_ < num_ranges) return advanced;
  // In the same step as the last sum: the operation may be over after it.
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (flow_.rows.inboxes[i].ordinal == call().ordinal)
      lanes_[i].receiver.end_use(*this, flow_.rows.inboxes[i]);
  }
  return advanced;
}

// True when all partial sums of the range are here.
bool CombineOperation::stage_range() {
  bool ready = true;
  for (std::size_t i = 0; i < lanes_.size() && running(); ++i) {
    Homecoming& lane = lanes_[i];
    LaneInbox& inbox = flow_.rows.inboxes[i];
    if (lane.receiver.done()) continue;
    if (inbox.ordinal != call().ordinal)
      return false;  // an earlier use of the plan still comes home
    lane.receiver.grant_through(*this, inbox, range_);
    while (!lane.receiver.done() && lane.receiver.range() == range_) {
      auto taken = lane.receiver.take(*this, inbox, crossing_);
      if (!taken) break;
      lane.staged.push_back(std::move(*taken));
    }
    ready &= lane.receiver.done() || lane.receiver.range() > range_;
  }
  return ready;
}

void CombineOperation::sum_range() {
  const plan::RankPlan& rows = plan()->rows;
  terms_.clear();
  sums_.clear();
  for (Homecoming& lane : lanes_) lane.next_item = lane.receiver.lane().range_begin[range_];
  const std::uint64_t begin = range_ * rows.range_tokens;
  const std::uint64_t end = std::min(begin + rows.range_tokens, rows.num_tokens);
  for (std::uint64_t token = begin; token < end; ++token) {
    const auto first = static_cast<std::uint32_t>(terms_.size());
    for (const NodeGroup& group : groups_) {
      bool any = false;
      if (group.home) add_home_terms(token);
      for (std::size_t i = group.first_lane; i < group.end_lane; ++i) {
        any |= add_lane_terms(lanes_[i], token);
      }
      if (any) terms_.back().ends_node = true;
    }
    sums_.push_back({out_.row(static_cast<std::int64_t>(token)), first,
                     static_cast<std::uint32_t>(terms_.size()) - first});
  }
  engine().transport().sum_rows({.out = exchange().shape.dtype,
                                 .hidden = exchange().shape.hidden,
                                 .rows = sums_,
                                 .terms = terms_,
                                 .block_columns = crossing_.format.block_columns});
  for (Homecoming& lane : lanes_) lane.staged.clear();
}

// On the home node slots are added in order, whatever ranks they are on: one group.
void CombineOperation::add_home_terms(std::uint64_t token) {
  const plan::RankPlan& rows = plan()->rows;
  const std::uint32_t begin = rows.home_begin[token];
  const std::uint32_t end = rows.home_begin[token + 1];
  for (std::uint32_t t = begin; t < end; ++t) terms_.push_back(output_term(rows.home_targets[t]));
  if (end > begin) {
    terms_.back().ends_rank = true;
    terms_.back().ends_node = true;
  }
}

bool CombineOperation::add_lane_terms(Homecoming& lane, std::uint64_t token) {
  const plan::Lane& items = lane.receiver.lane();
  const std::uint32_t first = lane.next_item;
  for (; lane.next_item < items.tokens.size() && items.tokens[lane.next_item] == token;
       ++lane.next_item) {
    kernels::SumTerm term;
    const auto [row, format] = staged_row(lane, lane.next_item);
    term.row = row;
    term.format = format;
    if (weighted_ && !items.weights.empty()) {
      term.weighted = true;
      term.weight = items.weights[lane.next_item];
    }
    terms_.push_back(term);
  }
  if (lane.next_item == first) return false;
  terms_.back().ends_rank = true;
  return true;
}

CombineOperation::StagedRow CombineOperation::staged_row(const Homecoming& lane,
                                                         std::uint32_t item) const {
  const std::uint32_t in_range = item - lane.receiver.lane().range_begin[range_];
  const std::uint64_t per_fragment = framing_.rows_per_fragment;
  const LaneReceiver::Taken& taken = lane.staged[in_range / per_fragment];
  FERRY_ASSERT(item >= taken.fragment.first && item < taken.fragment.first + taken.fragment.count,
               "item {} is not in its fragment", item);
  const std::uint32_t row = item - taken.fragment.first;
  return {taken.rows.row(row),
          (taken.rows.escalated(row) ? crossing_.escalated : crossing_.format).format};
}

kernels::SumTerm CombineOperation::output_term(const plan::Target& target) const {
  kernels::SumTerm term;
  term.row = windows_.data(target.local_rank) + target.row * exchange().window_stride_bytes;
  term.weight = target.weight;
  term.weighted = weighted_;
  term.format = wire_format_of(exchange().shape.dtype);
  return term;
}

bool CombineOperation::finish_reading() {
  if (read_all_ || range_ < plan()->rows.num_ranges() || !senders_.done()) return false;
  if (weights_ && (!value_senders_->done() || !took_home_values_)) return false;
  windows_.raise(*this, PeerWindows::Flag::released);
  read_all_ = true;
  return true;
}

// They can be sent as soon as the node shows them, beside the rows.
bool CombineOperation::send_values() {
  const std::uint64_t per_target = exchange().weights_per_row(plan()->num_topk);
  return value_senders_->send(
      *this, flow_.values,
      [&](std::size_t lane, const plan::Fragment& fragment, std::byte* payload) {
        const std::vector<plan::Target>& targets = plan()->rows.landing[lane].back().targets;
        sources_.clear();
        for (std::uint64_t value = fragment.first; value < fragment.first + fragment.count;
             ++value) {
          sources_.push_back(value_of(targets[value / per_target], value % per_target));
        }
        engine().transport().pack_rows({.hidden = 1, .rows = sources_, .out = payload});
        return Packed{.bytes = fragment.count * sizeof(float)};
      });
}

bool CombineOperation::take_values() {
  bool advanced = home_values_->step(*this, flow_.values);
  if (std::exchange(took_home_values_, true)) return advanced;
  const std::uint64_t per_target = exchange().weights_per_row(plan()->num_topk);
  sources_.clear();
  for (const plan::Target& target : plan()->rows.home_targets) {
    for (std::uint64_t value = 0; value < per_target; ++value) {
      sources_.push_back(value_of(target, value));
    }
  }
  engine().transport().pack_rows(
      {.hidden = 1,
       .rows = sources_,
       .out = reinterpret_cast<std::byte*>(home_values_->of_home().data())});
  return true;
}

// Numbers stand behind the rows of a window, whose number follows from the bytes that are shown.
const std::byte* CombineOperation::value_of(const plan::Target& target, std::uint64_t value) const {
  const std::uint64_t per_row = exchange().weights_per_row(plan()->num_topk);
  const std::span<const std::byte> window = windows_.bytes(target.local_rank);
  const std::uint64_t rows =
      window.size() / (exchange().window_stride_bytes + per_row * sizeof(float));
  return window.data() + rows * exchange().window_stride_bytes +
         (target.row * per_row + value) * sizeof(float);
}

WaitTarget CombineOperation::waits_for() const {
  if (failing()) {
    return {own_.shown() ? own_.missing_reader(*this) : -1, Phase::outputs_read};
  }
  if (!own_.shown()) return own_.waits_for(*this);
  if (const int rank = windows_.missing_rank(*this); rank >= 0) return {rank, Phase::outputs};
  if (const int rank = senders_.starved_peer(flow_.rows, call().ordinal); rank >= 0) {
    return {rank, Phase::credit};
  }
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    const LaneReceiver& receiver = lanes_[i].receiver;
    if (!receiver.done() && receiver.range() <= range_) {
      return {flow_.rows.inboxes[i].peer, Phase::partial_sums};
    }
  }
  if (weights_) {
    if (const int rank = value_senders_->starved_peer(flow_.values, call().ordinal); rank >= 0) {
      return {rank, Phase::credit};
    }
    if (const int rank = home_values_->missing_rank(); rank >= 0) return {rank, Phase::values};
  }
  if (const int rank = own_.missing_reader(*this); rank >= 0) return {rank, Phase::outputs_read};
  return {plan()->rows.landing.empty() ? -1 : plan()->rows.landing.front().dispatch.peer,
          Phase::sends};
}

}  // namespace ferry::detail
