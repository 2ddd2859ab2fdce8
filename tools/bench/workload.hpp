#pragma once
// What the ranks exchange in one run: shape, placement and every rank's routing, from a trace or
// generated; and the rows that this routing must send, counted here from the routing alone, so that
// the library's own figures can be held against them.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bench/options.hpp"
#include "ferry/options.hpp"
#include "ferry/placement.hpp"
#include "ferry/topology.hpp"
#include "support/routing.hpp"

namespace ferry::bench {

/// The layer of a trace that is run.
struct TraceSource {
  std::string directory;
  std::string model;
  std::string domain;  ///< empty = not known
  int layer = 0;
  bool by_default = false;  ///< no flag named it: it comes with the command
};

struct Workload {
  Topology topology;
  Placement placement;
  RowShape shape;
  int num_topk = 1;
  std::vector<support::RoutingData> routing;  ///< by rank
  std::string routing_name;                   ///< "uniform", "zipf:1.0", "trace", ...
  std::optional<TraceSource> trace;           ///< nothing where the routing is generated
  Layout layout = Layout::expert_major;       ///< decides what a received row is
  std::vector<std::string> notes{};           ///< what a reader of the figures should know

  int num_ranks() const { return topology.num_ranks(); }
  std::int64_t num_tokens() const;  ///< of all ranks
  std::uint64_t row_bytes() const {
    return static_cast<std::uint64_t>(shape.hidden) * element_bytes(shape.dtype);
  }
};

/// On nodes of equal size, as the options say.
/// Errors: UsageError, EnvironmentError
Workload make_workload(const BenchOptions& options);
/// On nodes as they are. Requires: as many ranks as the options say
Workload make_workload(const BenchOptions& options, const Topology& topology);

/// Rows between nodes in one direction. [num_nodes x num_nodes], row-major (source, target).
struct NodeRows {
  int num_nodes = 0;
  std::vector<std::int64_t> values;

  std::int64_t& at(int source, int target) {
    return values[static_cast<std::size_t>(source * num_nodes + target)];
  }
  std::int64_t at(int source, int target) const {
    return values[static_cast<std::size_t>(source * num_nodes + target)];
  }
  std::int64_t total() const;
  /// Rows that enter a node.
  std::int64_t into(int node) const;
};

struct StrategyRows {
  NodeRows out;   ///< dispatch
  NodeRows back;  ///< combine; (source, target) as in dispatch, the rows travel the other way
};

struct RowCounts {
  std::vector<std::int64_t> received;    ///< expert rows of each rank
  std::vector<StrategyRows> strategies;  ///< by Strategy
  std::int64_t bound = 0;                ///< pairs (token, remote node with an expert of it)

  const StrategyRows& of(Strategy strategy) const {
    return strategies[static_cast<std::size_t>(strategy)];
  }
};
RowCounts count_rows(const Workload& workload);

/// Memory that a run needs for these ranks, which share a machine, together. `options`: what else
/// is measured.
std::uint64_t needed_bytes(const Workload& workload, const RowCounts& counts,
                           std::span<const int> ranks, const BenchOptions& options);

}  // namespace ferry::bench
