#pragma once
// One rank's part of a bench: for every repeat and strategy fresh rows, the memcpy reference, then
// plan, dispatch and combine, each timed from a common start and checked against the oracle.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bench/backward_bench.hpp"
#include "bench/baseline_bench.hpp"
#include "bench/memory.hpp"
#include "bench/options.hpp"
#include "bench/rail_reference.hpp"
#include "bench/record.hpp"
#include "bench/stage.hpp"
#include "bench/start_line.hpp"
#include "bench/workload.hpp"
#include "ferry/exchange.hpp"
#include "support/reference.hpp"

namespace ferry::bench {

/// What the ranks of this process share. While they run, only `line` changes, each rank writes its
/// own records, and the first rank of this process the settings.
struct RunContext {
  const BenchOptions& options;
  const Workload& workload;
  const RowCounts& counts;
  std::unique_ptr<StartLine> line;
  /// By rank. Those of other processes come when all have ended.
  std::vector<RankRecords> ranks;
  RunSettings settings;
  detail::MpiJob* job = nullptr;  ///< null: ranks are threads
  int ranks_of_machine = 1;       ///< that share its caches
};

/// The formats that rows cross in: as asked for, else the dtype.
inline WireFormat wire_dispatch(const BenchOptions& options) {
  return *options.wire.filled_in(options.dtype).dispatch;
}
inline WireFormat wire_combine(const BenchOptions& options) {
  return *options.wire.filled_in(options.dtype).combine;
}
inline WireFormat wire_combine_backward(const BenchOptions& options) {
  return *options.wire.filled_in(options.dtype).combine_backward;
}
inline WireFormat wire_dispatch_backward(const BenchOptions& options) {
  return *options.wire.filled_in(options.dtype).dispatch_backward;
}
inline float max_relative_error(const BenchOptions& options) {
  return static_cast<float>(options.wire.filled_in(options.dtype).max_relative_error);
}

/// CountedBytes::beyond of one call: what it used, less rows of the plain size.
inline std::uint64_t bytes_beyond(const WireUse& before, const WireUse& after,
                                  std::uint64_t row_bytes) {
  return after.payload_bytes - before.payload_bytes - (after.rows - before.rows) * row_bytes;
}
/// The plain size of a row.
inline std::uint64_t plain_row_bytes(const BenchOptions& options, const Exchange& exchange,
                                     WireFormat format) {
  return wire_row_bytes(format, exchange.shape().hidden, options.wire.block_columns);
}

class RankBench {
 public:
  RankBench(RunContext& context, Transport& transport);
  /// Runs the repeat that does not count and all others.
  /// Errors: VerificationError, StartLineBroken, whatever the library throws
  void run();

 private:
  void run_once(std::size_t strategy, int repeat);
  // Checks take seconds, after which nothing of what is timed is where an address translation finds
  // it soon. A training step comes back earlier, so each timed call follows the same one untimed.
  Plan run_plan(std::size_t strategy, RepeatTimes& times);
  void run_plan_and_dispatch(std::size_t strategy, RepeatTimes& times);
  ExpertRows run_dispatch(std::size_t strategy, const Plan& plan, RepeatTimes& times);
  void run_combine(std::size_t strategy, const ExpertRows& rows, RepeatTimes& times);
  void run_backward(std::size_t strategy, const ExpertRows& rows, RepeatTimes& times);
  /// What was sent besides rows and plans since `before`, with a barrier that is left out.
  void count_control(const TrafficCounters& before);
  void check(std::size_t strategy, const Plan& plan, const ExpertRows& rows);
  void run_baselines(int repeat);
  void run_rail_reference(RepeatTimes& times);
  /// Bytes on the heap of this process, where this rank is the one that counts them; else 0.
  std::uint64_t heap_bytes() const;
  void note_settings();
  void check_bytes(std::size_t strategy, const PlanSummary& summary);
  IndexRecord measure_indices(std::size_t strategy, const Plan& plan) const;
  [[noreturn]] void fail(std::size_t strategy, const std::string& text);
  void show_progress(std::size_t strategy, int repeat) const;

  RunContext& context_;
  Transport& transport_;
  const int rank_;
  const Routing routing_;
  HugeBuffer x_memory_;
  HugeBuffer out_memory_;
  Matrix x_;
  Matrix out_;
  Stage stage_;
  MemcpyReference reference_copy_;
  std::vector<Exchange> exchanges_;
  std::vector<BaselineBench> baselines_;
  std::optional<RailReference> rail_reference_;
  std::optional<BackwardBench> backward_;
  // Of the repeat that runs.
  int repeat_ = -1;
  support::Reference oracle_;
  CountedBytes counted_;
  std::uint64_t metadata_rounds_ = 0;
  std::uint64_t plan_heap_bytes_ = 0;
  std::uint64_t control_bytes_per_barrier_ = 0;
};

}  // namespace ferry::bench
