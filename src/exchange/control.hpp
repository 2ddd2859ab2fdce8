#pragma once
// The words that ranks of a node share for one exchange: one block per rank, written by its owner
// and read by the others. Zero-filled memory is a valid start.
// Invariants:
//   1. A cell of use u is written again (for use u + kCells) only after every rank of the node has
//      raised finished_below above u, so nobody reads a cell that changes.
//   2. An entry of the poison board is written again only after every rank has read it.
//   3. Plain fields are written before, and read after, the flag that covers them.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "wire/headers.hpp"

namespace ferry::detail {

inline constexpr std::uint64_t kCells = 64;
inline constexpr std::uint64_t kBoardEntries = 8;

/// A flag on a cache line of its own.
struct alignas(64) Line {
  std::atomic<std::uint64_t> value;
};

/// What a rank shows the others for one use: where its slot is (rows to be written at dispatch,
/// outputs to be read at combine, metadata to be read while planning).
struct alignas(64) Cell {
  std::atomic<std::uint64_t> ready;  ///< use + 1 once the fields below are valid
  std::uint64_t region_key;
  std::uint64_t turn;
  std::uint64_t bytes;
  std::uint32_t plan;
  wire::OpKind kind;
};

struct PoisonEntry {
  std::uint64_t use;
  std::uint32_t plan;
  std::uint32_t origin;
  std::uint32_t code;
  std::uint32_t length;
  wire::OpKind kind;
  char text[wire::kPoisonTextBytes];
};

/// The block of one rank, seen through its address.
class ControlBlock {
 public:
  static std::uint64_t bytes(int node_size) {
    return sizeof(Fixed) + static_cast<std::uint64_t>(node_size) * sizeof(Line);
  }

  ControlBlock() = default;
  explicit ControlBlock(std::byte* base)
      : fixed_(reinterpret_cast<Fixed*>(base)),
        poisons_read_(reinterpret_cast<Line*>(base + sizeof(Fixed))) {}

  explicit operator bool() const { return fixed_ != nullptr; }
  /// Every use below this number is over on this rank: it touches nothing of them any more.
  std::atomic<std::uint64_t>& finished_below() const { return fixed_->finished_below.value; }
  /// Changes as long as the rank makes progress.
  std::atomic<std::uint64_t>& heartbeat() const { return fixed_->heartbeat.value; }
  /// Whom the rank waits for (see pack_waiting), 0 while it waits for nobody.
  std::atomic<std::uint64_t>& waiting() const { return fixed_->waiting.value; }
  std::atomic<std::uint64_t>& poison_count() const { return fixed_->poison_count.value; }
  /// Board entries of the rank with this local index that the owner of this block has read.
  std::atomic<std::uint64_t>& poisons_read(int local_rank) const {
    return poisons_read_[local_rank].value;
  }
  Cell& cell(std::uint64_t use) const { return fixed_->cells[use % kCells]; }
  PoisonEntry& entry(std::uint64_t number) const { return fixed_->board[number % kBoardEntries]; }

 private:
  struct Fixed {
    Line finished_below;
    Line heartbeat;
    Line waiting;
    Line poison_count;
    Cell cells[kCells];
    alignas(64) PoisonEntry board[kBoardEntries];
  };
  Fixed* fixed_ = nullptr;
  Line* poisons_read_ = nullptr;
};

/// What a rank waits for, in one word.
struct Waiting {
  int rank = -1;
  std::uint8_t phase = 0;
  std::uint64_t use = 0;
};
inline std::uint64_t pack_waiting(const Waiting& waiting) {
  return (static_cast<std::uint64_t>(waiting.rank + 1) << 40U) |
         (static_cast<std::uint64_t>(waiting.phase) << 32U) | (waiting.use & 0xFFFFFFFFU);
}
inline Waiting unpack_waiting(std::uint64_t word) {
  return {static_cast<int>(word >> 40U) - 1, static_cast<std::uint8_t>(word >> 32U),
          word & 0xFFFFFFFFU};
}

}  // namespace ferry::detail
