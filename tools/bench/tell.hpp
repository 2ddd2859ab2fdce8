#pragma once
// What goes to standard output and standard error, and when.

#include "bench/rank_bench.hpp"
#include "bench/result.hpp"
#include "common/failures.hpp"

namespace ferry::bench {

/// The result on standard output, notes beside JSON on standard error.
void tell(const RunContext& context, const RunResult& result);
/// Ends the progress line; with --json, a failed verification has an object of its own.
/// `context` may be null: nothing was run.
void tell_failed(const RunContext* context, const tools::Failure& failure);

}  // namespace ferry::bench
