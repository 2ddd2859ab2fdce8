#pragma once
// The way back on one rank: combine_backward and dispatch_backward, each timed from a common start
// and checked against their oracle, with and without gradients of weights; and whole steps, with
// one round of metadata and with one before each operation.

#include <optional>
#include <string>
#include <vector>

#include "bench/memory.hpp"
#include "bench/options.hpp"
#include "bench/record.hpp"
#include "bench/stage.hpp"
#include "ferry/exchange.hpp"
#include "support/backward_reference.hpp"

namespace ferry::bench {

class BackwardBench {
 public:
  struct Setting {
    const BenchOptions& options;
    Transport& transport;
    Stage& stage;
    const Routing& routing;
  };
  /// What a repeat has done so far.
  struct Repeat {
    Exchange& exchange;
    const ExpertRows& rows;
    const support::Reference& oracle;
    ConstMatrix x;
    int number = 0;  ///< -1 = warm-up, which is not counted
  };

  BackwardBench(const Setting& setting, const RowShape& shape);
  /// The first fault, or nothing. `record` gets the stalls of steps.
  std::optional<std::string> run(const Repeat& repeat, RepeatTimes& times, CountedBytes& counted,
                                 RankRecord& record);

 private:
  using Fault = std::optional<std::string>;

  Fault run_combine_backward(const Repeat& repeat, bool with_weights, Interval& time);
  Fault run_dispatch_backward(const Repeat& repeat, bool with_weights, Interval& time);
  Fault check_bytes(const PlanSummary& planned, const CountedBytes& counted) const;
  /// `plans`: one before each operation in place of one in all.
  void run_step(const Repeat& repeat, bool plans, Interval& time, StepStalls& stalls);
  bool weights_at(WeightMode mode) const { return setting_.options.weights == mode; }
  Matrix matrix(const HugeBuffer& memory) const;
  /// Payload bytes since the last call.
  std::uint64_t payload_bytes();

  const Setting setting_;
  const RowShape shape_;
  HugeBuffer grad_out_memory_;
  HugeBuffer grad_x_memory_;
  std::vector<float> grad_weights_;
  std::optional<support::BackwardReference> reference_;
  std::vector<float> row_weights_;
  std::optional<OutputRows> y_;
  std::optional<GradRows> grad_y_;
  std::uint64_t payload_before_ = 0;
  WireStatistics sent_before_{};
};

}  // namespace ferry::bench
