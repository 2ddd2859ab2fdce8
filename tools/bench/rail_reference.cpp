// Sizes are told before, as a plan tells them; see rail_reference.hpp.
#include "bench/rail_reference.hpp"

namespace ferry::bench {

bool RailReference::exists(const Topology& topology) {
  if (topology.num_nodes() == 1) return false;
  const std::size_t size = topology.ranks_of(0).size();
  for (int node = 1; node < topology.num_nodes(); ++node) {
    if (topology.ranks_of(node).size() != size) return false;
  }
  return true;
}

RailReference::RailReference(detail::MpiJob& job, const Topology& topology)
    : job_(job), node_ranks_(topology.ranks_of(topology.node_of(job.rank()))) {
  const auto local = static_cast<std::size_t>(topology.local_index(job.rank()));
  for (int node = 0; node < topology.num_nodes(); ++node) {
    if (node == topology.node_of(job.rank())) continue;
    swaps_.push_back({.peer = topology.ranks_of(node)[local], .send = {}, .receive = {}});
  }
  in_.resize(swaps_.size());
}

void RailReference::set_bytes(std::uint64_t sent_bytes) {
  const std::uint64_t part = sent_bytes / swaps_.size();
  const auto num_ranks = static_cast<std::size_t>(job_.size());
  const std::vector<std::int64_t> own(num_ranks, static_cast<std::int64_t>(part));
  std::vector<std::int64_t> parts(num_ranks);
  job_.alltoall(own, parts);
  out_.resize(part);
  for (std::size_t i = 0; i < swaps_.size(); ++i) {
    in_[i].resize(static_cast<std::size_t>(parts[static_cast<std::size_t>(swaps_[i].peer)]));
    swaps_[i].send = out_;
    swaps_[i].receive = in_[i];
  }
}

void RailReference::run() { job_.swap_and_meet(swaps_, node_ranks_); }

}  // namespace ferry::bench
