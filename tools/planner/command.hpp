#pragma once
// `ferry plan`: what each strategy would send on a cluster, and the least time its links need.

#include "planner/options.hpp"

namespace ferry::planner {

/// Adds the subcommand; its flags land in `flags`, which must outlive the parse.
CLI::App& add_command(CLI::App& app, PlanFlags& flags);

/// Runs it. The result goes to standard output, notes to standard error with --json.
/// Errors: UsageError, EnvironmentError, ferry::Error, std::bad_alloc
void run_command(const PlanFlags& flags);

}  // namespace ferry::planner
