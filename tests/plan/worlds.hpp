#pragma once
// Random worlds for property tests: a topology, a placement and the routing of every rank.

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/placement.hpp"
#include "ferry/routing.hpp"
#include "ferry/topology.hpp"

namespace ferry::test {

/// Plain lists, so that the oracle needs nothing of the library.
struct World {
  std::vector<int> node_of_rank;
  std::vector<int> socket_of_rank;  ///< empty = one socket per node
  std::vector<int> rank_of_expert;
  int num_topk = 1;
  std::vector<std::vector<std::int64_t>> topk_idx;  ///< per rank [num_tokens x num_topk]
  std::vector<std::vector<float>> topk_weights;     ///< per rank the same shape

  int num_ranks() const { return static_cast<int>(node_of_rank.size()); }
  int num_tokens(int rank) const {
    return static_cast<int>(topk_idx[static_cast<std::size_t>(rank)].size()) / num_topk;
  }
  Topology topology() const { return Topology::from_map(node_of_rank, socket_of_rank); }
  Placement placement() const { return Placement::from_map(rank_of_expert); }
  std::vector<Routing> routing() const;
  std::string describe() const;
};

/// A world that depends on the seed alone; every kind comes up within a hundred seeds.
World random_world(std::uint64_t seed);

/// Routing of one rank, uniform over experts without repetition inside a token.
/// Ids [num_tokens x num_topk]; the seed is made different for every rank by the caller.
struct UniformRouting {
  int num_tokens = 0;
  int num_topk = 1;
  int num_experts = 1;
  int num_groups = 1;        ///< equal blocks of experts
  int groups_per_token = 1;  ///< groups that a token may choose from
};
std::vector<std::int64_t> uniform_ids(const UniformRouting& routing, std::uint64_t seed);

}  // namespace ferry::test
