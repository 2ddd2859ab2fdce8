#pragma once
// What a plan costs in rows, fragments and bytes: exact, from the plan alone.

#include <cstdint>
#include <vector>

#include "plan/rank_plan.hpp"

namespace ferry::plan {

/// How rows of one operation are put on the wire.
struct Framing {
  std::uint64_t row_bytes = 0;     ///< of one row in the wire format
  std::uint64_t header_bytes = 0;  ///< of one fragment
  std::uint64_t rows_per_fragment = 1;
  std::uint64_t most_payload_bytes = 0;  ///< of one fragment
};

/// Rows per fragment for a fragment size: at least one, however long a row is.
Framing make_framing(std::uint64_t row_bytes, std::uint64_t header_bytes,
                     std::uint64_t fragment_bytes);

/// Source tokens of a range where nobody chose them: as many as fill eight fragments of the call
/// forward that has the longer rows. Calls on a plan share its ranges, and gradients do not count:
/// an exchange that only infers would pay in shorter ranges for calls it never makes. Their ranges
/// have as many fragments as their rows need, each granted as all are.
std::uint64_t default_range_tokens(const Framing& dispatch, const Framing& combine);

/// One fragment of a lane: items [first, first + count) of range `range`.
struct Fragment {
  std::uint64_t index = 0;  ///< in the lane
  std::uint64_t range = 0;
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

/// Walks the fragments of a lane in the order in which they cross. Both ends walk the same.
class FragmentCursor {
 public:
  FragmentCursor(const Lane& lane, std::uint64_t rows_per_fragment);
  bool at_end() const { return current_.count == 0; }
  /// Requires: !at_end()
  const Fragment& current() const { return current_; }
  void advance();

 private:
  void settle();
  const Lane* lane_;
  std::uint64_t rows_per_fragment_;
  Fragment current_;
};

/// Fragments of a lane up to and with range `range`.
std::uint64_t fragments_through(const Lane& lane, std::uint64_t rows_per_fragment,
                                std::uint64_t range);
std::uint64_t num_fragments(const Lane& lane, std::uint64_t rows_per_fragment);
/// Bytes of a lane, fragment headers included.
std::uint64_t lane_bytes(const Lane& lane, const Framing& framing);

/// Rows and bytes that one rank sends between nodes in both directions of the exchange.
struct RankTraffic {
  std::uint64_t rows_out = 0;
  std::uint64_t rows_back = 0;
  std::uint64_t bytes_out = 0;
  std::uint64_t bytes_back = 0;
  std::uint64_t bytes_grad_out = 0;  ///< of gradients, over the lanes of the way back
  std::uint64_t bytes_grad_back = 0;
  std::uint64_t bytes_values = 0;    ///< of gradients of weights
  /// Pushed at dispatch to ranks of this node on another socket.
  std::uint64_t inter_socket_rows = 0;
};
/// How rows go out and back, how gradients do, and numbers back.
struct TrafficFramings {
  Framing out;
  Framing back;
  Framing grad_out{};
  Framing grad_back{};
  Framing values{};
};
RankTraffic traffic(const RankPlan& plan, const Topology& topology,
                    const TrafficFramings& framings);

/// The fewest bytes that unicast between nodes can need: rows (token, remote node) x hidden x
/// element size, without headers, of this rank's tokens, one direction.
std::uint64_t bound_rows(std::span<const Membership> own, int home_node);

/// Expected distinct nodes of a token under uniform routing without repetition:
/// N (1 - C(E - E/N, k) / C(E, k)). Requires: num_nodes divides num_experts.
double expected_distinct_nodes(int num_experts, int num_topk, int num_nodes);

}  // namespace ferry::plan
