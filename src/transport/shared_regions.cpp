// Regions as shared files; see shared_regions.hpp.

#include "transport/shared_regions.hpp"

#include <vector>

#include <fmt/format.h>

#include "ferry/error.hpp"
#include "transport/misuse.hpp"
#include "transport/shared_file.hpp"

namespace ferry::detail {

std::byte* SharedRegions::create(std::uint64_t key, std::uint64_t bytes) {
  if (own_.contains(key)) refuse_second_region(rank_, key);
  auto file = std::make_shared<UniqueFd>(make_shared_file(bytes));
  const auto made = own_.emplace(key, std::make_shared<const Pages>(file->get(), bytes)).first;
  tell_all({.kind = Kind::created, .key = key, .bytes = bytes}, file);
  return made->second->data();
}

void SharedRegions::retire(std::uint64_t key) {
  if (own_.erase(key) == 0) refuse_unknown_region(rank_, key);
  tell_all({.kind = Kind::retired, .key = key, .bytes = 0}, nullptr);
}

std::shared_ptr<const void> SharedRegions::hold(std::uint64_t key) const {
  const auto found = own_.find(key);
  if (found == own_.end()) refuse_unknown_region(rank_, key);
  return found->second;
}

std::byte* SharedRegions::map(int owner, std::uint64_t key) {
  if (owner == rank_) {
    const auto found = own_.find(key);
    return found == own_.end() ? nullptr : found->second->data();
  }
  if (NodeLinks::Link* const link = links_.find(owner)) read_notices(*link);
  const auto found = shown_.find({owner, key});
  if (found == shown_.end()) return nullptr;
  Shown& shown = found->second;
  if (!shown.pages) {
    shown.pages.emplace(shown.file.get(), shown.bytes);
    shown.file.reset();
  }
  return shown.pages->data();
}

void SharedRegions::exchange_notices() {
  if (!held_back_.empty()) send_held_back();
  for (NodeLinks::Link& link : links_.links()) read_notices(link);
}

void SharedRegions::tell_all(const Notice& notice, const std::shared_ptr<UniqueFd>& file) {
  for (const NodeLinks::Link& link : links_.links()) {
    held_back_.push_back({.rank = link.rank, .notice = notice, .file = file});
  }
  send_held_back();
}

void SharedRegions::send_held_back() {
  std::vector<int> full;  // later notices must not overtake the first that did not fit
  std::erase_if(held_back_, [&](const Outgoing& one) {
    for (const int rank : full) {
      if (rank == one.rank) return false;
    }
    NodeLinks::Link* const link = links_.find(one.rank);
    const int file = one.file ? one.file->get() : -1;
    switch (send_with_file(link->socket.get(), std::as_bytes(std::span(&one.notice, 1)), file)) {
      case SendOutcome::full: full.push_back(one.rank); return false;
      case SendOutcome::gone: return true;  // it maps nothing any more
      case SendOutcome::sent: break;
    }
    links_.hub().cell(one.rank).notices.fetch_add(1, std::memory_order_release);
    return true;
  });
}

void SharedRegions::read_notices(NodeLinks::Link& link) {
  std::uint64_t& num_read = num_read_[link.rank];
  const std::uint64_t num_sent =
      NodeLinks::hub_of(link).cell(rank_).notices.load(std::memory_order_acquire);
  while (num_read < num_sent) {
    Notice notice;
    auto received =
        receive_with_file(link.socket.get(), std::as_writable_bytes(std::span(&notice, 1)));
    if (!received) return;
    ++num_read;
    if (received->bytes != sizeof notice) continue;
    switch (notice.kind) {
      case Kind::retired: shown_.erase({link.rank, notice.key}); break;
      case Kind::created:
        if (!is_safe_to_map(received->file.get(), notice.bytes)) {
          throw Error(ErrorCode::corrupt_message,
                      fmt::format("map_region: rank {} shows a region of {} bytes that is not "
                                  "sealed or not that long; fix: see that all ranks run the same "
                                  "version",
                                  link.rank, notice.bytes));
        }
        shown_.insert_or_assign({link.rank, notice.key},
                                Shown{std::move(received->file), notice.bytes, std::nullopt});
        break;
    }
  }
}

}  // namespace ferry::detail
