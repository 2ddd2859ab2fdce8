#pragma once
// `ferry bench`: measures every strategy on a routing trace or on generated routing, and verifies
// what it measures.

#include "bench/options.hpp"
#include "common/failures.hpp"

namespace ferry::bench {

/// Adds the subcommand; its flags land in `flags`, which must outlive the parse.
CLI::App& add_command(CLI::App& app, BenchFlags& flags);

/// Runs it. The result goes to standard output, progress and notes to standard error.
/// Errors: UsageError, EnvironmentError, VerificationError, ferry::Error, std::bad_alloc
void run_command(const BenchFlags& flags);

}  // namespace ferry::bench
