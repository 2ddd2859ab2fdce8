#pragma once
// Credit and arrived fragments of one plan. A sender may have sent as many fragments of a use as
// the receiver has granted, so arrived data never needs more memory than was set aside for it.
// Invariants:
//   1. Fragments of an inbox belong to one use at a time (`ordinal`); the next use is granted only
//      when all fragments of this one are consumed.
//   2. arrived <= granted <= total.

#include <array>
#include <cstdint>
#include <iterator>
#include <list>
#include <vector>

#include "exchange/blocks.hpp"
#include "exchange/crossing.hpp"
#include "ferry/options.hpp"
#include "kernels/row_kernels.hpp"
#include "plan/rank_plan.hpp"
#include "plan/traffic.hpp"
#include "wire/headers.hpp"

namespace ferry::detail {

/// Fragments per lane and operation that every plan sets aside and grants in its metadata.
inline constexpr std::uint32_t kInitialFragments = 1;

struct ArrivedFragment {
  wire::FragmentHeader header;
  Block block;

  std::span<const std::byte> payload() const {
    return block.memory().subspan(wire::kFragmentHeaderBytes, header.payload_bytes);
  }
};

/// Receiving end of a lane, for one kind of operation.
struct LaneInbox {
  int peer = -1;
  std::uint32_t total = 0;    ///< fragments of every use
  std::uint32_t ordinal = 0;  ///< the use whose fragments come now
  std::uint32_t granted = 0;
  std::uint32_t arrived = 0;
  std::list<ArrivedFragment> queue;  ///< arrived and not consumed
};

/// Sending end of a lane, for one kind of operation: what the receiver granted last.
struct LaneOutbox {
  int peer = -1;
  std::uint32_t total = 0;
  std::uint32_t ordinal = 0;
  std::uint32_t granted = 0;
  std::uint32_t sent = 0;  ///< the next use is granted when all of this one are

  bool may_send(std::uint32_t use_ordinal, std::uint64_t fragment) const {
    return ordinal == use_ordinal && fragment < granted;
  }
};

/// All lanes of one stream of one kind of operation.
struct KindFlow {
  /// Grants of the first use were made before the sizes of lanes were known.
  bool generous_grants = false;
  std::vector<LaneInbox> inboxes;
  std::vector<LaneOutbox> outboxes;

  LaneInbox* inbox_of(int peer);
  LaneOutbox* outbox_of(int peer);
};

/// One kind of operation on a plan.
struct CallFlow {
  std::uint32_t next_ordinal = 0;  ///< of the next call of this kind
  KindFlow rows;
  KindFlow values;  ///< without lanes where no numbers travel

  KindFlow& of(wire::Stream stream) { return stream == wire::Stream::rows ? rows : values; }
};

/// How rows cross in each kind of operation, and numbers.
struct Crossings {
  Crossing dispatch;
  Crossing combine;
  Crossing combine_backward;
  Crossing dispatch_backward;
  Crossing values;
};

/// What writes the rows of each kind of operation.
struct RowPackers {
  explicit RowPackers(const Crossings& crossings)
      : dispatch(crossings.dispatch),
        combine(crossings.combine),
        combine_backward(crossings.combine_backward),
        dispatch_backward(crossings.dispatch_backward) {}
  RowPacker dispatch;
  RowPacker combine;
  RowPacker combine_backward;
  RowPacker dispatch_backward;
};

/// How each stream is cut into fragments.
struct Framings {
  plan::Framing dispatch;
  plan::Framing combine;
  plan::Framing combine_backward;
  plan::Framing dispatch_backward;
  plan::Framing values;
};

/// Dispatch and combine_backward go from source to landing rank, combine and dispatch_backward
/// back, and so do numbers.
class PlanFlow {
 public:
  PlanFlow(const plan::RankPlan& plan, const Framings& framings, WeightMode weights);

  /// Errors: none. Requires: a kind that works on a plan
  CallFlow& call(wire::OpKind kind);
  KindFlow& rows(wire::OpKind kind) { return call(kind).rows; }
  /// Null for a kind that works on no plan.
  KindFlow* find(wire::OpKind kind, wire::Stream stream);

  template <typename Visitor>
  void for_each(const Visitor& visit) {
    for (const wire::OpKind kind : kKinds) {
      visit(kind, call(kind).rows);
      visit(kind, call(kind).values);
    }
  }

 private:
  static constexpr wire::OpKind kKinds[] = {
      wire::OpKind::dispatch,          wire::OpKind::combine,
      wire::OpKind::combine_backward,  wire::OpKind::combine_backward_weights,
      wire::OpKind::dispatch_backward, wire::OpKind::dispatch_backward_weights};
  std::array<CallFlow, std::size(kKinds)> calls_;
};

}  // namespace ferry::detail
