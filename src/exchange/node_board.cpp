// What the ranks of a node tell each other: see node_board.hpp.

#include "exchange/node_board.hpp"

#include <algorithm>
#include <cstring>

#include "exchange/engine.hpp"

namespace ferry::detail {

NodeBoard::NodeBoard(Engine& engine, std::uint32_t exchange)
    : engine_(engine),
      exchange_(exchange),
      own_(engine.transport().create_region(
          control_key(exchange),
          ControlBlock::bytes(static_cast<int>(engine.node_ranks().size())))),
      peers_(engine.node_ranks().size()) {}

ControlBlock* NodeBoard::of(int local_rank) {
  ControlBlock& block = peers_[local_rank];
  if (!block) {
    std::byte* const base = engine_.map(engine_.node_ranks()[local_rank], control_key(exchange_));
    if (base == nullptr) return nullptr;
    block = ControlBlock(base);
  }
  return &block;
}

void NodeBoard::post(const Notice& notice, const std::optional<Error>& refusal) {
  if (peers_.size() == 1) return;
  backlog_.push_back({notice, refusal});
  flush();
}

bool NodeBoard::flush() {
  bool advanced = false;
  while (!backlog_.empty() && has_room(backlog_.front().refusal.has_value())) {
    write(backlog_.front());
    backlog_.pop_front();
    advanced = true;
  }
  return advanced;
}

bool NodeBoard::has_room(bool with_text) {
  const std::uint64_t next = own_.notice_count().load(std::memory_order_relaxed);
  if (next >= kNotices && !all_have_read(next - kNotices + 1)) return false;
  return !with_text || all_have_read(last_notice_[texts_ % kTexts]);
}

bool NodeBoard::all_have_read(std::uint64_t number) {
  if (number == 0) return true;
  for (int local = 0; local < static_cast<int>(peers_.size()); ++local) {
    if (local == engine_.local_index()) continue;
    ControlBlock* const control = of(local);
    if (control == nullptr ||
        !engine_.transport().reached(control->notices_read(engine_.local_index()), number)) {
      return false;
    }
  }
  return true;
}

void NodeBoard::write(const Waiting& waiting) {
  const std::uint64_t number = own_.notice_count().load(std::memory_order_relaxed);
  Notice notice = waiting.notice;
  if (waiting.refusal) {
    notice.text = static_cast<std::uint32_t>(texts_ % kTexts);
    last_notice_[notice.text] = number + 1;
    ++texts_;
    RefusalText& to = own_.text(notice.text);
    const std::string_view text = waiting.refusal->what();
    to.code = static_cast<std::uint32_t>(waiting.refusal->code());
    to.length = static_cast<std::uint32_t>(std::min(text.size(), wire::kPoisonTextBytes));
    std::memcpy(to.text, text.data(), to.length);
  }
  own_.notice(number) = notice;
  engine_.transport().raise_flag(own_.notice_count(), number + 1);
}

std::optional<NodeBoard::Unread> NodeBoard::read() {
  for (int local = 0; local < static_cast<int>(peers_.size()); ++local) {
    if (local == engine_.local_index()) continue;
    ControlBlock* const control = of(local);
    if (control == nullptr) continue;
    std::atomic<std::uint64_t>& read = own_.notices_read(local);
    const std::uint64_t next = read.load(std::memory_order_relaxed);
    if (!engine_.transport().reached(control->notice_count(), next + 1)) continue;
    Unread unread{local, control->notice(next), std::nullopt};
    if (unread.notice.kind == NoticeKind::refusal) {
      const RefusalText& from = control->text(unread.notice.text);
      unread.refusal =
          Error(static_cast<ErrorCode>(from.code), std::string(from.text, from.length));
    }
    engine_.transport().raise_flag(read, next + 1);
    return unread;
  }
  return std::nullopt;
}

}  // namespace ferry::detail
