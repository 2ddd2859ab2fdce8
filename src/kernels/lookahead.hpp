#pragma once
// Which addresses to prefetch while a row is read. Rows lie at random places, so the hardware
// prefetcher starts anew at each of them. Every line that is read asks for the line about
// kAheadBytes further on in the order of the job, be it in this row or in a later one.

#include <cstddef>
#include <cstdint>

namespace ferry::kernels::detail {

/// Distance between reading and prefetching: enough lines to hide memory latency (4 KiB was 5 %
/// slower for sums), and still small beside a first-level cache of 32 KiB.
inline constexpr std::size_t kAheadBytes = 8192;
inline constexpr std::size_t kLineBytes = 64;

/// How many rows ahead kAheadBytes are, for rows of `row_bytes`; at least 1.
inline std::size_t rows_ahead(std::size_t row_bytes) {
  return row_bytes == 0 || row_bytes >= kAheadBytes ? 1 : kAheadBytes / row_bytes;
}

/// Its calls are always inlined: GCC takes a function that only prefetches for one without effects,
/// and drops calls of it.
class Lookahead {
 public:
  /// Offset `o` of a row looks at `near + o` below `split`, at `far + (o - split)` from there on.
  /// Either base may be null: nothing to fetch there.
  Lookahead(const std::byte* near, std::size_t split, const std::byte* far)
      : near_(near), far_(far), split_(split) {}

  [[gnu::always_inline]] void touch(std::size_t offset) const {
    if (offset < split_) {
      if (near_ != nullptr) __builtin_prefetch(near_ + offset);
    } else if (far_ != nullptr) {
      __builtin_prefetch(far_ + (offset - split_));
    }
  }

  /// The same for each line of a run that starts a line.
  [[gnu::always_inline]] void touch_lines(std::size_t offset, std::size_t bytes) const {
    for (std::size_t line = 0; line < bytes; line += kLineBytes) touch(offset + line);
  }

 private:
  const std::byte* near_;
  const std::byte* far_;
  std::size_t split_;
};

/// For a row of `row_bytes` at `row` that is read from start to end; `later` is the row that is
/// rows_ahead() further on, or null.
inline Lookahead look_past_row(const std::byte* row, std::size_t row_bytes,
                               const std::byte* later) {
  if (row_bytes <= kAheadBytes) return {nullptr, 0, later};
  return {row + kAheadBytes, row_bytes - kAheadBytes, later};
}

}  // namespace ferry::kernels::detail
