// Matching of messages with memory; see inbox.hpp.

#include "transport/inbox.hpp"

#include <cstring>

#include "transport/misuse.hpp"

namespace ferry::detail {

namespace {

/// Copies a message to its receiver. False when the sender has withdrawn it.
bool deliver(Message& message, std::span<std::byte> buffer, Received& received) {
  MessageState expected = MessageState::waiting;
  if (!message.state.compare_exchange_strong(expected, MessageState::copying)) {
    return false;
  }
  received.source = message.source;
  received.kind = message.kind;
  received.buffer = buffer;
  received.bytes = message.bytes.size();
  received.truncated = message.bytes.size() > buffer.size();
  if (!received.truncated && !message.bytes.empty()) {
    std::memcpy(buffer.data(), message.bytes.data(), message.bytes.size());
    if (message.flipped_bit) {
      buffer[*message.flipped_bit / 8] ^= std::byte{1} << (*message.flipped_bit % 8);
    }
  }
  // Sequentially consistent, so that a sender that goes to sleep is seen or sees this.
  message.state.exchange(MessageState::taken);
  return true;
}

}  // namespace

void Inbox::arrive(MessagePtr message) {
  Lane& lane = lanes_[message->source];
  if (message->kind == MessageKind::payload) {
    lane.payload.push_back(std::move(message));
    ++num_payload_;
  } else {
    lane.others.push_back(std::move(message));
    ++num_others_;
  }
}

Inbox::Lane& Inbox::lane_of(int source) {
  check_source(source, static_cast<int>(lanes_.size()));
  return lanes_[source];
}

void Inbox::post(int source, std::span<std::byte> buffer) {
  lane_of(source).posted.push_back(buffer);
}

std::vector<std::span<std::byte>> Inbox::withdraw(int source) {
  auto& posted = lane_of(source).posted;
  std::vector<std::span<std::byte>> buffers(posted.begin(), posted.end());
  posted.clear();
  return buffers;
}

std::optional<Received> Inbox::take_from(Lane& lane, double now) {
  while (!lane.payload.empty() && !lane.posted.empty() && lane.payload.front()->visible_at <= now) {
    const MessagePtr message = std::move(lane.payload.front());
    lane.payload.pop_front();
    --num_payload_;
    Received received;
    if (deliver(*message, lane.posted.front(), received)) {
      lane.posted.pop_front();
      return received;
    }
  }
  return std::nullopt;
}

std::optional<Received> Inbox::take(double now) {
  while (!accepted_.empty()) {
    const auto [message, buffer] = std::move(accepted_.front());
    accepted_.pop_front();
    Received received;
    if (deliver(*message, buffer, received)) {
      return received;
    }
  }
  for (std::size_t i = 0; num_payload_ > 0 && i < lanes_.size(); ++i) {
    const std::size_t source = (first_payload_ + i) % lanes_.size();
    if (auto received = take_from(lanes_[source], now)) {
      first_payload_ = source + 1;
      return received;
    }
  }
  return std::nullopt;
}

std::optional<Incoming> Inbox::probe(double now) {
  for (std::size_t i = 0; num_others_ > 0 && i < lanes_.size(); ++i) {
    const std::size_t source = (first_other_ + i) % lanes_.size();
    Lane& lane = lanes_[source];
    if (lane.others.empty() || lane.others.front()->visible_at > now) {
      continue;
    }
    const MessagePtr message = std::move(lane.others.front());
    lane.others.pop_front();
    --num_others_;
    first_other_ = source + 1;
    const Incoming incoming{message->source, message->kind, message->bytes.size(), next_id_++};
    probed_.emplace(incoming.id, message);
    return incoming;
  }
  return std::nullopt;
}

void Inbox::accept(const Incoming& incoming, std::span<std::byte> buffer) {
  const auto found = probed_.find(incoming.id);
  if (found == probed_.end()) refuse_unprobed(incoming);
  check_buffer(incoming, found->second->bytes.size(), buffer.size());
  accepted_.emplace_back(std::move(found->second), buffer);
  probed_.erase(found);
}

double Inbox::next_visible_at() const {
  double next = 0;
  const auto consider = [&next](const MessagePtr& message) {
    if (next == 0 || message->visible_at < next) {
      next = message->visible_at;
    }
  };
  for (const Lane& lane : lanes_) {
    if (!lane.payload.empty() && !lane.posted.empty()) {
      consider(lane.payload.front());
    }
    if (!lane.others.empty()) {
      consider(lane.others.front());
    }
  }
  return next;
}

}  // namespace ferry::detail
