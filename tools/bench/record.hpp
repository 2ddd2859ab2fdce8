#pragma once
// What one rank writes down while it runs. Ranks write only their own records; they are read after
// all ranks have ended. Of a job's ranks they then travel as bytes (job_ranks.hpp), so a field that
// is added here is added there.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"

namespace ferry::bench {

/// Start and end of a timed part on one rank, on the clock of its machine.
struct Interval {
  double start_s = 0;
  double end_s = 0;
};

struct RepeatTimes {
  Interval memcpy{};
  Interval plan{};
  Interval dispatch{};
  Interval combine{};
  Interval plan_and_dispatch{};
  Interval rail_message{};  ///< of --baseline rail_message
  // Of --backward
  Interval combine_backward{};  ///< without gradients of weights
  Interval dispatch_backward{};
  Interval combine_backward_weights{};   ///< with them, where the weights are at combine
  Interval dispatch_backward_weights{};  ///< where they are at the expert
  Interval step{};                       ///< plan and all four operations, one after the other
  Interval step_no_reuse{};              ///< the same with a plan before each of the four
};

/// Bytes that the transport counted in one repeat.
struct CountedBytes {
  /// What rows took beyond their plain size, where that depends on their values; mod 2^64.
  struct Beyond {
    std::uint64_t dispatch = 0;
    std::uint64_t combine = 0;
    std::uint64_t combine_backward = 0;
    std::uint64_t dispatch_backward = 0;
  };
  Beyond beyond{};
  std::uint64_t metadata = 0;
  std::uint64_t dispatch = 0;
  std::uint64_t combine = 0;
  std::uint64_t control = 0;
  std::uint64_t combine_backward = 0;
  std::uint64_t dispatch_backward = 0;
  std::uint64_t grad_weights = 0;  ///< more than those two, with gradients of weights
};

/// What one step cost the host, all repeats together.
struct StepStalls {
  std::uint64_t metadata_rounds = 0;
  std::uint64_t host_stalls = 0;
  double stall_us = 0;
};

/// Memory of a rank's exchange.
struct MemoryBytes {
  std::uint64_t pool = 0;     ///< windows of expert rows and of outputs, metadata of the node
  std::uint64_t staging = 0;  ///< fragments to and from other nodes
  std::uint64_t plan = 0;     ///< what a plan keeps on the heap

  std::uint64_t all() const { return pool + staging + plan; }
};

/// How the lists in the metadata of a plan were written, and what they could have taken. All
/// messages to other nodes together.
struct IndexRecord {
  std::array<std::uint64_t, kListEncodings.size()> tokens{};  ///< messages, by encoding of the list
  std::array<std::uint64_t, kListEncodings.size()> experts{};
  std::uint64_t bytes = 0;
  std::uint64_t best_bytes = 0;
  double entropy_bytes = 0;

  void add(const IndexRecord& other);
};

/// One rank, one strategy.
struct RankRecord {
  std::vector<RepeatTimes> repeats;  ///< without the warm-up
  CountedBytes counted;              ///< of the last repeat; every repeat was checked
  PlanSummary summary;
  MemoryBytes memory;
  std::uint64_t metadata_rounds = 0;  ///< per plan
  IndexRecord indices;                ///< of the last repeat
  StepStalls step;
  StepStalls step_no_reuse;
};

struct BaselineTimes {
  Interval counts;
  Interval dispatch;
  Interval combine;
};

/// One rank, one baseline.
struct BaselineRecord {
  std::vector<BaselineTimes> repeats;  ///< without the warm-up
  std::uint64_t buffer_bytes = 0;
};

/// Everything of one rank.
struct RankRecords {
  std::vector<RankRecord> strategies;     ///< as in BenchOptions::strategies
  std::vector<BaselineRecord> baselines;  ///< as in kBaselines; empty when not asked for
};

/// What the transport is and which sizes the library filled in, the same for all ranks.
struct RunSettings {
  std::string transport{};
  bool paced = false;
  std::int64_t fragment_bytes = 0;
  std::int64_t range_tokens = 0;
  std::string mpi{};      ///< library and version; empty: ranks are threads
  bool one_clock = true;  ///< ranks read the same clock
  /// Rate of a node's link in one direction: what the run was paced to, or what a lab says; 0 = not
  /// known. `burst_bytes` pass it at no cost.
  double link_bits_per_s = 0;
  std::uint64_t burst_bytes = 0;
};

}  // namespace ferry::bench
