#pragma once
// Exchange::combine, the way back: a landing rank sums a token's outputs on its node, straight
// from the experts' windows, and sends one row; the home rank adds nodes in ascending order.
// Ranges go in ascending order, so staging holds a few of them, whatever the number of tokens.
// dispatch_backward is the same for gradients of rows, unweighted, with gradients of weights beside
// them where the experts applied the weights.

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "exchange/home_values.hpp"
#include "exchange/lanes.hpp"
#include "exchange/operation.hpp"
#include "exchange/peer_windows.hpp"
#include "exchange/shown_rows.hpp"
#include "ferry/matrix.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::detail {

/// Rows that come home, and where their sums go.
struct RowsHome {
  wire::OpKind kind = wire::OpKind::combine;
  ConstMatrix rows;
  Matrix out;
};

/// Gradients of weights that travel with them.
struct WeightsHome {
  std::span<const float> of_rows;  ///< [num_rows x weights per row]
  std::span<float> out;            ///< [num_tokens, num_topk]
};

class CombineOperation final : public Operation {
 public:
  CombineOperation(std::shared_ptr<ExchangeState> exchange, std::shared_ptr<PlanState> plan,
                   const RowsHome& rows, const std::optional<WeightsHome>& weights = std::nullopt);

  bool step() override;
  WaitTarget waits_for() const override;
  bool quiet() override { return own_.quiet(*this); }
  void abandon() override { own_.abandon(*this); }

 private:
  /// The lanes of one node, or this rank's home node, in the order of the sum.
  struct NodeGroup {
    bool home = false;
    std::size_t first_lane = 0;
    std::size_t end_lane = 0;
  };
  /// A lane whose partial sums come home.
  struct Homecoming {
    LaneReceiver receiver;
    std::vector<LaneReceiver::Taken> staged;  ///< fragments of the range that is summed next
    std::uint32_t next_item = 0;
  };

  struct StagedRow {
    const std::byte* row = nullptr;
    WireFormat format = WireFormat::f32;
  };

  void group_lanes();
  bool send_some();
  Packed fill_partials(const plan::Lane& lane, const plan::Fragment& fragment, std::byte* payload);
  std::byte* scratch(std::uint64_t bytes);
  bool sum_home();
  bool stage_range();
  void sum_range();
  void add_home_terms(std::uint64_t token);
  bool add_lane_terms(Homecoming& lane, std::uint64_t token);
  StagedRow staged_row(const Homecoming& lane, std::uint32_t item) const;
  bool finish_reading();
  kernels::SumTerm output_term(const plan::Target& target) const;

  // Gradients of weights
  bool send_values();
  bool take_values();
  const std::byte* value_of(const plan::Target& target, std::uint64_t value) const;

  const Matrix out_;
  const std::optional<WeightsHome> weights_;
  const Crossing& crossing_;  ///< of rows that come home from other nodes
  RowPacker& packer_;
  const plan::Framing framing_;
  const bool weighted_;  ///< this operation multiplies with the routing weights
  CallFlow& flow_;
  ShownRows own_;
  bool read_all_ = false;
  PeerWindows windows_;
  LaneSenders senders_;
  std::optional<LaneSenders> value_senders_;
  std::optional<HomeValues> home_values_;
  bool took_home_values_ = false;
  std::vector<Homecoming> lanes_;
  std::vector<NodeGroup> groups_;
  std::uint64_t range_ = 0;  ///< summed next
  // Reused from step to step.
  std::vector<kernels::SumTerm> terms_;
  std::vector<kernels::SumRow> sums_;
  std::vector<const std::byte*> sources_;
  std::vector<std::byte> scratch_;  ///< sums before they are packed
};

}  // namespace ferry::detail
