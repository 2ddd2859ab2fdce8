#pragma once
// The one clock of the bench: CLOCK_MONOTONIC, which is the same for all threads and processes of a
// machine.

#include <chrono>

namespace ferry::bench {

inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace ferry::bench
