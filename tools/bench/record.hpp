#pragma once
// What one rank writes down while it runs. Ranks write only their own records; they are read after
// all ranks have ended.

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"

namespace ferry::bench {

/// Start and end of a timed part on one rank, on a clock common to all ranks of the process.
struct Interval {
  double start_s = 0;
  double end_s = 0;
};

struct RepeatTimes {
  Interval memcpy;
  Interval plan;
  Interval dispatch;
  Interval combine;
};

/// Bytes that the transport counted in one repeat.
struct CountedBytes {
  std::uint64_t metadata = 0;
  std::uint64_t dispatch = 0;
  std::uint64_t combine = 0;
  std::uint64_t control = 0;
};

/// One rank, one strategy.
struct RankRecord {
  std::vector<RepeatTimes> repeats;  ///< without the warm-up
  CountedBytes counted;              ///< of the last repeat; every repeat was checked
  PlanSummary summary;
  std::uint64_t pool_bytes = 0;
  std::uint64_t metadata_rounds = 0;  ///< per plan
};

/// What the transport is and which sizes the library filled in, the same for all ranks.
struct RunSettings {
  std::string transport;
  bool paced = false;
  std::int64_t fragment_bytes = 0;
  std::int64_t range_tokens = 0;
};

}  // namespace ferry::bench
