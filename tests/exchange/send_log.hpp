#pragma once
// A transport that passes everything on to another one and writes down what payload was sent. It
// can keep back that sends have ended, as a slow network does.

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/transport.hpp"
#include "wire/headers.hpp"

namespace ferry::testing {

class SendLog final : public Transport {
 public:
  explicit SendLog(Transport& inner) : Transport(inner.rank(), inner.topology()), inner_(inner) {}
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

  std::string_view name() const override { return inner_.name(); }
  std::uint64_t preferred_fragment_bytes() const override {
    return inner_.preferred_fragment_bytes();
  }
  std::byte* create_region(std::uint64_t key, std::uint64_t bytes) override {
    return inner_.create_region(key, bytes);
  }
  std::byte* map_region(int owner, std::uint64_t key) override {
    return inner_.map_region(owner, key);
  }
  void retire_region(std::uint64_t key) override { inner_.retire_region(key); }
  std::shared_ptr<const void> hold_region(std::uint64_t key) override {
    return inner_.hold_region(key);
  }
  bool sent(std::uint64_t ticket) override {
    return !held_.contains(ticket) && inner_.sent(ticket >> 1U);
  }
  void post_receive(int source, std::span<std::byte> buffer) override {
    inner_.post_receive(source, buffer);
  }
  std::vector<std::span<std::byte>> withdraw_receives(int source) override {
    return inner_.withdraw_receives(source);
  }
  std::optional<Received> poll_received() override { return inner_.poll_received(); }
  std::optional<Incoming> probe() override { return inner_.probe(); }
  void accept(const Incoming& incoming, std::span<std::byte> buffer) override {
    inner_.accept(incoming, buffer);
  }
  WaitOutcome wait_until(Waiter& waiter) override { return inner_.wait_until(waiter); }
  void abort(const std::string& text) override { inner_.abort(text); }
  std::optional<std::string> aborted() const override { return inner_.aborted(); }

 protected:
  std::uint64_t start_send(int target, MessageKind kind,
                           std::span<const std::byte> bytes) override {
    // Tickets of the inner transport may be equal; those that are held must differ.
    std::uint64_t ticket = inner_.send(target, kind, bytes) << 1U;
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
  Transport& inner_;
  bool holds_ = false;
  std::multiset<std::uint64_t> held_;
  std::vector<Sent> fragments_;
};

}  // namespace ferry::testing
