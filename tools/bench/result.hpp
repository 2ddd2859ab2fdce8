#pragma once
// What a run found out, one result per strategy, all ranks together. docs/metrics.md defines every
// figure.

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "bench/rank_bench.hpp"
#include "bench/record.hpp"

namespace ferry::bench {

/// Of the timed repeats, in microseconds.
struct Spread {
  double median = 0;
  double p10 = 0;
  double p90 = 0;
};

/// Linear between the two nearest samples. Requires: at least one sample
Spread spread_of(std::vector<double> samples);

/// A whole step, per repeat.
struct StepResult {
  Spread us;
  double metadata_rounds = 0;
  double host_stalls = 0;  ///< of the rank that had most
  double stall_us = 0;     ///< of the rank that stood longest
};

struct BackwardResult {
  Spread combine_backward_us;
  Spread dispatch_backward_us;
  /// With gradients of weights, in the operation that has them in this weight mode.
  std::optional<Spread> combine_backward_weights_us;
  std::optional<Spread> dispatch_backward_weights_us;
  StepResult step;
  std::optional<StepResult> step_no_reuse;

  double rows_us() const { return combine_backward_us.median + dispatch_backward_us.median; }
  double weights_us() const {
    return combine_backward_weights_us.value_or(combine_backward_us).median +
           dispatch_backward_weights_us.value_or(dispatch_backward_us).median;
  }
};

struct StrategyResult {
  Strategy strategy = Strategy::flat;
  Spread plan_us;
  Spread dispatch_us;
  Spread combine_us;
  Spread plan_and_dispatch_us;
  Spread memcpy_us;
  std::optional<Spread> rail_message_us;   ///< of --baseline rail_message
  std::optional<BackwardResult> backward;  ///< of --backward
  std::uint64_t logical_bytes_dispatch = 0;
  std::uint64_t inter_node_rows_dispatch = 0;
  std::uint64_t inter_node_rows_combine = 0;
  CountedBytes counted;
  std::uint64_t bound_bytes_dispatch = 0;
  std::uint64_t bound_bytes_combine = 0;
  std::uint64_t metadata_rounds = 0;
  IndexRecord indices;
  std::uint64_t window_bytes = 0;
  std::uint64_t pool_bytes = 0;
  std::uint64_t peak_bytes = 0;
  /// Share of the time in which the fullest link direction was busy; 0 when its rate is not known.
  double link_utilisation_dispatch = 0;
  double link_utilisation_combine = 0;

  /// Of dispatch and combine together.
  double link_utilisation() const {
    return (link_utilisation_dispatch * dispatch_us.median +
            link_utilisation_combine * combine_us.median) /
           (dispatch_us.median + combine_us.median);
  }
  /// NaN where nothing was received, so that there is nothing to compare.
  double dispatch_vs_memcpy() const { return vs_memcpy(dispatch_us); }
  double combine_vs_memcpy() const { return vs_memcpy(combine_us); }
  /// Plan, dispatch and combine, medians.
  double total_us() const { return plan_us.median + dispatch_us.median + combine_us.median; }
  /// The same with plan and dispatch in one call.
  double total_in_two_us() const { return plan_and_dispatch_us.median + combine_us.median; }

 private:
  double vs_memcpy(const Spread& time) const {
    return logical_bytes_dispatch > 0 ? memcpy_us.median / time.median
                                      : std::numeric_limits<double>::quiet_NaN();
  }
};

/// MPI_Alltoallv with one kind of rows, in the same run.
struct BaselineResult {
  BaselineRows rows = BaselineRows::per_expert;
  Spread counts_us;
  Spread dispatch_us;
  Spread combine_us;
  std::uint64_t peak_bytes = 0;

  double total_us() const { return counts_us.median + dispatch_us.median + combine_us.median; }
  /// How many times as fast a strategy is: whole, whole with plan and dispatch in one call, and
  /// without counts and plan.
  double speedup(const StrategyResult& ours) const { return total_us() / ours.total_us(); }
  double speedup_in_two(const StrategyResult& ours) const {
    return total_us() / ours.total_in_two_us();
  }
  double speedup_on_replay(const StrategyResult& ours) const {
    return (dispatch_us.median + combine_us.median) /
           (ours.dispatch_us.median + ours.combine_us.median);
  }
};

struct RunResult {
  std::vector<StrategyResult> strategies;
  std::vector<BaselineResult> baselines;  ///< empty when not asked for
};

/// Adds up what the ranks recorded.
/// Errors: VerificationError when the library's rows are not those of the routing
RunResult summarise(const RunContext& context);

}  // namespace ferry::bench
