#pragma once
// The words that ranks of a node share for one exchange: one block per rank, written by its owner
// and read by the others. Zero-filled memory is a valid start. What stands in it is told in
// notices: one ring for each other rank of the node, which reads it in order.
// Invariants:
//   1. A notice, or a text, is written again only after its reader has read the old one.
//   2. Plain fields are written before, and read after, the count that covers them.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "wire/headers.hpp"

namespace ferry::detail {

inline constexpr std::uint64_t kNotices = 64;
inline constexpr std::uint64_t kTexts = 2;
/// What a rank has read when it will never read again.
inline constexpr std::uint64_t kGone = ~0ULL;

/// A flag on a cache line of its own.
struct alignas(64) Line {
  std::atomic<std::uint64_t> value;
};

enum class NoticeKind : std::uint8_t {
  window,   ///< where the slot of a call is: rows to be written, outputs or metadata to be read
  refusal,  ///< a call was refused; its text follows
  left,     ///< this rank touches nothing of a failed plan any more, and starts nothing on it
};

/// Which of a call's windows.
enum class WindowRole : std::uint8_t {
  main,     ///< the rows that it brings or takes, or its metadata
  outputs,  ///< outputs that it reads beside the rows that it brings
};
inline constexpr std::size_t kWindowRoles = 2;

/// What a rank tells the others of its node about one call.
struct alignas(64) Notice {
  wire::CallId call;
  // Of a window.
  std::uint64_t region_key = 0;
  std::uint64_t turn = 0;
  std::uint64_t bytes = 0;
  NoticeKind kind = NoticeKind::window;
  WindowRole role = WindowRole::main;
  std::uint32_t text = 0;  ///< of a refusal: where its text stands
};

struct RefusalText {
  std::uint32_t code;
  std::uint32_t length;
  char text[wire::kPoisonTextBytes];
};

/// Notices for one reader.
struct NoticeRing {
  Line count;
  Notice notices[kNotices];
  alignas(64) RefusalText texts[kTexts];
};

/// The block of one rank, seen through its address.
class ControlBlock {
 public:
  static std::uint64_t bytes(int node_size) {
    return sizeof(Fixed) +
           static_cast<std::uint64_t>(node_size) * (sizeof(NoticeRing) + sizeof(Line));
  }

  ControlBlock() = default;
  ControlBlock(std::byte* base, int node_size)
      : fixed_(reinterpret_cast<Fixed*>(base)),
        rings_(reinterpret_cast<NoticeRing*>(base + sizeof(Fixed))),
        notices_read_(reinterpret_cast<Line*>(rings_ + node_size)) {}

  explicit operator bool() const { return fixed_ != nullptr; }
  /// Changes as long as the rank makes progress.
  std::atomic<std::uint64_t>& heartbeat() const { return fixed_->heartbeat.value; }
  /// Whom the rank waits for (see pack_waiting), 0 while it waits for nobody.
  std::atomic<std::uint64_t>& waiting() const { return fixed_->waiting.value; }
  /// Notices for the rank with this local index.
  NoticeRing& ring(int reader) const { return rings_[reader]; }
  /// Notices of the rank with this local index that the owner of this block has read.
  std::atomic<std::uint64_t>& notices_read(int local_rank) const {
    return notices_read_[local_rank].value;
  }

 private:
  struct Fixed {
    Line heartbeat;
    Line waiting;
  };
  Fixed* fixed_ = nullptr;
  NoticeRing* rings_ = nullptr;
  Line* notices_read_ = nullptr;
};

/// What a rank waits for, in one word.
struct Waiting {
  int rank = -1;
  std::uint8_t phase = 0;
};
inline std::uint64_t pack_waiting(const Waiting& waiting) {
  return (static_cast<std::uint64_t>(waiting.rank + 1) << 8U) | waiting.phase;
}
inline Waiting unpack_waiting(std::uint64_t word) {
  return {static_cast<int>(word >> 8U) - 1, static_cast<std::uint8_t>(word)};
}

}  // namespace ferry::detail
