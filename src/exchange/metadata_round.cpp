// One round of metadata: see metadata_round.hpp. A window holds the number of entries, a table of
// (source, message offset and bytes, note offset and bytes), then the bytes, 8-byte aligned.

#include "exchange/metadata_round.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "exchange/engine.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::detail {
namespace {

struct TableRow {
  std::uint64_t source;
  std::uint64_t message_offset;
  std::uint64_t message_bytes;
  std::uint64_t note_offset;
  std::uint64_t note_bytes;
};

std::uint64_t aligned(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }

}  // namespace

MetadataRound::MetadataRound(Engine& engine, std::vector<std::vector<std::byte>> messages,
                             Annotate annotate)
    : engine_(engine),
      messages_(std::move(messages)),
      annotate_(std::move(annotate)),
      sources_(engine.transport().topology().sources_landing_at(engine.rank())),
      one_each_(engine.node_ranks().size(), 1),
      windows_(one_each_),
      entries_(static_cast<std::size_t>(engine.transport().topology().num_ranks())) {
  const std::uint64_t limit = engine.limits().metadata_limit_bytes;
  for (std::size_t node = 0; node < messages_.size(); ++node) {
    if (messages_[node].size() <= limit) continue;
    throw Error(ErrorCode::limit_exceeded,
                fmt::format("metadata of rank {} for node {} has {} bytes; allowed: {} bytes; fix: "
                            "raise metadata_limit_bytes on all ranks, or plan fewer tokens at once",
                            engine.rank(), node, messages_[node].size(), limit));
  }
}

bool MetadataRound::step(Operation& operation) {
  bool advanced = send_messages(operation);
  advanced |= collect(operation);
  advanced |= show(operation);
  if (!operation.running() || !windows_.resolve(operation)) return advanced;
  for (std::uint32_t local = 0; windows_.complete() && local < engine_.node_ranks().size();
       ++local) {
    read_window(windows_.bytes(local));
  }
  return true;
}

bool MetadataRound::send_messages(Operation& operation) {
  if (sent_) return false;
  sent_ = true;
  const Topology& topology = engine_.transport().topology();
  for (int node = 0; node < topology.num_nodes(); ++node) {
    if (node == engine_.transport().node()) continue;
    sent_bytes_ += messages_[node].size();
    engine_.network().send(topology.rail_rank(engine_.rank(), node), MessageKind::metadata,
                           std::move(messages_[node]), operation.shared_from_this());
  }
  return true;
}

bool MetadataRound::collect(Operation& operation) {
  bool advanced = false;
  if (received_.empty() && operation.running()) {
    std::vector<std::byte> own = std::move(messages_[engine_.transport().node()]);
    advanced |= take(operation, engine_.rank(), std::move(own));
  }
  auto arrived = operation.exchange().metadata.extract(operation.call().plan);
  if (!arrived) return advanced;
  for (ArrivedMetadata& metadata : arrived.mapped()) {
    advanced |= take(operation, metadata.source, std::move(metadata.bytes));
  }
  return advanced;
}

bool MetadataRound::take(Operation& operation, int source, std::vector<std::byte> message) {
  if (!operation.running()) return false;
  Note note = check(operation, source, message);
  if (note.error) {
    engine_.refuse(operation, *note.error);
    return true;
  }
  received_.push_back({source, std::move(message), std::move(note.bytes)});
  return true;
}

MetadataRound::Note MetadataRound::check(Operation& operation, int source,
                                         std::span<const std::byte> message) const {
  const auto corrupt = [&](const std::string& why) {
    return Note{{},
                Error(ErrorCode::corrupt_message, fmt::format("{}: metadata of rank {}: {}",
                                                              operation.describe(), source, why))};
  };
  const bool known = std::ranges::any_of(
      received_, [&](const Received& received) { return received.source == source; });
  const bool expected = source == engine_.rank() || std::ranges::binary_search(sources_, source);
  if (known) return corrupt("it came twice");
  if (!expected) return corrupt("it lands on another rank");
  wire::MetadataHeader header;
  const std::size_t head_bytes = std::min(message.size(), wire::kMetadataHeaderBytes);
  if (const auto problem = wire::decode(message.first(head_bytes), header)) {
    return corrupt(*problem);
  }
  if (!wire::same_call(header.call, operation.call())) {
    return {{}, different_calls(operation.call(), engine_.rank(), header.call, source)};
  }
  const auto body = message.subspan(wire::kMetadataHeaderBytes);
  if (header.source != static_cast<std::uint32_t>(source)) {
    return corrupt(fmt::format("source is {}", header.source));
  }
  if (header.body_bytes != body.size()) {
    return corrupt(
        fmt::format("body_bytes is {}, but {} bytes came", header.body_bytes, body.size()));
  }
  if (header.body_crc != kernels::crc32c(body)) return corrupt("body_crc does not fit its bytes");
  return annotate_(header, body);
}

bool MetadataRound::show(Operation& operation) {
  if (shown_ || !operation.running() || received_.size() != sources_.size() + 1) return false;
  if (!lease_) {
    window_bytes_ = sizeof(std::uint64_t) + received_.size() * sizeof(TableRow);
    for (const Received& received : received_) {
      window_bytes_ += aligned(received.message.size()) + aligned(received.note.size());
    }
    lease_ = engine_.slots().take(window_bytes_, operation.describe(), SlotContent::metadata);
    std::byte* const base = lease_->slot().data();
    const std::uint64_t count = received_.size();
    std::memcpy(base, &count, sizeof count);
    std::uint64_t row_at = sizeof count;
    std::uint64_t at = row_at + count * sizeof(TableRow);
    for (const Received& received : received_) {
      TableRow row{};
      row.source = static_cast<std::uint64_t>(received.source);
      row.message_offset = at;
      row.message_bytes = received.message.size();
      at += aligned(row.message_bytes);
      row.note_offset = at;
      row.note_bytes = received.note.size();
      at += aligned(row.note_bytes);
      std::memcpy(base + row_at, &row, sizeof row);
      row_at += sizeof row;
      std::ranges::copy(received.message, base + row.message_offset);
      std::ranges::copy(received.note, base + row.note_offset);
    }
  }
  shown_ =
      engine_.publish(operation, lease_->slot(), {.bytes = window_bytes_, .readers = one_each_});
  return shown_;
}

void MetadataRound::read_window(std::span<const std::byte> window) {
  std::uint64_t count = 0;
  std::memcpy(&count, window.data(), sizeof count);
  for (std::uint64_t i = 0; i < count; ++i) {
    TableRow row{};
    std::memcpy(&row, window.data() + sizeof count + i * sizeof row, sizeof row);
    entries_[row.source] = {window.subspan(row.message_offset, row.message_bytes),
                            window.subspan(row.note_offset, row.note_bytes)};
  }
}

WaitTarget MetadataRound::waits_for(const Operation& operation) const {
  for (const int source : sources_) {
    const bool here = std::ranges::any_of(
        received_, [&](const Received& received) { return received.source == source; });
    if (!here) return {source, Phase::metadata};
  }
  if (!shown_) {
    const int rank = engine_.slow_reader(operation, one_each_);
    if (rank >= 0) return {rank, Phase::earlier_call};
  }
  if (const int rank = windows_.missing_rank(operation); rank >= 0) {
    return {rank, Phase::node_counts};
  }
  const Topology& topology = engine_.transport().topology();
  const int other_node = engine_.transport().node() == 0 ? 1 : 0;
  if (operation.sends_in_flight == 0) return {};
  return {topology.rail_rank(engine_.rank(), other_node), Phase::sends};
}

void MetadataRound::finish(Operation& operation) {
  windows_.raise(operation, PeerWindows::Flag::released);
  if (lease_) engine_.retire(std::move(lease_), operation);
}

}  // namespace ferry::detail
