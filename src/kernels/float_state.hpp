#pragma once
// The floating-point state every kernel computes in: round to nearest even, no flush-to-zero, no
// denormals-are-zero, no traps. A caller may run with other settings (-ffast-math start-up code
// turns flushing on for a whole process); bits must not depend on it, and the caller gets its own
// state back, exception flags included.

#if defined(__SSE__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace ferry::kernels::detail {

#if defined(__SSE__)

class FloatState {
 public:
  FloatState() : saved_(_mm_getcsr()) { _mm_setcsr(kKnownState); }
  ~FloatState() { _mm_setcsr(saved_); }
  FloatState(const FloatState&) = delete;
  FloatState& operator=(const FloatState&) = delete;

 private:
  static constexpr unsigned kKnownState = 0x1F80U;  // all exceptions masked, everything else 0
  unsigned saved_;
};

#else

class FloatState {
 public:
  FloatState() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatState() { std::fesetenv(&saved_); }
  FloatState(const FloatState&) = delete;
  FloatState& operator=(const FloatState&) = delete;

 private:
  std::fenv_t saved_;
};

#endif

}  // namespace ferry::kernels::detail
