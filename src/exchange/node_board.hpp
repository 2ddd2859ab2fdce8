#pragma once
// What the ranks of a node tell each other about one exchange: each posts notices that all others
// read in order.

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "exchange/control.hpp"
#include "ferry/error.hpp"

namespace ferry::detail {

class Engine;

class NodeBoard {
 public:
  NodeBoard(Engine& engine, std::uint32_t exchange);

  ControlBlock& own() { return own_; }
  /// Control block of a rank of this node; null while that rank has not made the exchange.
  ControlBlock* of(int local_rank);

  /// Shows a notice; where a rank has yet to read old ones, a later flush does. Order is kept.
  void post(const Notice& notice, const std::optional<Error>& refusal = std::nullopt);
  /// True when something was shown.
  bool flush();

  struct Unread {
    int local_rank = -1;
    Notice notice;
    std::optional<Error> refusal;
  };
  /// The next notice of any other rank that this one has not read.
  std::optional<Unread> read();

 private:
  struct Waiting {
    Notice notice;
    std::optional<Error> refusal;
  };
  bool has_room(bool with_text);
  bool all_have_read(std::uint64_t number);
  void write(const Waiting& waiting);

  Engine& engine_;
  const std::uint32_t exchange_;
  ControlBlock own_;
  std::vector<ControlBlock> peers_;
  std::deque<Waiting> backlog_;
  std::uint64_t texts_ = 0;                          ///< written so far
  std::array<std::uint64_t, kTexts> last_notice_{};  ///< per text: notices up to the one it is of
};

}  // namespace ferry::detail
