#pragma once
// The flags of `ferry plan`: their text forms, and what they mean.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/flags.hpp"
#include "common/generator.hpp"
#include "planner/clusters.hpp"

namespace CLI {
class App;  // CLI/CLI.hpp takes seconds to compile; few files need all of it
}

namespace ferry::planner {

/// The flags as CLI11 fills them.
struct PlanFlags {
  std::string model;  ///< empty = what the trace says
  std::string cluster;
  int num_nodes = 2;
  std::optional<int> ranks_per_node;
  std::string tokens;
  std::string trace_directory;
  int layer = 0;
  std::string routing;  ///< empty = as the model routes
  std::string wire;
  std::uint64_t seed = 1;
  bool json = false;
};

struct PlanOptions {
  std::string model;
  Cluster cluster;
  int num_nodes = 2;
  int ranks_per_node = 8;
  std::vector<std::int64_t> tokens;  ///< one for all ranks, or one per rank; empty = default
  std::string trace_directory;       ///< empty = generated routing
  int layer = 0;
  std::optional<tools::RoutingPattern> pattern;  ///< unset = as the model routes
  tools::WireFormats wire;
  std::uint64_t seed = 1;

  int num_ranks() const { return num_nodes * ranks_per_node; }
};

/// Adds the flags to the subcommand; `flags` must live until it has been parsed.
void add_plan_flags(CLI::App& command, PlanFlags& flags);

/// Errors: UsageError, EnvironmentError (of a cluster file)
PlanOptions parse_plan_flags(const PlanFlags& flags);

}  // namespace ferry::planner
