#pragma once
// The windows of the ranks of this node for one call: where this rank writes rows at dispatch, and
// reads outputs at combine.

#include <cstdint>
#include <span>
#include <vector>

#include "exchange/operation.hpp"
#include "exchange/slots.hpp"

namespace ferry::detail {

class PeerWindows {
 public:
  /// rows[i] = rows this rank writes to, or reads from, the window of the i-th rank of the node.
  explicit PeerWindows(const std::vector<std::uint64_t>& rows, WindowRole role = WindowRole::main);

  /// Looks for windows not seen yet. True when there was a new one.
  bool resolve(Operation& operation);
  bool complete() const { return missing_ == 0; }
  /// A rank whose window is needed and not there; -1 if none.
  int missing_rank(const Operation& operation) const;
  /// Rows of a window. Requires: complete() and rows[local_rank] > 0
  std::byte* data(std::uint32_t local_rank) const { return windows_[local_rank].data; }
  /// All that its owner shows. Requires: as data()
  std::span<const std::byte> bytes(std::uint32_t local_rank) const {
    return {windows_[local_rank].data, windows_[local_rank].bytes};
  }

  enum class Flag : std::uint8_t { written, released };
  /// Tells the owners of the windows that were found that this rank has written, or read,
  /// everything.
  void raise(Operation& operation, Flag flag);

 private:
  struct Window {
    bool needed = false;
    std::byte* base = nullptr;
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t turn = 0;
  };
  std::vector<Window> windows_;
  SlotLayout layout_;
  WindowRole role_;
  int missing_ = 0;
};

}  // namespace ferry::detail
