#pragma once
// What one rank has been sent and not yet taken, and the memory it has given for it. Only the
// receiving rank touches an Inbox; the messages in it are shared with their senders.
//
// Invariants: a lane is FIFO, so a message that is not visible yet holds back those behind it.
//             Bytes are copied once, from the message to the receiver's memory, in take().
// Times are whatever the transport counts: seconds, or steps.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ferry/transport.hpp"

namespace ferry::detail {

enum class MessageState : std::uint8_t {
  waiting,    ///< nobody has touched the bytes yet
  copying,    ///< the receiver reads them
  taken,      ///< the receiver is done with them
  withdrawn,  ///< the sender went away first: the receiver drops the message
};

/// One message on its way.
struct Message {
  int source = -1;
  MessageKind kind = MessageKind::payload;
  std::span<const std::byte> bytes;  ///< the sender's memory, or `copy`
  std::vector<std::byte> copy;
  bool borrowed = true;                      ///< `bytes` is the sender's memory
  double visible_at = 0;                     ///< the receiver sees it from then on
  double sent_at = 0;                        ///< sent() is false before
  std::optional<std::uint64_t> flipped_bit;  ///< damage done on the way
  std::atomic<MessageState> state{MessageState::waiting};

  /// Puts the sender's bytes into `copy`, so that they need not outlive the call.
  void keep_copy() {
    copy.assign(bytes.begin(), bytes.end());
    bytes = copy;
    borrowed = false;
  }
};

// Shared by the sender's table of tickets and the receiver's inbox: either may go first.
using MessagePtr = std::shared_ptr<Message>;

class Inbox {
 public:
  explicit Inbox(const Topology& topology) : lanes_(topology.num_ranks()) {}

  void arrive(MessagePtr message);
  void post(int source, std::span<std::byte> buffer);
  /// The posted buffers of a source that nothing filled yet; they are the caller's again.
  std::vector<std::span<std::byte>> withdraw(int source);
  std::optional<Received> take(double now);
  std::optional<Incoming> probe(double now);
  /// Errors: invalid_argument when the message is unknown or the buffer too small.
  void accept(const Incoming& incoming, std::span<std::byte> buffer);

  /// True when nothing can come out of take() or probe(), at any time, without new messages.
  bool empty() const { return num_payload_ == 0 && num_others_ == 0 && accepted_.empty(); }
  /// The time when the next message that has memory, or needs none, becomes visible; 0 = none.
  double next_visible_at() const;

 private:
  struct Lane {
    std::deque<MessagePtr> payload;
    std::deque<MessagePtr> others;
    std::deque<std::span<std::byte>> posted;
  };

  Lane& lane_of(int source);
  std::optional<Received> take_from(Lane& lane, double now);

  std::vector<Lane> lanes_;  // by source
  std::size_t num_payload_ = 0;
  std::size_t num_others_ = 0;
  // Lane to look at first: after a hit the next one, so that no source starves the others.
  std::size_t first_payload_ = 0;
  std::size_t first_other_ = 0;
  std::uint64_t next_id_ = 1;
  std::unordered_map<std::uint64_t, MessagePtr> probed_;
  std::deque<std::pair<MessagePtr, std::span<std::byte>>> accepted_;
};

}  // namespace ferry::detail
