#pragma once
// All ranks in one thread, one step at a time, in an order drawn from a seed: messages of different
// peers are delayed and overtake each other, sends complete early or late, ranks are held back. A
// step that would block ends the test, because wait_until refuses. For tests.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ferry/transport.hpp"

namespace ferry::stepped {

struct Options {
  Topology topology = Topology::single_node(1);
  std::uint64_t seed = 1;
  /// Longest delay of a message, in calls of World::step.
  int max_delay_steps = 40;
  /// Fragment size that the transports state as preferred.
  std::uint64_t fragment_bytes = 1024;
  /// Payload memory is closed (PROT_NONE) but inside kernels and while a PayloadOpen lives.
  bool close_payload = false;
};

/// The ranks' transports and the network between them.
class World {
 public:
  explicit World(const Options& options);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  Transport& transport(int rank);
  const Topology& topology() const;
  /// Time goes on by one step: messages and send completions that are due become visible.
  void step();
  /// Steps so far.
  std::uint64_t now() const;
  /// A number from the world's seeded generator, below `bound`; the test's schedule uses it too.
  std::uint64_t draw(std::uint64_t bound);
  /// Flips one bit of the next payload message from `source` to `target` after it was sent.
  void corrupt_next(int source, int target);
  /// Treats memory of the test as payload. Requires: whole pages, close_payload
  void add_payload(std::span<std::byte> memory);

 private:
  friend class PayloadOpen;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Opens payload memory to the test.
class PayloadOpen {
 public:
  explicit PayloadOpen(World& world);
  ~PayloadOpen();
  PayloadOpen(const PayloadOpen&) = delete;
  PayloadOpen& operator=(const PayloadOpen&) = delete;

 private:
  World& world_;
};

}  // namespace ferry::stepped
