#pragma once
// The links of a cluster: how fast bytes leave a rank for another node and for its own node. Rates
// are GB/s (1e9 bytes) in one direction; links are full duplex.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace ferry::planner {

/// Who has the link between nodes to itself.
enum class LinkPer : std::uint8_t { rank, node };
std::string_view to_string(LinkPer link_per);

struct Cluster {
  std::string name;
  int ranks_per_node = 0;
  double link_gb_per_s = 0;  ///< between nodes
  LinkPer link_per = LinkPer::rank;
  double intra_node_gb_per_s = 0;  ///< per rank, to the other ranks of its node together
  std::string source;
};

std::span<const Cluster> clusters();

/// A cluster by its name in the table, or from a JSON file.
/// Errors: UsageError where it is neither a name nor a file; EnvironmentError where the file is not
///         as docs/metrics.md says
Cluster cluster_of(const std::string& name_or_file);

}  // namespace ferry::planner
