#pragma once
// `ferry bench` where a launcher started this process as one rank: every process measures its own
// rank, rank 0 tells the result, and a failure is told once and ends all ranks with one code.

#include "bench/options.hpp"

namespace ferry::bench {

/// Errors: ToldFailure on every rank, once rank 0 has told why; ferry::Error where the job could
///         not be started
void run_in_job(const BenchOptions& options);

}  // namespace ferry::bench
