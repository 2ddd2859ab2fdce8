#pragma once
// The network as an enemy: what a rank sends may be replaced, held back, sent twice or made up,
// after the library has computed its checksums. For the stepped transport.

#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "exchange/forwarding.hpp"
#include "wire/headers.hpp"

namespace ferry::testing {

/// A message of a rank on its way out.
struct Outgoing {
  int target = -1;
  MessageKind kind = MessageKind::payload;
  std::vector<std::byte> bytes;

  /// Requires: the library wrote it
  wire::MessageType type() const {
    std::uint16_t stated = 0;
    std::memcpy(&stated, bytes.data() + 6, sizeof stated);
    return static_cast<wire::MessageType>(stated);
  }
};

class Tampering final : public Forwarding {
 public:
  explicit Tampering(Transport& inner) : Forwarding(inner) {}

  /// What leaves in place of a message: itself, others, or nothing.
  using Tamper = std::function<std::vector<Outgoing>(const Outgoing&)>;
  void set_tamper(Tamper tamper) { tamper_ = std::move(tamper); }

  /// Sends a message as if the library had.
  void inject(Outgoing message) {
    std::erase_if(kept_, [this](const Kept& kept) { return inner().sent(kept.ticket); });
    const std::uint64_t ticket = inner().send(message.target, message.kind, message.bytes);
    kept_.push_back({ticket, std::move(message.bytes)});
  }

 protected:
  std::uint64_t start_send(int target, MessageKind kind,
                           std::span<const std::byte> bytes) override {
    if (!tamper_) return Forwarding::start_send(target, kind, bytes);
    for (Outgoing& message : tamper_({target, kind, {bytes.begin(), bytes.end()}})) {
      inject(std::move(message));
    }
    return kEndedSend;
  }

 private:
  static constexpr std::uint64_t kEndedSend = 0;  // as the stepped transport has it

  /// What the network may still read.
  struct Kept {
    std::uint64_t ticket;
    std::vector<std::byte> bytes;
  };

  Tamper tamper_;
  std::vector<Kept> kept_;
};

}  // namespace ferry::testing
