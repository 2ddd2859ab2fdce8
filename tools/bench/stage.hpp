#pragma once
// How one rank comes to the start of a timed part, and leaves it.

#include <cstdint>

#include "bench/memory.hpp"
#include "bench/start_line.hpp"
#include "ferry/exchange.hpp"

namespace ferry::bench {

class Stage {
 public:
  Stage(Transport& transport, StartLine& line, std::uint64_t cold_bytes)
      : transport_(transport), line_(line), cooler_(cold_bytes) {}

  /// All ranks have ended what they did, caches are cold, and all start at once after this.
  void line_up() {
    drain();
    cooler_.cool();
    line_.arrive_and_wait();
  }
  /// No rank needs anything from another any more.
  void drain() { barrier(transport_); }
  /// Every rank has come here: a check must not take the core of one that is still timed.
  void wait_for_all() { line_.arrive_and_wait(); }

 private:
  Transport& transport_;
  StartLine& line_;
  CacheCooler cooler_;
};

}  // namespace ferry::bench
