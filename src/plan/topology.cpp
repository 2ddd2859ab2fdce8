// Topology: built from one map rank -> node (and socket), everything else is derived from it once.

#include "ferry/topology.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>

#include "base/hash.hpp"
#include "ferry/error.hpp"

namespace ferry {
namespace {

/// Far above any machine; keeps a mistyped size from becoming an allocation of many GB.
constexpr std::int64_t kMaxRanks = 1 << 20;

[[noreturn]] void refuse_topology(const std::string& text) {
  throw Error(ErrorCode::invalid_argument, "topology: " + text);
}

void check_num_ranks(std::int64_t num_ranks) {
  if (num_ranks >= 1 && num_ranks <= kMaxRanks) return;
  refuse_topology(fmt::format("{} ranks; allowed: 1..{}; fix: give every node at least one rank",
                              num_ranks, kMaxRanks));
}

void check_map(const std::vector<int>& node_of_rank, const std::vector<int>& socket_of_rank) {
  const auto num_ranks = static_cast<std::int64_t>(node_of_rank.size());
  check_num_ranks(num_ranks);
  if (!socket_of_rank.empty() && socket_of_rank.size() != node_of_rank.size()) {
    refuse_topology(
        fmt::format("socket_of_rank has {} entries; allowed: none, or {}, because node_of_rank "
                    "has {}; fix: name the socket of every rank",
                    socket_of_rank.size(), num_ranks, num_ranks));
  }
  for (std::size_t rank = 0; rank < node_of_rank.size(); ++rank) {
    // Without an empty node there are at most as many nodes as ranks.
    if (node_of_rank[rank] < 0 || node_of_rank[rank] >= num_ranks) {
      refuse_topology(
          fmt::format("node_of_rank[{}] = {}; allowed: 0..{}, because {} ranks can be on at most "
                      "{} nodes; fix: number the nodes 0, 1, 2, ... without a gap",
                      rank, node_of_rank[rank], num_ranks - 1, num_ranks, num_ranks));
    }
    if (!socket_of_rank.empty() && socket_of_rank[rank] < 0) {
      refuse_topology(
          fmt::format("socket_of_rank[{}] = {}; allowed: 0 and above; fix: number the sockets of "
                      "a node from 0",
                      rank, socket_of_rank[rank]));
    }
  }
}

/// Those of `ranks` that are on `socket`.
struct SocketRanks {
  int count = 0;
  int place = 0;  ///< how many of them are below the given rank
};
SocketRanks socket_ranks(const std::vector<int>& ranks, const std::vector<int>& sockets, int socket,
                         int rank) {
  SocketRanks found;
  for (const int other : ranks) {
    if (sockets[static_cast<std::size_t>(other)] != socket) continue;
    if (other < rank) ++found.place;
    ++found.count;
  }
  return found;
}

}  // namespace

Topology Topology::single_node(int num_ranks) { return uniform(1, num_ranks); }

Topology Topology::uniform(int num_nodes, int ranks_per_node) {
  if (num_nodes < 1 || ranks_per_node < 1) {
    refuse_topology(
        fmt::format("{} nodes x {} ranks; allowed: at least 1 of each; fix: give both sizes",
                    num_nodes, ranks_per_node));
  }
  check_num_ranks(static_cast<std::int64_t>(num_nodes) * ranks_per_node);
  return from_sizes(std::vector<int>(static_cast<std::size_t>(num_nodes), ranks_per_node));
}

Topology Topology::from_sizes(const std::vector<int>& ranks_per_node) {
  std::int64_t num_ranks = 0;
  for (std::size_t node = 0; node < ranks_per_node.size(); ++node) {
    if (ranks_per_node[node] < 1) {
      refuse_topology(
          fmt::format("node {} has {} ranks; allowed: at least 1; fix: leave the node out", node,
                      ranks_per_node[node]));
    }
    num_ranks += ranks_per_node[node];
  }
  check_num_ranks(num_ranks);
  std::vector<int> node_of_rank;
  node_of_rank.reserve(static_cast<std::size_t>(num_ranks));
  for (std::size_t node = 0; node < ranks_per_node.size(); ++node) {
    node_of_rank.insert(node_of_rank.end(), static_cast<std::size_t>(ranks_per_node[node]),
                        static_cast<int>(node));
  }
  return from_map(node_of_rank);
}

Topology Topology::from_map(const std::vector<int>& node_of_rank,
                            const std::vector<int>& socket_of_rank) {
  check_map(node_of_rank, socket_of_rank);
  Topology made;
  made.node_of_rank_ = node_of_rank;
  made.socket_of_rank_ =
      socket_of_rank.empty() ? std::vector<int>(node_of_rank.size(), 0) : socket_of_rank;
  const int num_nodes = *std::max_element(node_of_rank.begin(), node_of_rank.end()) + 1;
  made.ranks_of_node_.resize(static_cast<std::size_t>(num_nodes));
  made.local_index_.reserve(node_of_rank.size());
  for (std::size_t rank = 0; rank < node_of_rank.size(); ++rank) {
    auto& ranks = made.ranks_of_node_[static_cast<std::size_t>(node_of_rank[rank])];
    made.local_index_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(rank));
  }
  for (int node = 0; node < num_nodes; ++node) {
    if (!made.ranks_of(node).empty()) continue;
    refuse_topology(
        fmt::format("node {} has no rank, but node {} has; allowed: nodes 0..{} with at least one "
                    "rank each; fix: number the nodes without a gap",
                    node, num_nodes - 1, num_nodes - 1));
  }
  return made;
}

int Topology::rail_rank(int source, int node) const {
  if (node_of(source) == node) return source;
  const std::vector<int>& candidates = ranks_of(node);
  const int socket = socket_of(source);
  const int on_socket = socket_ranks(candidates, socket_of_rank_, socket, source).count;
  if (on_socket == 0) {
    const auto place = static_cast<std::size_t>(local_index(source));
    return candidates[place % candidates.size()];
  }
  // The place among the ranks of the socket, not of the node: with interleaved sockets (0 1 0 1)
  // the place in the node would send both ranks of a socket to the same candidate.
  int place =
      socket_ranks(ranks_of(node_of(source)), socket_of_rank_, socket, source).place % on_socket;
  for (const int rank : candidates) {
    if (socket_of(rank) != socket) continue;
    if (place == 0) return rank;
    --place;
  }
  return candidates.front();
}

std::vector<int> Topology::sources_landing_at(int rank) const {
  std::vector<int> sources;
  const int node = node_of(rank);
  for (int source = 0; source < num_ranks(); ++source) {
    if (node_of(source) != node && rail_rank(source, node) == rank) sources.push_back(source);
  }
  return sources;
}

std::string Topology::describe() const {
  std::vector<std::size_t> sizes;
  for (const auto& ranks : ranks_of_node_) sizes.push_back(ranks.size());
  const bool equal = std::all_of(sizes.begin(), sizes.end(),
                                 [&](std::size_t size) { return size == sizes.front(); });
  if (equal && !sizes.empty()) return fmt::format("{} x {}", sizes.size(), sizes.front());
  return fmt::format("{}", fmt::join(sizes, " + "));
}

std::uint64_t Topology::hash() const {
  std::uint64_t hash = base::mix64(node_of_rank_.size());
  for (std::size_t rank = 0; rank < node_of_rank_.size(); ++rank) {
    hash = base::combine_hash(hash, static_cast<std::uint64_t>(node_of_rank_[rank]));
    hash = base::combine_hash(hash, static_cast<std::uint64_t>(socket_of_rank_[rank]));
  }
  return hash;
}

}  // namespace ferry
