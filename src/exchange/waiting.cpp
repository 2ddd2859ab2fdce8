// Who waits for whom: ranks of a node show it in node memory, so that an error names the rank at
// the end of the chain and not an innocent one in between.

#include <fmt/format.h>

#include "base/hash.hpp"
#include "exchange/engine.hpp"

namespace ferry::detail {

void Engine::show_waiting(const Operation* operation) {
  std::uint64_t word = 0;
  if (operation != nullptr) {
    const WaitTarget target = operation->waits_for();
    word = pack_waiting({.rank = target.rank, .phase = static_cast<std::uint8_t>(target.phase)});
  }
  world_->board->own().waiting().store(word, std::memory_order_relaxed);
}

// A rank of this node shows its heartbeat; one of another node is alive while messages come.
std::uint64_t Engine::life_sign(const WaitTarget& target) {
  if (target.rank < 0) return 0;
  const std::uint64_t who = base::mix64(static_cast<std::uint64_t>(target.rank) * 64 +
                                        static_cast<std::uint64_t>(target.phase));
  const Topology& topology = transport_.topology();
  if (!topology.same_node(target.rank, rank())) return who + network_.arrivals_from(target.rank);
  ControlBlock* const control = world_->board->of(topology.local_index(target.rank));
  if (control == nullptr) return who;
  return who + control->heartbeat().load(std::memory_order_relaxed);
}

std::string Engine::describe_wait(const Operation& operation, double waited_s) {
  const Topology& topology = transport_.topology();
  const WaitTarget target = operation.waits_for();
  std::string chain;
  int rank_at_end = target.rank;
  Phase phase = target.phase;
  for (std::size_t hops = 0; hops < node_ranks_.size(); ++hops) {
    if (rank_at_end < 0 || !topology.same_node(rank_at_end, rank())) break;
    ControlBlock* const control = world_->board->of(topology.local_index(rank_at_end));
    if (control == nullptr) break;
    const Waiting next = unpack_waiting(control->waiting().load(std::memory_order_relaxed));
    if (next.rank < 0 || next.rank == rank()) break;
    chain += fmt::format("; rank {} itself waits for rank {}", rank_at_end, next.rank);
    rank_at_end = next.rank;
    phase = static_cast<Phase>(next.phase);
  }
  if (rank_at_end < 0) {
    return fmt::format("{} made no progress for {:.3g} s; fix: please report it",
                       operation.describe(), waited_s);
  }
  const std::string host = transport_.host_of(rank_at_end);
  return fmt::format(
      "{} waited {:.3g} s for rank {} on node {}{} ({}), which gave no sign of life{}; fix: see "
      "what rank {} does instead, or raise deadline_s if it may compute that long",
      operation.describe(), waited_s, rank_at_end, topology.node_of(rank_at_end),
      host.empty() ? "" : fmt::format(", host {}", host), to_string(phase), chain, rank_at_end);
}

}  // namespace ferry::detail
