#pragma once
// The plan of one rank: plain data that says which rows it sends, lands, pushes and sums. Computed
// by pure functions; the executor runs it, and whoever prices, replays or draws a plan reads the
// same structure. Token and item numbers are 32 bit (a rank has fewer than 2^32 tokens times
// top-k); rows and bytes are 64 bit.

#include <cstdint>
#include <span>
#include <vector>

#include "plan/experts.hpp"
#include "plan/membership.hpp"
#include "plan/strategies.hpp"

namespace ferry::plan {

/// One place where a row goes at dispatch and whose expert output comes back at combine.
struct Target {
  std::uint32_t local_rank = 0;  ///< place of the rank in its node
  float weight = 0;
  std::uint64_t row = 0;  ///< row in that rank's window

  bool operator==(const Target&) const = default;
};

/// Rows that cross between a source rank and the rank they land on, in one direction: ascending
/// (token, slot). Items are cut at the source's token ranges: items [range_begin[i],
/// range_begin[i+1]) have tokens in range i. Both ends hold the same lane.
struct Lane {
  int peer = -1;                              ///< the rank at the other end
  std::vector<std::uint32_t> tokens;          ///< token of each item
  std::vector<std::uint32_t> range_begin{0};  ///< one per range of the source, plus one
  /// Targets [target_begin[i], target_begin[i+1]) of item i, in tree order (ranks ascending, slots
  /// ascending). The source end knows how many there are, not where.
  std::vector<std::uint32_t> target_begin;
  std::vector<Target> targets;
  /// At the source end of a lane whose unit is token_expert: the weight of each item, which the
  /// source applies. Else empty.
  std::vector<float> weights;

  std::size_t num_items() const { return tokens.size(); }
  std::size_t num_ranges() const { return range_begin.size() - 1; }
  bool operator==(const Lane&) const = default;
};

/// The lanes of both directions. `combine` is empty where it equals `dispatch` (every strategy but
/// node_gather, whose tokens without an expert on the node do not come back).
struct LanePair {
  Lane dispatch;
  std::vector<Lane> combine;
  /// FP32 numbers that go back with or for the rows, such as gradients of routing weights: only
  /// peer and range_begin are set. Items are numbers, so many for each target of back(), in order.
  Lane values;

  const Lane& back() const { return combine.empty() ? dispatch : combine.front(); }
  bool operator==(const LanePair&) const = default;
};

struct RankPlan {
  int rank = -1;
  Strategy strategy = Strategy::flat;
  std::uint64_t num_tokens = 0;
  std::uint64_t range_tokens = 1;

  /// Own tokens whose experts are on this node: targets [home_begin[t], home_begin[t+1]) of token
  /// t, slots ascending. num_tokens + 1 values.
  std::vector<std::uint32_t> home_begin{0};
  std::vector<Target> home_targets;

  std::vector<LanePair> outgoing;  ///< to each rank my tokens land on, ascending (node, rank)
  std::vector<LanePair> landing;   ///< from each rank whose tokens land here, ascending rank

  /// Rows in this rank's window.
  std::vector<std::int64_t> expert_counts;   ///< per local expert, ascending id
  std::vector<std::int64_t> expert_offsets;  ///< first row of each, aligned; the end after the last
  /// rows_from[i] = rows that the i-th rank of this node writes into my window at dispatch.
  std::vector<std::uint64_t> rows_from;
  /// rows_to[i] = rows that I write into the window of the i-th rank of this node.
  std::vector<std::uint64_t> rows_to;

  std::int64_t num_rows() const { return expert_offsets.empty() ? 0 : expert_offsets.back(); }
  std::uint64_t num_ranges() const { return (num_tokens + range_tokens - 1) / range_tokens; }
  bool operator==(const RankPlan&) const = default;
};
/// Bytes that it holds, used or not.
std::uint64_t memory_bytes(const RankPlan& plan);

/// Everything a plan depends on besides the routing; the same on all ranks. For token_major rows
/// `experts` has one expert per rank, and memberships are grouped by rank.
struct PlanContext {
  const Topology& topology;
  const ExpertIndex& experts;
  Strategy strategy = Strategy::flat;
  std::uint64_t range_tokens = 1;
  std::uint64_t row_alignment = 1;  ///< each expert's rows start at a multiple of this
  /// Numbers that may go back for each target: one per weight that it has, 0 where none has a
  /// gradient.
  std::uint32_t values_per_target = 1;
};

/// Row counts of one node: value (source, column) = rows of that source for that column.
/// [num_ranks x num_columns(node)], row-major.
struct ColumnCounts {
  int num_columns = 0;
  std::vector<std::uint32_t> values;

  std::uint32_t at(int source, int column) const {
    return values[static_cast<std::size_t>(source) * num_columns + column];
  }
};

/// True when `rank` must know the membership of `source` for its node to make its plan: it is the
/// source, or tokens of the source may land on it.
bool needs_membership(const PlanContext& context, int rank, int source, const ColumnCounts& counts);

/// The plan of one rank.
/// Requires: own = the rank's memberships for every node (split_by_node); of_sources[s] = the
///           membership of rank s for this rank's node, or null where !needs_membership; counts =
///           those of this rank's node.
/// Ensures:  a row's place is a pure function of the routing: expert, source rank, token. Linear in
///           the entries of `own` and of the needed memberships.
RankPlan make_rank_plan(const PlanContext& context, int rank, std::span<const Membership> own,
                        std::span<const Membership* const> of_sources, const ColumnCounts& counts);

/// What a rank knows of the routing, as make_rank_plan requires it.
struct KnownRouting {
  std::span<const Membership> own;
  std::span<const Membership* const> of_sources;
  const ColumnCounts& counts;
};
/// The same over an earlier plan of any rank and kind, whose memory is used again.
void make_rank_plan(const PlanContext& context, int rank, const KnownRouting& routing,
                    RankPlan& plan);

/// The lanes on which a rank sends: part of its plan that needs nothing of other ranks.
std::vector<LanePair> make_outgoing(const PlanContext& context, int rank,
                                    std::span<const Membership> own);

/// The same for a strategy that sends every token to every node, before routing is known: the
/// dispatch direction only.
std::vector<LanePair> make_gather_lanes(const PlanContext& context, int rank,
                                        std::uint64_t num_tokens);

/// The plans of all ranks from the routing of all ranks (index = rank): what the ranks would make
/// together. For tests, pricing and simulation.
std::vector<RankPlan> make_all_plans(const PlanContext& context, std::span<const Routing> routing);

}  // namespace ferry::plan
