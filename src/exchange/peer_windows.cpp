// Windows of the node for one call: see peer_windows.hpp.

#include "exchange/peer_windows.hpp"

#include "exchange/engine.hpp"

namespace ferry::detail {

PeerWindows::PeerWindows(const std::vector<std::uint64_t>& rows, WindowRole role)
    : windows_(rows.size()), layout_{.node_size = static_cast<int>(rows.size())}, role_(role) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    windows_[i].needed = rows[i] > 0;
    missing_ += windows_[i].needed ? 1 : 0;
  }
}

bool PeerWindows::resolve(Operation& operation) {
  if (missing_ == 0) return false;
  Engine& engine = operation.exchange().engine;
  const int before = missing_;
  for (int local = 0; local < static_cast<int>(windows_.size()); ++local) {
    Window& window = windows_[local];
    if (!window.needed || window.base != nullptr) continue;
    const ShownWindow* const shown = engine.find_window(operation, role_, local);
    if (shown == nullptr) continue;
    window.base = engine.map(engine.node_ranks()[local], shown->region_key);
    if (window.base == nullptr) continue;
    window.data = window.base + layout_.data_offset();
    window.bytes = shown->bytes;
    window.turn = shown->turn;
    --missing_;
  }
  return missing_ != before;
}

int PeerWindows::missing_rank(const Operation& operation) const {
  for (std::size_t i = 0; i < windows_.size(); ++i) {
    if (windows_[i].needed && windows_[i].base == nullptr) {
      return operation.exchange().engine.node_ranks()[i];
    }
  }
  return -1;
}

void PeerWindows::raise(Operation& operation, Flag flag) {
  Engine& engine = operation.exchange().engine;
  for (const Window& window : windows_) {
    if (window.base == nullptr) continue;
    Line& line = flag == Flag::written ? layout_.written(window.base, engine.local_index())
                                       : layout_.released(window.base, engine.local_index());
    engine.transport().raise_flag(line.value, window.turn);
  }
}

}  // namespace ferry::detail
