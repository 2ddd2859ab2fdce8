#pragma once
// Messages of one rank: sends that are under way, receives that are posted, grants that wait for a
// ride. Knows peers and bytes, not exchanges.
// Invariants:
//   1. posted >= owed for every peer: a fragment that a peer has credit for finds memory.
//   2. Memory of a send stays untouched until the transport says that it was sent.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "exchange/blocks.hpp"
#include "ferry/exchange.hpp"
#include "ferry/transport.hpp"
#include "wire/headers.hpp"

namespace ferry::detail {

class Operation;

/// A message that has arrived: a fragment in a block, anything else in `bytes`.
struct Arrival {
  int source = -1;
  MessageKind kind = MessageKind::payload;
  Block block;
  std::uint64_t fragment_bytes = 0;
  bool truncated = false;  ///< the fragment was longer than its block, and is lost
  std::vector<std::byte> bytes;
};

/// When a grant leaves if no fragment to its receiver takes it along.
enum class GrantUrgency : std::uint8_t {
  now,   ///< the peer needs it to go on
  idle,  ///< when this rank has nothing better to do
};

class Network {
 public:
  Network(Transport& transport, const TransportLimits& limits);
  /// Keeps, for the rest of the process, memory that the transport may still send from.
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // Sending
  bool may_send_fragment(int target) const;
  std::uint64_t block_bytes() const { return blocks_.block_bytes(); }
  /// The most memory that fragments have taken so far: being sent, expected, staged or spare.
  std::uint64_t staging_bytes() const { return blocks_.most_bytes(); }
  Block take_block() { return blocks_.take(); }
  /// Sends `payload_bytes` that stand behind the header's place in `block`, with a grant if one
  /// waits. `operation` counts it until it is sent.
  void send_fragment(int target, wire::FragmentHeader header, Block block,
                     const std::shared_ptr<Operation>& operation);
  /// `operation`, if any, counts the message until it is sent.
  void send(int target, MessageKind kind, std::vector<std::byte> bytes,
            const std::shared_ptr<Operation>& operation = nullptr);
  /// Takes back memory of finished sends. True when there were any.
  bool collect_sent();
  /// The transport has not taken all that was sent.
  bool is_sending() const { return !fragments_.empty() || !messages_.empty(); }
  /// Tells ranks of other nodes that this one lives, though it has nothing to send.
  void show_life();
  void queue_grant(int target, const wire::Grant& grant, GrantUrgency urgency);
  /// Sends grants that nothing took along: the urgent ones, or all.
  void flush_grants(bool all);

  // Receiving
  /// The peer may send this many more fragments.
  void expect(int source, std::uint32_t fragments);
  /// Posts again what a message took that nobody expected.
  void replenish(int source) { post_missing(source); }
  /// This many expected fragments have come, or never will.
  void settle(int source, std::uint32_t fragments);
  /// Fragments may have this size from now on.
  void grow_blocks(std::uint64_t bytes);
  std::optional<Arrival> poll();
  /// Messages that came from a rank so far: its signs of life.
  std::uint64_t arrivals_from(int source) const { return peers_[source].arrivals; }

 private:
  struct FragmentInFlight {
    std::uint64_t ticket;
    int target;
    Block block;
    // Shared with the engine; kept so that its count of sends stays valid.
    std::shared_ptr<Operation> operation;
  };
  struct MessageInFlight {
    std::uint64_t ticket;
    std::vector<std::byte> bytes;
    std::shared_ptr<Operation> operation;  // as above
  };
  struct WaitingGrant {
    wire::Grant grant;
    GrantUrgency urgency;
  };
  struct Peer {
    std::uint32_t owed = 0;
    std::uint32_t posted = 0;
    int fragments_in_flight = 0;
    std::uint64_t arrivals = 0;
    std::vector<WaitingGrant> grants;
  };
  void post_missing(int source);
  void take_incoming();
  void send_grant(int target, const wire::Grant& grant);

  Transport& transport_;
  const TransportLimits& limits_;
  BlockPool blocks_;
  std::vector<Peer> peers_;
  std::vector<int> granting_;  ///< peers with waiting grants
  std::vector<FragmentInFlight> fragments_;
  std::vector<MessageInFlight> messages_;
  std::map<const std::byte*, std::vector<std::byte>> accepted_;
};

}  // namespace ferry::detail
