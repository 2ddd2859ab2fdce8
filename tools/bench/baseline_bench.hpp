#pragma once
// One rank's part of measuring a baseline: as RankBench does for the exchange, with the same rows,
// the same oracle and the same start of every timed part.

#include <cstdint>
#include <memory>
#include <string>

#include "bench/alltoallv.hpp"
#include "bench/options.hpp"
#include "bench/record.hpp"
#include "bench/stage.hpp"
#include "bench/workload.hpp"

namespace ferry::bench {

/// Buffers of a rank that the exchange and its baselines use in turn.
struct TokenBuffers {
  Matrix x;
  Matrix out;
};

class BaselineBench {
 public:
  struct Setting {
    const BenchOptions& options;
    const Workload& workload;
    detail::MpiJob& job;
    Stage& stage;
    TokenBuffers tokens;
  };
  BaselineBench(BaselineRows which, const Setting& setting);
  /// Repeat -1 is the warm-up; `seed` is that of the rows.
  /// Errors: VerificationError, peer_failed
  void run_once(int repeat, std::uint64_t seed);
  const BaselineRecord& record() const { return record_; }

 private:
  [[noreturn]] void fail(int repeat, const std::string& text) const;
  void run_experts();

  const BaselineRows which_;
  Setting setting_;
  std::unique_ptr<Alltoallv> baseline_;
  BaselineRecord record_;
};

/// "repeat 3", or "warm-up" for -1.
std::string name_of_repeat(int repeat);

}  // namespace ferry::bench
