// Copies a run of bytes to several targets at once, once per SIMD target (hence no #pragma once).
// Whole cache lines of a target are written with streaming stores, which need no read of the line
// before the write: on two cores of a small machine that alone is 1.5 times as fast as memcpy. The
// part of a line at either end is written with plain stores, so nothing outside is touched.
#if defined(FERRY_KERNELS_COPY_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_KERNELS_COPY_INL_HPP_
#undef FERRY_KERNELS_COPY_INL_HPP_
#else
#define FERRY_KERNELS_COPY_INL_HPP_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "hwy/highway.h"
#include "kernels/lookahead.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// `bytes` bytes at `source` go to `offset` of every target.
struct CopyRun {
  const std::byte* source = nullptr;
  std::size_t bytes = 0;
  std::size_t offset = 0;
};

HWY_INLINE std::size_t line_offset(const std::byte* address) {
  return reinterpret_cast<std::uintptr_t>(address) % detail::kLineBytes;
}

HWY_INLINE bool same_line_offset(std::span<std::byte* const> targets) {
  for (const std::byte* target : targets) {
    if (line_offset(target) != line_offset(targets.front())) return false;
  }
  return true;
}

/// Targets that are written side by side; so many that their addresses stay in registers.
inline constexpr std::size_t kMostTargets = 8;

/// Streams whole lines to `kTargets` targets, line by line to all of them: the source is read once.
template <std::size_t kTargets>
void stream_lines(const CopyRun& run, std::byte* const* targets, const detail::Lookahead& ahead) {
  const hn::CappedTag<std::uint8_t, detail::kLineBytes> d;
  const std::size_t vector_bytes = hn::Lanes(d);
  const detail::Lookahead look = ahead;  // a copy, as are the addresses: the stores may not alias
  std::uint8_t* to[kTargets];
  for (std::size_t k = 0; k < kTargets; ++k) to[k] = reinterpret_cast<std::uint8_t*>(targets[k]);
  const auto* from = reinterpret_cast<const std::uint8_t*>(run.source);
  const std::size_t end = run.offset + run.bytes;
  for (std::size_t at = run.offset; at < end; at += detail::kLineBytes) {
    look.touch(at - run.offset);
    if (vector_bytes == detail::kLineBytes) {
      const auto line = hn::LoadU(d, from);
      for (std::size_t k = 0; k < kTargets; ++k) hn::Stream(line, d, to[k] + at);
    } else {
      for (std::size_t k = 0; k < kTargets; ++k) {
        for (std::size_t part = 0; part < detail::kLineBytes; part += vector_bytes) {
          hn::Stream(hn::LoadU(d, from + part), d, to[k] + at + part);
        }
      }
    }
    from += detail::kLineBytes;
  }
}

using StreamFunction = void (*)(const CopyRun&, std::byte* const*, const detail::Lookahead&);
inline constexpr StreamFunction kStreamLines[kMostTargets] = {
    stream_lines<1>, stream_lines<2>, stream_lines<3>, stream_lines<4>,
    stream_lines<5>, stream_lines<6>, stream_lines<7>, stream_lines<8>};

/// Copies to targets that all have the same place in their cache line.
HWY_INLINE void stream_to_all(const CopyRun& run, std::span<std::byte* const> targets,
                              const detail::Lookahead& ahead) {
  const std::size_t misplaced = line_offset(targets.front() + run.offset);
  const std::size_t head = misplaced == 0 ? 0 : std::min(run.bytes, detail::kLineBytes - misplaced);
  const std::size_t body = (run.bytes - head) / detail::kLineBytes * detail::kLineBytes;
  const std::size_t tail = run.bytes - head - body;
  if (body != 0) {
    const detail::Lookahead nothing(nullptr, 0, nullptr);
    for (std::size_t k = 0; k < targets.size(); k += kMostTargets) {
      const std::size_t streams = std::min(kMostTargets, targets.size() - k);
      kStreamLines[streams - 1]({run.source + head, body, run.offset + head}, &targets[k],
                                k == 0 ? ahead : nothing);
    }
  }
  if (tail != 0) ahead.touch(head + body);
  if (head + tail == 0) return;
  for (std::byte* target : targets) {
    std::byte* to = target + run.offset;
    std::memcpy(to, run.source, head);
    std::memcpy(to + head + body, run.source + head + body, tail);
  }
}

/// Copies to any targets; where their places in a cache line differ, one target after the other.
HWY_NOINLINE inline void copy_to_all(const CopyRun& run, std::span<std::byte* const> targets,
                                     const detail::Lookahead& ahead) {
  if (targets.empty()) return;
  if (same_line_offset(targets)) {
    stream_to_all(run, targets, ahead);
    return;
  }
  const detail::Lookahead nothing(nullptr, 0, nullptr);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    stream_to_all(run, targets.subspan(i, 1), i == 0 ? ahead : nothing);
  }
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
