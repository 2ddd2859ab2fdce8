#pragma once
// What is planned: a model, a cluster, and the routing of every rank, from a trace or generated.

#include <string>
#include <vector>

#include "ferry/placement.hpp"
#include "ferry/topology.hpp"
#include "planner/clusters.hpp"
#include "planner/models.hpp"
#include "planner/options.hpp"
#include "support/routing.hpp"

namespace ferry::planner {

struct Scenario {
  Model model;
  Cluster cluster;
  Topology topology;
  Placement placement;
  WireFormat wire_dispatch = WireFormat::bf16;
  WireFormat wire_combine = WireFormat::bf16;
  /// Of gradients, which are shown, but not planned.
  WireFormat wire_combine_backward = WireFormat::bf16;
  WireFormat wire_dispatch_backward = WireFormat::bf16;
  std::int64_t wire_block_columns = kDefaultBlockColumns;
  std::vector<support::RoutingData> routing;  ///< by rank
  std::string routing_name;                   ///< "group:8,4", ..., or "trace"
  bool as_model_routes = false;               ///< generated with the model's own pattern
  std::vector<std::string> notes;

  int num_ranks() const { return topology.num_ranks(); }
  std::int64_t num_tokens() const;  ///< of all ranks
};

/// Errors: UsageError, EnvironmentError
Scenario make_scenario(const PlanOptions& options);

}  // namespace ferry::planner
