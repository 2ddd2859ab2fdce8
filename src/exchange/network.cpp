// Messages of one rank: see network.hpp.

#include "exchange/network.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "base/check.hpp"
#include "base/keep_forever.hpp"
#include "exchange/operation.hpp"
#include "exchange/state.hpp"

namespace ferry::detail {
namespace {

// One slow peer must not use up all sends of a rank that has others to serve.
constexpr int kFragmentsInFlightPerPeer = 4;

bool same_stream(const wire::Grant& a, const wire::Grant& b) {
  return a.exchange == b.exchange && a.plan == b.plan && a.kind == b.kind && a.stream == b.stream;
}

}  // namespace

Network::Network(Transport& transport, const TransportLimits& limits)
    : transport_(transport),
      limits_(limits),
      blocks_(transport.preferred_fragment_bytes()),
      peers_(static_cast<std::size_t>(transport.topology().num_ranks())) {}

Network::~Network() {
  try {
    collect_sent();
  } catch (const Error&) {
    // The transport has ended before: all that it may still send is kept below.
  }
  for (int source = 0; source < static_cast<int>(peers_.size()); ++source) {
    if (peers_[source].posted == 0) continue;
    for (const auto buffer : transport_.withdraw_receives(source)) blocks_.give_back(buffer);
  }
  // A receiver may copy from the memory of an unfinished send at any time, and a failed exchange is
  // torn down without waiting for anybody.
  for (MessageInFlight& message : messages_) {
    base::keep_forever(std::make_shared<std::vector<std::byte>>(std::move(message.bytes)));
  }
  for (FragmentInFlight& fragment : fragments_) {
    base::keep_forever(std::shared_ptr<void>(fragment.block.release().data(), [](void*) {}));
  }
  // The same for messages that are on their way into memory that was given for them.
  for (auto& [address, memory] : accepted_) {
    base::keep_forever(std::make_shared<std::vector<std::byte>>(std::move(memory)));
  }
}

bool Network::may_send_fragment(int target) const {
  return static_cast<int>(fragments_.size()) < transport_.preferred_sends_in_flight() &&
         peers_[target].fragments_in_flight < kFragmentsInFlightPerPeer;
}

void Network::send_fragment(int target, wire::FragmentHeader header, Block block,
                            const std::shared_ptr<Operation>& operation) {
  std::vector<WaitingGrant>& grants = peers_[target].grants;
  if (!grants.empty()) {
    header.grant = grants.front().grant;
    grants.erase(grants.begin());
  }
  const std::span<std::byte> memory = block.memory();
  const auto message = memory.first(wire::kFragmentHeaderBytes + header.payload_bytes);
  if (header.has_crc) {
    header.payload_crc = transport_.checksum(message.subspan(wire::kFragmentHeaderBytes));
  }
  wire::encode(header, message.first<wire::kFragmentHeaderBytes>());
  const std::uint64_t ticket = transport_.send(target, MessageKind::payload, message);
  ++peers_[target].fragments_in_flight;
  ++operation->sends_in_flight;
  fragments_.push_back({ticket, target, std::move(block), operation});
}

void Network::send(int target, MessageKind kind, std::vector<std::byte> bytes,
                   const std::shared_ptr<Operation>& operation) {
  const std::uint64_t ticket = transport_.send(target, kind, bytes);
  if (operation) ++operation->sends_in_flight;
  messages_.push_back({ticket, std::move(bytes), operation});
}

bool Network::collect_sent() {
  const std::size_t before = fragments_.size() + messages_.size();
  std::erase_if(fragments_, [this](FragmentInFlight& fragment) {
    if (!transport_.sent(fragment.ticket)) return false;
    --peers_[fragment.target].fragments_in_flight;
    --fragment.operation->sends_in_flight;
    return true;
  });
  std::erase_if(messages_, [this](const MessageInFlight& message) {
    if (!transport_.sent(message.ticket)) return false;
    if (message.operation) --message.operation->sends_in_flight;
    return true;
  });
  return fragments_.size() + messages_.size() != before;
}

void Network::queue_grant(int target, const wire::Grant& grant, GrantUrgency urgency) {
  std::vector<WaitingGrant>& grants = peers_[target].grants;
  const auto older = std::ranges::find_if(
      grants, [&](const WaitingGrant& waiting) { return same_stream(waiting.grant, grant); });
  if (older != grants.end()) {
    *older = {grant, urgency};
    return;
  }
  if (grants.empty() && std::ranges::find(granting_, target) == granting_.end()) {
    granting_.push_back(target);
  }
  grants.push_back({grant, urgency});
}

void Network::flush_grants(bool all) {
  std::erase_if(granting_, [&](int target) {
    std::vector<WaitingGrant>& grants = peers_[target].grants;
    std::erase_if(grants, [&](const WaitingGrant& waiting) {
      if (!all && waiting.urgency != GrantUrgency::now) return false;
      send_grant(target, waiting.grant);
      return true;
    });
    return grants.empty();
  });
}

void Network::show_life() {
  const Topology& topology = transport_.topology();
  for (int target = 0; target < topology.num_ranks(); ++target) {
    // A grant of nothing: it arrives, and that is all it says.
    if (!topology.same_node(target, transport_.rank())) send_grant(target, wire::Grant{});
  }
}

void Network::send_grant(int target, const wire::Grant& grant) {
  std::vector<std::byte> bytes(wire::kGrantMessageBytes);
  wire::encode(wire::GrantMessage{.generation = kGeneration, .grant = grant},
               std::span(bytes).first<wire::kGrantMessageBytes>());
  send(target, MessageKind::control, std::move(bytes));
}

void Network::expect(int source, std::uint32_t fragments) {
  peers_[source].owed += fragments;
  post_missing(source);
}

void Network::settle(int source, std::uint32_t fragments) {
  FERRY_ASSERT(peers_[source].owed >= fragments, "rank {} owed {} fragments, {} settled", source,
               peers_[source].owed, fragments);
  peers_[source].owed -= fragments;
}

void Network::post_missing(int source) {
  Peer& peer = peers_[source];
  for (; peer.posted < peer.owed; ++peer.posted) {
    transport_.post_receive(source, blocks_.take().release());
  }
}

void Network::grow_blocks(std::uint64_t bytes) {
  if (bytes <= blocks_.block_bytes()) return;
  blocks_.grow(bytes);
  for (int source = 0; source < static_cast<int>(peers_.size()); ++source) {
    if (peers_[source].posted == 0) continue;
    for (const std::span<std::byte> buffer : transport_.withdraw_receives(source)) {
      --peers_[source].posted;
      blocks_.give_back(buffer);
    }
    post_missing(source);
  }
}

void Network::take_incoming() {
  while (const std::optional<Incoming> incoming = transport_.probe()) {
    const std::uint64_t limit = incoming->kind == MessageKind::metadata
                                    ? limits_.metadata_limit_bytes
                                    : wire::kControlLimitBytes;
    if (incoming->bytes > limit) {
      transport_.abort(fmt::format(
          "rank {} sent a {} message of {} bytes to rank {}; allowed: {} bytes; fix: raise "
          "metadata_limit_bytes if the batch is that large, else suspect mixed versions",
          incoming->source, incoming->kind == MessageKind::metadata ? "metadata" : "control",
          incoming->bytes, transport_.rank(), limit));
      return;
    }
    // One byte at least: the address is the key under which the message is found again.
    std::vector<std::byte> memory(std::max<std::uint64_t>(incoming->bytes, 1));
    const std::span<std::byte> buffer(memory);
    accepted_.emplace(buffer.data(), std::move(memory));
    transport_.accept(*incoming, buffer);
  }
}

std::optional<Arrival> Network::poll() {
  take_incoming();
  const std::optional<Received> received = transport_.poll_received();
  if (!received) return std::nullopt;
  Peer& peer = peers_[received->source];
  ++peer.arrivals;
  Arrival arrival;
  arrival.source = received->source;
  arrival.kind = received->kind;
  if (received->kind == MessageKind::payload) {
    --peer.posted;
    arrival.block = blocks_.adopt(received->buffer);
    arrival.truncated = received->truncated;
    arrival.fragment_bytes = received->truncated ? 0 : received->bytes;
  } else {
    const auto accepted = accepted_.find(received->buffer.data());
    FERRY_ASSERT(accepted != accepted_.end(), "a message arrived in memory that was not given");
    arrival.bytes = std::move(accepted->second);
    arrival.bytes.resize(received->bytes);
    accepted_.erase(accepted);
  }
  return arrival;
}

}  // namespace ferry::detail
