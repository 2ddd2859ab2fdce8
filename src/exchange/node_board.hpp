#pragma once
// What the ranks of a node tell each other about one exchange, in notices that each reads in the
// order in which they were posted.

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

  /// Shows a notice to a rank of the node; where that rank has yet to read old ones, a later flush
  /// does.
  void post(int reader, const Notice& notice, const std::optional<Error>& refusal = std::nullopt);
  void post_to_all(const Notice& notice, const std::optional<Error>& refusal = std::nullopt);
  /// True while notices for a rank wait for it to read.
  bool is_full(int reader) const { return !readers_[reader].backlog.empty(); }
  bool has_backlog() const;
  /// True when something was shown.
  bool flush();

  struct Unread {
    int local_rank = -1;
    Notice notice;
    std::optional<Error> refusal;
  };
  /// The next notice of any other rank that this one has not read.
  std::optional<Unread> peek();
  /// It was dealt with.
  void acknowledge(const Unread& unread);

  /// This rank reads no more: nobody waits for it any longer.
  void leave();
  /// A rank that reads no more has no call of this exchange left.
  bool is_gone(int local_rank);

 private:
  struct Waiting {
    Notice notice;
    std::optional<Error> refusal;
  };
  struct Reader {
    std::deque<Waiting> backlog;
    std::uint64_t texts = 0;                 ///< written so far
    std::uint64_t notice_of_text[kTexts]{};  ///< per text: notices up to the one it is of
  };
  bool has_read(int reader, std::uint64_t number);
  bool has_room(int reader, bool with_text);
  void write(int reader, const Waiting& waiting);

  Engine& engine_;
  const std::uint32_t exchange_;
  ControlBlock own_;
  std::vector<ControlBlock> peers_;
  std::vector<Reader> readers_;
};

}  // namespace ferry::detail
