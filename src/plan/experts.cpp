// ExpertIndex: every look-up a plan makes per entry is one array access; all arrays are made here.

#include "plan/experts.hpp"

#include <fmt/format.h>

#include <cstddef>

#include "ferry/error.hpp"

namespace ferry::plan {
namespace {

/// A membership stores columns in 16 bits.
constexpr std::size_t kMaxColumns = 1 << 16;

void check_placement(const Topology& topology, const Placement& placement) {
  if (placement.num_experts() == 0) {
    throw Error(ErrorCode::invalid_argument,
                "placement: it has no expert; allowed: at least 1; fix: make it with "
                "Placement::contiguous or Placement::from_map");
  }
  for (int expert = 0; expert < placement.num_experts(); ++expert) {
    const std::vector<int>& ranks = placement.ranks_of(expert);
    for (const int rank : ranks) {
      if (rank < topology.num_ranks()) continue;
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("placement: expert {} is on rank {}; allowed: 0..{}, because the "
                              "topology {} has {} ranks; fix: place it on one of them",
                              expert, rank, topology.num_ranks() - 1, topology.describe(),
                              topology.num_ranks()));
    }
    if (ranks.size() == 1) continue;
    throw Error(ErrorCode::unsupported,
                fmt::format("placement: expert {} has {} copies; allowed: 1, because there is no "
                            "rule yet that selects a copy; fix: keep one rank per expert",
                            expert, ranks.size()));
  }
}

}  // namespace

ExpertIndex::ExpertIndex(const Topology& topology, const Placement& placement) {
  check_placement(topology, placement);
  const auto num_experts = static_cast<std::size_t>(placement.num_experts());
  rank_of_.resize(num_experts);
  node_of_.resize(num_experts);
  column_of_.resize(num_experts);
  first_column_.resize(static_cast<std::size_t>(topology.num_ranks()));
  experts_of_rank_.resize(static_cast<std::size_t>(topology.num_ranks()));
  experts_of_node_.resize(static_cast<std::size_t>(topology.num_nodes()));

  for (std::size_t expert = 0; expert < num_experts; ++expert) {
    const int rank = placement.rank_of(static_cast<int>(expert));
    rank_of_[expert] = rank;
    node_of_[expert] = topology.node_of(rank);
    experts_of_rank_[static_cast<std::size_t>(rank)].push_back(static_cast<int>(expert));
  }
  for (int node = 0; node < topology.num_nodes(); ++node) {
    std::vector<int>& columns = experts_of_node_[static_cast<std::size_t>(node)];
    for (const int rank : topology.ranks_of(node)) {
      first_column_[static_cast<std::size_t>(rank)] = static_cast<int>(columns.size());
      for (const int expert : experts_of_rank(rank)) {
        column_of_[static_cast<std::size_t>(expert)] = static_cast<int>(columns.size());
        columns.push_back(expert);
      }
    }
    if (columns.size() <= kMaxColumns) continue;
    throw Error(ErrorCode::unsupported,
                fmt::format("placement: node {} holds {} experts; allowed: at most {}; fix: spread "
                            "them over more nodes",
                            node, columns.size(), kMaxColumns));
  }
}

}  // namespace ferry::plan
