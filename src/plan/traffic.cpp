// Rows, fragments and bytes of a plan. Exact: what Transport counts must equal these figures.

#include "plan/traffic.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "base/check.hpp"

namespace ferry::plan {
namespace {

std::uint64_t fragments_of_range(const Lane& lane, std::uint64_t rows_per_fragment,
                                 std::size_t range) {
  const std::uint64_t items = lane.range_begin[range + 1] - lane.range_begin[range];
  return (items + rows_per_fragment - 1) / rows_per_fragment;
}

}  // namespace

Framing make_framing(std::uint64_t row_bytes, std::uint64_t header_bytes,
                     std::uint64_t fragment_bytes) {
  Framing framing{.row_bytes = row_bytes,
                  .header_bytes = header_bytes,
                  .rows_per_fragment = 1,
                  .most_payload_bytes = row_bytes};
  if (row_bytes == 0 || fragment_bytes <= header_bytes) return framing;
  // A fragment's row count travels as 32 bits.
  framing.rows_per_fragment = std::clamp<std::uint64_t>(
      (fragment_bytes - header_bytes) / row_bytes, 1, std::numeric_limits<std::uint32_t>::max());
  framing.most_payload_bytes = framing.rows_per_fragment * row_bytes;
  return framing;
}

std::uint64_t default_range_tokens(const Framing& dispatch, const Framing& combine) {
  constexpr std::uint64_t kFragments = 8;
  return kFragments * std::min(dispatch.rows_per_fragment, combine.rows_per_fragment);
}

FragmentCursor::FragmentCursor(const Lane& lane, std::uint64_t rows_per_fragment)
    : lane_(&lane), rows_per_fragment_(rows_per_fragment) {
  FERRY_ASSERT(rows_per_fragment > 0, "a fragment has at least one row");
  settle();
}

void FragmentCursor::advance() {
  FERRY_ASSERT(!at_end(), "the lane has {} fragments, all passed", current_.index);
  current_.first += current_.count;
  ++current_.index;
  settle();
}

/// Finds the range that holds item `first`, and cuts the fragment at its end.
void FragmentCursor::settle() {
  const std::size_t num_ranges = lane_->num_ranges();
  while (current_.range < num_ranges && lane_->range_begin[current_.range + 1] <= current_.first) {
    ++current_.range;
  }
  if (current_.range == num_ranges) {
    current_.count = 0;
    return;
  }
  const std::uint32_t left = lane_->range_begin[current_.range + 1] - current_.first;
  current_.count = static_cast<std::uint32_t>(std::min<std::uint64_t>(left, rows_per_fragment_));
}

std::uint64_t fragments_through(const Lane& lane, std::uint64_t rows_per_fragment,
                                std::uint64_t range) {
  std::uint64_t fragments = 0;
  const std::size_t end =
      range < lane.num_ranges() ? static_cast<std::size_t>(range) + 1 : lane.num_ranges();
  for (std::size_t at = 0; at < end; ++at) {
    fragments += fragments_of_range(lane, rows_per_fragment, at);
  }
  return fragments;
}

std::uint64_t num_fragments(const Lane& lane, std::uint64_t rows_per_fragment) {
  return fragments_through(lane, rows_per_fragment, lane.num_ranges());
}

std::uint64_t lane_bytes(const Lane& lane, const Framing& framing) {
  return lane.range_begin.back() * framing.row_bytes +
         num_fragments(lane, framing.rows_per_fragment) * framing.header_bytes;
}

RankTraffic traffic(const RankPlan& plan, const Topology& topology,
                    const TrafficFramings& framings) {
  RankTraffic total;
  for (const LanePair& pair : plan.outgoing) {
    total.rows_out += pair.dispatch.num_items();
    total.bytes_out += lane_bytes(pair.dispatch, framings.out);
    total.bytes_grad_out += lane_bytes(pair.back(), framings.grad_out);
  }
  // What this rank sends back is what landed on it, not what comes home to it.
  for (const LanePair& pair : plan.landing) {
    total.rows_back += pair.back().num_items();
    total.bytes_back += lane_bytes(pair.back(), framings.back);
    total.bytes_grad_back += lane_bytes(pair.back(), framings.grad_back);
    total.bytes_values += lane_bytes(pair.values, framings.values);
  }
  const std::vector<int>& ranks = topology.ranks_of(topology.node_of(plan.rank));
  for (std::size_t place = 0; place < ranks.size(); ++place) {
    if (topology.socket_of(ranks[place]) == topology.socket_of(plan.rank)) continue;
    total.inter_socket_rows += plan.rows_to[place];
  }
  return total;
}

std::uint64_t bound_rows(std::span<const Membership> own, int home_node) {
  std::uint64_t rows = 0;
  for (std::size_t node = 0; node < own.size(); ++node) {
    if (node != static_cast<std::size_t>(home_node)) rows += own[node].tokens.size();
  }
  return rows;
}

double expected_distinct_nodes(int num_experts, int num_topk, int num_nodes) {
  FERRY_ASSERT(num_nodes > 0 && num_experts % num_nodes == 0, "{} nodes do not divide {} experts",
               num_nodes, num_experts);
  FERRY_ASSERT(num_topk >= 0 && num_topk <= num_experts, "{} distinct experts of {}", num_topk,
               num_experts);
  // The chance that none of the k experts is on a given node, as a product that cannot overflow.
  const int elsewhere = num_experts - num_experts / num_nodes;
  double missed = 1;
  for (int drawn = 0; drawn < num_topk; ++drawn) {
    missed *= static_cast<double>(std::max(elsewhere - drawn, 0)) / (num_experts - drawn);
  }
  return num_nodes * (1 - missed);
}

}  // namespace ferry::plan
