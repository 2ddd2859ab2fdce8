#pragma once
// Wakes ranks of one node that sleep until something happens. Whoever makes something happen pays
// one look at a word per rank of the node, and a system call only when a rank sleeps for it.
//
// Protocol of a rank: arm(); poll once more at least; then sleep(what the polls looked for).
// Protocol of a ringer: publish with a sequentially consistent exchange or add; then ring.
// Either the sleeper's poll sees what was published, or the ringer sees that the rank is armed:
// both sides write first and read second. On machines where that order is weaker than on x86 a ring
// can be missed; a sleep is always bounded, so that costs time and never a hang.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/hash.hpp"

namespace ferry::detail {

class Doorbell {
 public:
  static constexpr std::uint64_t kAll = ~0ULL;

  explicit Doorbell(int num_ranks);

  /// The bits of `interest` that stand for an address (of a flag) and for messages.
  static std::uint64_t bit_of(const void* address) {
    const std::uint64_t line = reinterpret_cast<std::uintptr_t>(address) / 8;
    return 1ULL << (1 + base::mix64(line) % 63);
  }
  static constexpr std::uint64_t kMessageBit = 1;

  /// Wakes the ranks that sleep for any of `bits`.
  void ring_all(std::uint64_t bits) {
    for (int i = 0; i < num_ranks_; ++i) {
      ring(i, bits);
    }
  }
  /// Wakes one rank, by its place in the node.
  void ring(int place, std::uint64_t bits) {
    if ((interest_[place].load() & bits) != 0) {
      wake(place);
    }
  }

  /// From now on everything rings for this rank.
  void arm(int place);
  /// Sleeps until a ring for one of `bits`, or one since arm(), or the time is over; then disarmed.
  void sleep(int place, std::uint64_t bits, double seconds);
  void disarm(int place) { interest_[place].store(0, std::memory_order_relaxed); }

 private:
  struct alignas(64) Word {
    std::atomic<std::uint32_t> rings{0};  // what the rank sleeps on
    std::uint32_t seen = 0;               // its own: rings when it armed
  };

  void wake(int place);

  int num_ranks_;
  // Side by side on purpose: a ringer looks at all of them.
  std::unique_ptr<std::atomic<std::uint64_t>[]> interest_;
  std::unique_ptr<Word[]> words_;
};

}  // namespace ferry::detail
