#pragma once
// Exchange::dispatch. Three streams of work side by side: fragments to other nodes, fragments from
// other nodes that land here, rows of own tokens for this node. Each row is written once, straight
// into the window of the rank that holds its expert.

#include <memory>
#include <span>
#include <vector>

#include "exchange/early.hpp"
#include "exchange/lanes.hpp"
#include "exchange/operation.hpp"
#include "exchange/peer_windows.hpp"
#include "exchange/row_pusher.hpp"
#include "exchange/written_window.hpp"
#include "ferry/matrix.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::detail {

struct DispatchInput {
  ConstMatrix x;
  std::span<const std::byte> extra;  ///< [num_tokens x extra_bytes]
};

class DispatchOperation final : public Operation {
 public:
  DispatchOperation(std::shared_ptr<ExchangeState> exchange, std::shared_ptr<PlanState> plan,
                    DispatchInput input);
  /// Starts before its plan is made: sends what it has credit for, and stages what comes.
  DispatchOperation(std::shared_ptr<ExchangeState> exchange, std::unique_ptr<EarlySide> early,
                    DispatchInput input);

  bool step() override;
  WaitTarget waits_for() const override;
  bool quiet() override;
  std::optional<Error> find_wait_error() const override;

  /// What works before the plan is there; null from then on.
  EarlySide* early() { return early_.get(); }
  bool takes_fragments() const { return opened_; }
  /// The plan is made.
  void take_plan(std::shared_ptr<PlanState> plan);
  const DispatchInput& input() const { return input_; }

  /// The rows' slot, for the handle that the caller gets. Requires: the operation succeeded.
  std::unique_ptr<SlotLease> take_lease() { return own_.take_lease(); }
  Matrix rows() const { return own_.rows(*this); }

 private:
  bool send_some();
  bool land_some();
  void land(const plan::Lane& lane, const LaneReceiver::Taken& taken);
  void land_rows(const plan::Lane& lane, const LaneReceiver::Taken& taken, bool escalated);
  bool push_home();
  bool finish_writing();
  std::byte* target_row(const plan::Target& target, std::byte* window) const;
  const std::byte* extra_row(std::uint64_t token) const;
  Packed pack_rows(const plan::Lane& lane, const plan::Fragment& fragment, std::byte* payload);
  void clear_pushers();
  void add_target(const plan::Target& target);
  void add_row(const std::byte* row, const std::byte* extra);
  void push(const kernels::RowFormat& rows);

  void make_receivers();
  void open_early();
  bool step_early();

  const DispatchInput input_;
  std::unique_ptr<EarlySide> early_;
  bool opened_ = false;
  std::vector<plan::LanePair> early_lanes_;  ///< what senders_ walks, when it began early
  KindFlow* flow_ = nullptr;
  WrittenWindow own_;
  bool wrote_ = false;
  PeerWindows windows_;
  LaneSenders senders_;
  LaneReceivers receivers_;
  std::uint64_t next_token_ = 0;
  // Reused from step to step.
  RowPusher pusher_;
  RowPusher extra_pusher_;
  std::vector<const std::byte*> sources_;
};

}  // namespace ferry::detail
