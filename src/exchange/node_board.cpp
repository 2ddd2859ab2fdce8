// What the ranks of a node tell each other: see node_board.hpp.

#include "exchange/node_board.hpp"

#include <algorithm>
#include <cstring>

#include "exchange/engine.hpp"

namespace ferry::detail {

NodeBoard::NodeBoard(Engine& engine, std::uint32_t exchange)
    : engine_(engine),
      exchange_(exchange),
      peers_(engine.node_ranks().size()),
      readers_(engine.node_ranks().size()) {
  const int node_size = static_cast<int>(peers_.size());
  own_ = ControlBlock(
      engine.transport().create_region(control_key(exchange), ControlBlock::bytes(node_size)),
      node_size);
}

ControlBlock* NodeBoard::of(int local_rank) {
  ControlBlock& block = peers_[local_rank];
  if (!block) {
    std::byte* const base = engine_.map(engine_.node_ranks()[local_rank], control_key(exchange_));
    if (base == nullptr) return nullptr;
    block = ControlBlock(base, static_cast<int>(peers_.size()));
  }
  return &block;
}

void NodeBoard::post(int reader, const Notice& notice, const std::optional<Error>& refusal) {
  if (reader == engine_.local_index()) return;
  readers_[reader].backlog.push_back({notice, refusal});
}

void NodeBoard::post_to_all(const Notice& notice, const std::optional<Error>& refusal) {
  for (int reader = 0; reader < static_cast<int>(readers_.size()); ++reader) {
    post(reader, notice, refusal);
  }
}

bool NodeBoard::has_backlog() const {
  return std::ranges::any_of(readers_, [](const Reader& one) { return !one.backlog.empty(); });
}

bool NodeBoard::flush() {
  bool advanced = false;
  for (int reader = 0; reader < static_cast<int>(readers_.size()); ++reader) {
    std::deque<Waiting>& backlog = readers_[reader].backlog;
    while (!backlog.empty() && has_room(reader, backlog.front().refusal.has_value())) {
      write(reader, backlog.front());
      backlog.pop_front();
      advanced = true;
    }
  }
  return advanced;
}

bool NodeBoard::has_read(int reader, std::uint64_t number) {
  if (number == 0) return true;
  ControlBlock* const control = of(reader);
  return control != nullptr &&
         engine_.transport().reached(control->notices_read(engine_.local_index()), number);
}

bool NodeBoard::has_room(int reader, bool with_text) {
  const std::uint64_t next = own_.ring(reader).count.value.load(std::memory_order_relaxed);
  if (next >= kNotices && !has_read(reader, next - kNotices + 1)) return false;
  const Reader& state = readers_[reader];
  return !with_text || has_read(reader, state.notice_of_text[state.texts % kTexts]);
}

void NodeBoard::write(int reader, const Waiting& waiting) {
  NoticeRing& ring = own_.ring(reader);
  const std::uint64_t number = ring.count.value.load(std::memory_order_relaxed);
  Notice notice = waiting.notice;
  if (waiting.refusal) {
    Reader& state = readers_[reader];
    notice.text = static_cast<std::uint32_t>(state.texts++ % kTexts);
    state.notice_of_text[notice.text] = number + 1;
    RefusalText& to = ring.texts[notice.text];
    const std::string_view text = waiting.refusal->what();
    to.code = static_cast<std::uint32_t>(waiting.refusal->code());
    to.length = static_cast<std::uint32_t>(std::min(text.size(), wire::kPoisonTextBytes));
    std::memcpy(to.text, text.data(), to.length);
  }
  ring.notices[number % kNotices] = notice;
  engine_.transport().raise_flag(ring.count.value, number + 1);
}

std::optional<NodeBoard::Unread> NodeBoard::peek() {
  for (int local = 0; local < static_cast<int>(peers_.size()); ++local) {
    if (local == engine_.local_index()) continue;
    ControlBlock* const control = of(local);
    if (control == nullptr) continue;
    const NoticeRing& ring = control->ring(engine_.local_index());
    const std::uint64_t next = own_.notices_read(local).load(std::memory_order_relaxed);
    if (!engine_.transport().reached(ring.count.value, next + 1)) continue;
    Unread unread{local, ring.notices[next % kNotices], std::nullopt};
    if (unread.notice.kind == NoticeKind::refusal) {
      const RefusalText& from = ring.texts[unread.notice.text];
      unread.refusal =
          Error(static_cast<ErrorCode>(from.code), std::string(from.text, from.length));
    }
    return unread;
  }
  return std::nullopt;
}

void NodeBoard::acknowledge(const Unread& unread) {
  std::atomic<std::uint64_t>& read = own_.notices_read(unread.local_rank);
  engine_.transport().raise_flag(read, read.load(std::memory_order_relaxed) + 1);
}

void NodeBoard::leave() {
  for (int local = 0; local < static_cast<int>(peers_.size()); ++local) {
    engine_.transport().raise_flag(own_.notices_read(local), kGone);
  }
}

bool NodeBoard::is_gone(int local_rank) {
  return local_rank != engine_.local_index() && has_read(local_rank, kGone);
}

}  // namespace ferry::detail
