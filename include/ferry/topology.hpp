#pragma once
// Which ranks share memory (a node), and which of those have near memory (a socket).
// Invariants: every rank is in exactly one node; ranks of a node are in ascending order.

#include <cstdint>
#include <string>
#include <vector>

namespace ferry {

class Topology {
 public:
  /// Every rank on one node.
  static Topology single_node(int num_ranks);
  /// Ranks 0..P-1 on node 0, the next P on node 1, and so on.
  static Topology uniform(int num_nodes, int ranks_per_node);
  /// Node sizes in order, for example {3, 5}: ranks 0..2 and 3..7.
  static Topology from_sizes(const std::vector<int>& ranks_per_node);
  /// node_of_rank[r] = node of rank r; socket_of_rank (empty = one socket a node) = socket in it.
  /// Errors: invalid_argument when a node is empty or a list has the wrong length.
  static Topology from_map(const std::vector<int>& node_of_rank,
                           const std::vector<int>& socket_of_rank = {});

  int num_ranks() const { return static_cast<int>(node_of_rank_.size()); }
  int num_nodes() const { return static_cast<int>(ranks_of_node_.size()); }
  int node_of(int rank) const { return node_of_rank_[rank]; }
  int socket_of(int rank) const { return socket_of_rank_[rank]; }
  /// Place of a rank among the ranks of its node.
  int local_index(int rank) const { return local_index_[rank]; }
  const std::vector<int>& ranks_of(int node) const { return ranks_of_node_[node]; }
  bool same_node(int a, int b) const { return node_of(a) == node_of(b); }

  /// The rank of `node` that stands for `source` there: the one with the same place, on the same
  /// socket where the node has ranks on it, modulo the number of candidates. On the source's own
  /// node it is the source.
  int rail_rank(int source, int node) const;
  /// The ranks of other nodes whose rail rank on node_of(rank) is `rank`, ascending.
  std::vector<int> sources_landing_at(int rank) const;

  /// For example "2 x 4" or "3 + 5".
  std::string describe() const;
  std::uint64_t hash() const;
  bool operator==(const Topology&) const = default;

 private:
  std::vector<int> node_of_rank_;
  std::vector<int> socket_of_rank_;
  std::vector<int> local_index_;
  std::vector<std::vector<int>> ranks_of_node_;
};

}  // namespace ferry
