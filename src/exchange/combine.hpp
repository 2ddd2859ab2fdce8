#pragma once
// Exchange::combine, the way back: a landing rank sums a token's outputs on its node, straight
// from the experts' windows, and sends one row; the home rank adds nodes in ascending order.
// Ranges go in ascending order, so staging holds a few of them, whatever the number of tokens.

#include <memory>
#include <vector>

#include "exchange/lanes.hpp"
#include "exchange/operation.hpp"
#include "exchange/peer_windows.hpp"
#include "exchange/row_pusher.hpp"
#include "exchange/slots.hpp"
#include "ferry/matrix.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::detail {

class CombineOperation final : public Operation {
 public:
  CombineOperation(std::shared_ptr<ExchangeState> exchange, std::shared_ptr<PlanState> plan,
                   ConstMatrix y, Matrix out);

  bool step() override;
  WaitTarget waits_for() const override;
  bool quiet() override;
  void abandon() override;

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

  void group_lanes();
  bool take_slot();
  bool copy_y();
  bool show_window();
  bool send_some();
  void fill_partials(const plan::Lane& lane, const plan::Fragment& fragment, std::byte* payload);
  bool sum_home();
  bool stage_range();
  void sum_range();
  void add_home_terms(std::uint64_t token);
  bool add_lane_terms(Homecoming& lane, std::uint64_t token);
  const std::byte* staged_row(const Homecoming& lane, std::uint32_t item) const;
  bool finish_reading();
  /// A rank that still reads this rank's outputs; -1 if none.
  int missing_reader() const;
  kernels::SumTerm output_term(const plan::Target& target) const;

  const ConstMatrix y_;
  const Matrix out_;
  KindFlow* flow_ = nullptr;
  std::unique_ptr<SlotLease> lease_;
  std::uint64_t turn_ = 0;
  std::int64_t copied_rows_ = 0;
  bool shown_ = false;
  bool read_all_ = false;
  PeerWindows windows_;
  LaneSenders senders_;
  std::vector<Homecoming> lanes_;
  std::vector<NodeGroup> groups_;
  std::uint64_t range_ = 0;  ///< summed next
  // Reused from step to step.
  std::vector<kernels::SumTerm> terms_;
  std::vector<kernels::SumRow> sums_;
  std::vector<const std::byte*> sources_;
  RowPusher pusher_;
};

}  // namespace ferry::detail
