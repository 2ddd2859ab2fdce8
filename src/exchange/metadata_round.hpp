#pragma once
// One round of metadata: every rank has one message for every node. Messages for other nodes go to
// this rank's rail ranks there; what a rank received, and its own message for its own node, it
// shows to the ranks of its node in one slot. When all of them have done so, each reads the
// messages of all ranks in node memory. So N - 1 messages per rank, and one barrier inside a node.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "exchange/operation.hpp"
#include "exchange/peer_windows.hpp"
#include "exchange/slots.hpp"

namespace ferry::detail {

class MetadataRound {
 public:
  /// Looks at a message before it is shown, and gives bytes to show beside it, or an error.
  struct Note {
    std::vector<std::byte> bytes;
    std::optional<Error> error;
  };
  /// The header was checked: it is of this call and source, and fits the body.
  using Annotate =
      std::function<Note(const wire::MetadataHeader& header, std::span<const std::byte> body)>;

  /// messages[n] = this rank's message for node n.
  /// Errors: limit_exceeded
  MetadataRound(Engine& engine, std::vector<std::vector<std::byte>> messages, Annotate annotate);

  /// Moves on; refuses the operation where a message is not as it must be.
  bool step(Operation& operation);
  /// Everybody's messages can be read, and this rank's were taken.
  bool complete(const Operation& operation) const {
    return windows_.complete() && operation.sends_in_flight == 0;
  }
  WaitTarget waits_for(const Operation& operation) const;

  /// Requires: complete()
  std::span<const std::byte> message_of(int source) const { return entries_[source].message; }
  std::span<const std::byte> note_of(int source) const { return entries_[source].note; }
  /// Bytes this rank sent to other nodes.
  std::uint64_t sent_bytes() const { return sent_bytes_; }
  /// This rank reads no more; its slot stays until the whole node says so.
  void finish(Operation& operation);

 private:
  struct Entry {
    std::span<const std::byte> message;
    std::span<const std::byte> note;
  };
  struct Received {
    int source;
    std::vector<std::byte> message;
    std::vector<std::byte> note;
  };
  bool send_messages(Operation& operation);
  bool collect(Operation& operation);
  bool take(Operation& operation, int source, std::vector<std::byte> message);
  Note check(Operation& operation, int source, std::span<const std::byte> message) const;
  bool show(Operation& operation);
  void read_window(std::span<const std::byte> window);

  Engine& engine_;
  std::vector<std::vector<std::byte>> messages_;
  Annotate annotate_;
  std::vector<int> sources_;  ///< whose messages come to this rank
  std::vector<Received> received_;
  std::unique_ptr<SlotLease> lease_;
  std::uint64_t window_bytes_ = 0;
  bool sent_ = false;
  bool shown_ = false;
  const std::vector<std::uint64_t> one_each_;  ///< every rank of the node reads every window
  PeerWindows windows_;
  std::vector<Entry> entries_;
  std::uint64_t sent_bytes_ = 0;
};

}  // namespace ferry::detail
