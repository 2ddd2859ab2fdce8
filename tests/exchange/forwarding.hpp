#pragma once
// A transport that passes everything on to another one: the base of those that look at messages, or
// change them, on their way out.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ferry/transport.hpp"

namespace ferry::testing {

class Forwarding : public Transport {
 public:
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
  bool sent(std::uint64_t ticket) override { return inner_.sent(ticket); }
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
  explicit Forwarding(Transport& inner)
      : Transport(inner.rank(), inner.topology()), inner_(inner) {}

  Transport& inner() { return inner_; }
  std::uint64_t start_send(int target, MessageKind kind,
                           std::span<const std::byte> bytes) override {
    return inner_.send(target, kind, bytes);
  }

 private:
  Transport& inner_;
};

}  // namespace ferry::testing
