#pragma once
// Writes down what payload a rank sent. It can keep back that sends have ended, as a slow network
// does.

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "exchange/forwarding.hpp"
#include "wire/headers.hpp"

namespace ferry::testing {

class SendLog final : public Forwarding {
 public:
  explicit SendLog(Transport& inner) : Forwarding(inner) {}
  ~SendLog() override { attachment.reset(); }

  struct Sent {
    int target = -1;
    wire::FragmentHeader header;
  };
  const std::vector<Sent>& fragments() const { return fragments_; }
  /// No payload that is sent from now on counts as sent, until `release`.
  void hold() { holds_ = true; }
  void release() {
    holds_ = false;
    held_.clear();
  }

  bool sent(std::uint64_t ticket) override {
    return !held_.contains(ticket) && inner().sent(ticket >> 1U);
  }

 protected:
  std::uint64_t start_send(int target, MessageKind kind,
                           std::span<const std::byte> bytes) override {
    // Tickets of the inner transport may be equal; those that are held must differ.
    std::uint64_t ticket = inner().send(target, kind, bytes) << 1U;
    if (kind != MessageKind::payload) return ticket;
    wire::FragmentHeader header;
    if (!wire::decode(bytes.first(wire::kFragmentHeaderBytes), header)) {
      fragments_.push_back({target, header});
    }
    if (!holds_) return ticket;
    ticket |= 1U;
    held_.insert(ticket);
    return ticket;
  }

 private:
  bool holds_ = false;
  std::multiset<std::uint64_t> held_;
  std::vector<Sent> fragments_;
};

}  // namespace ferry::testing
