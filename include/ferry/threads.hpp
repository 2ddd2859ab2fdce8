#pragma once
// Ranks as threads of this process, on any virtual topology: no launcher, nothing to install.

#include <cstdint>
#include <functional>
#include <optional>

#include "ferry/topology.hpp"
#include "ferry/transport.hpp"

namespace ferry::threads {

struct Options {
  int nodes = 1;
  int ranks_per_node = 1;
  /// Set to use any other shape; nodes and ranks_per_node are then ignored.
  std::optional<Topology> topology{};
  /// Rate of one full-duplex link per node in bits per second, shared by its ranks: a message is
  /// delivered when such a link would have delivered it. 0 = as fast as memory.
  /// The model: no latency; bulk queues in order at the sender's and at the receiver's link;
  /// metadata and control below 2 KiB queue only behind what their own rank has in flight, but
  /// take their share of the link.
  double link_bits_per_s = 0;
};

/// Runs `body` once per rank, each on a thread of its own, and returns when all have ended.
/// Errors: the first exception of any rank is thrown again here after every rank has ended; the
///         others are freed from their waits with peer_failed and that rank's text.
void run(const Options& options, const std::function<void(Transport&)>& body);

}  // namespace ferry::threads
