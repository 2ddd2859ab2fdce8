#pragma once
// Order of stores before a flag, and the pause of a spin, by machine.

#include <atomic>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace ferry::detail {

/// Makes every earlier store of this thread visible before any later one. A release store alone
/// does not order streaming stores on x86.
inline void store_fence() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

/// Tells the core that this thread spins, so that its sibling runs faster.
inline void spin_pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace ferry::detail
