#pragma once
// What one strategy sends, by the library's own plans, and the least time in which the cluster's
// links can carry it. A bound: no latency, no contention, no time of kernels or of planning, and
// both kinds of links at full rate at the same time.

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "ferry/options.hpp"
#include "plan/experts.hpp"
#include "plan/membership.hpp"
#include "plan/rank_plan.hpp"
#include "plan/traffic.hpp"
#include "planner/scenario.hpp"

namespace ferry::planner {

/// Payload of one message between nodes, header included: just below the eager limit of common MPI
/// settings.
inline constexpr std::uint64_t kFragmentBytes = 61440;

/// What crosses one kind of link in one call.
struct Flow {
  std::uint64_t rows = 0;         ///< of all ranks together
  std::uint64_t bytes = 0;        ///< of all ranks together, fragment headers included
  double mean_bytes = 0;          ///< that a rank sends
  std::uint64_t worst_bytes = 0;  ///< the most that one rank sends, or that one receives
  int worst_rank = 0;
  double bound_us = 0;  ///< of the fullest link
};

/// Dispatch or combine: both kinds of links work at the same time, so the slower one is the bound.
struct CallEstimate {
  Flow inter_node;
  Flow intra_node;

  double bound_us() const { return std::max(inter_node.bound_us, intra_node.bound_us); }
  bool limited_inside() const { return intra_node.bound_us > inter_node.bound_us; }
};

struct StrategyEstimate {
  Strategy strategy = Strategy::flat;
  CallEstimate dispatch;
  CallEstimate combine;
  /// What `intra_node` would be, either way, if a row went once to each rank of a node and not once
  /// to each expert (layout token_major; DeepEP does so). Of flat, whose rows are per expert, the
  /// same as intra_node.
  Flow intra_node_token_major;
  /// Mean rows per rank of pairs (token, node that holds one of its experts), the home node
  /// included: what DeepEP calls logical.
  double logical_rows_per_rank = 0;
};

enum class Call : std::uint8_t { dispatch, combine };
inline const CallEstimate& call_of(const StrategyEstimate& estimate, Call call) {
  return call == Call::dispatch ? estimate.dispatch : estimate.combine;
}

/// GB/s per rank that a call of this duration amounts to when the home node's share counts, too.
/// NaN where nothing moves.
double logical_gb_per_s(const Scenario& scenario, const StrategyEstimate& estimate, Call call,
                        double us);

/// Plans all ranks of a scenario in this process, one rank at a time and without payload.
class Estimator {
 public:
  /// Errors: ferry::Error (invalid_argument) where the library would refuse the routing
  explicit Estimator(const Scenario& scenario);

  StrategyEstimate estimate(Strategy strategy) const;
  std::uint64_t range_tokens() const { return range_tokens_; }

 private:
  struct RankBytes;
  RankBytes bytes_of(const plan::RankPlan& plan) const;
  void count_token_major(const plan::RankPlan& plan, RankBytes& rank) const;
  void receive_token_major(std::vector<RankBytes>& ranks) const;
  Flow sum_up(const std::vector<RankBytes>& ranks, int kind) const;

  const Scenario& scenario_;
  plan::ExpertIndex experts_;
  plan::Framing dispatch_framing_;
  plan::Framing combine_framing_;
  std::uint64_t row_bytes_ = 0;  ///< inside a node
  std::uint64_t range_tokens_ = 0;
  std::vector<std::vector<plan::Membership>> of_ranks_;  ///< [rank][node]
  std::vector<plan::ColumnCounts> of_nodes_;
};

}  // namespace ferry::planner
