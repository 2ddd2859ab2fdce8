#pragma once
// Ranks as threads of this process, on any virtual topology: no launcher, nothing to install.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ferry/topology.hpp"
#include "ferry/transport.hpp"

namespace ferry::detail {
struct ThreadsWorld;
}

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

/// The ranks of run() for a host that makes its threads itself, such as an interpreter.
class World {
 public:
  /// Errors: invalid_argument (options)
  explicit World(const Options& options);
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  ~World();

  const Topology& topology() const;
  /// The transport of a rank, for the thread that calls it. It may outlive the world.
  /// Errors: invalid_argument: no such rank, or one that was taken before
  std::unique_ptr<Transport> join(int rank);
  /// Ends the job: every wait of every rank, in sub-groups too, fails with peer_failed and the
  /// first such text. Any thread may call it.
  void abort(const std::string& text);

 private:
  // Shared with the transports, which may be the last to go.
  std::shared_ptr<detail::ThreadsWorld> world_;
};

}  // namespace ferry::threads
