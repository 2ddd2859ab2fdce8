#pragma once
// The only clock of the library.

#include <chrono>

namespace ferry::base {

/// Seconds on a clock that never goes back; differences mean something, the origin does not.
inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace ferry::base
