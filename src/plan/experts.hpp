#pragma once
// Placement seen through a topology: which node and rank an expert is on, and its column there.

#include <cstdint>
#include <vector>

#include "ferry/placement.hpp"
#include "ferry/topology.hpp"

namespace ferry::plan {

/// Columns of a node are its experts by (rank, expert id), both ascending: the order of rows in the
/// windows of its ranks, one rank after the other.
class ExpertIndex {
 public:
  /// Errors: invalid_argument when a rank of the placement is not in the topology, unsupported for
  ///         replicas (no rule yet which copy a token goes to).
  ExpertIndex(const Topology& topology, const Placement& placement);

  int num_experts() const { return static_cast<int>(rank_of_.size()); }
  int rank_of(int expert) const { return rank_of_[expert]; }
  int node_of(int expert) const { return node_of_[expert]; }
  /// Column of the expert on its node.
  int column_of(int expert) const { return column_of_[expert]; }
  int num_columns(int node) const { return static_cast<int>(experts_of_node_[node].size()); }
  /// Expert of each column of a node.
  const std::vector<int>& experts_of_node(int node) const { return experts_of_node_[node]; }
  /// Experts of a rank, ascending.
  const std::vector<int>& experts_of_rank(int rank) const { return experts_of_rank_[rank]; }
  /// First column of a rank on its node; its columns are consecutive.
  int first_column(int rank) const { return first_column_[rank]; }

 private:
  std::vector<int> rank_of_;
  std::vector<int> node_of_;
  std::vector<int> column_of_;
  std::vector<int> first_column_;
  std::vector<std::vector<int>> experts_of_node_;
  std::vector<std::vector<int>> experts_of_rank_;
};

}  // namespace ferry::plan
