#pragma once
// Exchange::combine_backward: gradients of the outputs go the way of dispatch, over the lanes of
// combine. Where combine applied the weights, a row is multiplied on its landing rank as it is
// written; the same pass gives its product with the expert's output, which is read in place in the
// window of the expert's rank, and these products go back as gradients of the weights.

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "exchange/home_values.hpp"
#include "exchange/lanes.hpp"
#include "exchange/operation.hpp"
#include "exchange/peer_windows.hpp"
#include "exchange/row_pusher.hpp"
#include "exchange/shown_rows.hpp"
#include "exchange/written_window.hpp"
#include "ferry/matrix.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::detail {

/// What gradients of weights are made from, and where they go.
struct WeightGradients {
  ConstMatrix y;
  std::span<float> out;  ///< [num_tokens, num_topk]
};

class CombineBackwardOperation final : public Operation {
 public:
  CombineBackwardOperation(std::shared_ptr<ExchangeState> exchange, std::shared_ptr<PlanState> plan,
                           ConstMatrix grad_out, const std::optional<WeightGradients>& weights);

  bool step() override;
  WaitTarget waits_for() const override;
  bool quiet() override;
  void abandon() override;

  /// The rows' slot, for the handle that the caller gets. Requires: the operation succeeded.
  std::unique_ptr<SlotLease> take_lease() { return own_.take_lease(); }
  Matrix rows() const { return own_.rows(*this); }

 private:
  /// The part that gradients of weights need.
  struct Weights {
    std::span<float> out;
    ShownRows y;
    PeerWindows outputs;
    LaneSenders senders;
    HomeValues home;
    /// Per landing pair: one product for each target, and how many are there.
    std::vector<std::vector<float>> products;
    std::vector<std::uint32_t> num_products;
  };

  bool windows_complete() const;
  bool send_some();
  bool land_some();
  void land_rows(std::size_t lane_at, const LaneReceiver::Taken& taken, bool escalated);
  void land(std::size_t lane, const LaneReceiver::Taken& taken);
  bool push_home();
  void add_target(const plan::Target& target, float* product);
  void add_row(const std::byte* row);
  void push(const kernels::RowFormat& rows);
  bool send_products();
  bool finish();
  bool all_here() const;

  const ConstMatrix grad_out_;
  const bool weighted_;
  CallFlow& flow_;
  WrittenWindow own_;
  PeerWindows windows_;
  LaneSenders senders_;
  LaneReceivers receivers_;
  std::optional<Weights> weights_;
  std::uint64_t next_token_ = 0;
  bool wrote_ = false;
  // Reused from step to step.
  std::vector<kernels::PushRow> rows_;
  std::vector<kernels::ScaleTarget> targets_;
  RowPusher pusher_;
  std::vector<const std::byte*> sources_;
};

}  // namespace ferry::detail
