#pragma once
// The least that an exchange with these bytes costs over MPI: one message of them to and from the
// rail rank on every other node, then a barrier of the node.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/topology.hpp"
#include "transport/mpi/mpi_module.hpp"

namespace ferry::bench {

class RailReference {
 public:
  /// True where every node has the same number of ranks, and there is more than one.
  static bool exists(const Topology& topology);

  RailReference(detail::MpiJob& job, const Topology& topology);
  /// From now on a run moves what this rank sends to other nodes, in equal parts. Collective.
  void set_bytes(std::uint64_t sent_bytes);
  /// Collective. Errors: peer_failed (text of MPI)
  void run();

 private:
  detail::MpiJob& job_;
  std::vector<detail::Swap> swaps_;  ///< one per other node
  std::vector<int> node_ranks_;
  std::vector<std::byte> out_;
  std::vector<std::vector<std::byte>> in_;
};

}  // namespace ferry::bench
