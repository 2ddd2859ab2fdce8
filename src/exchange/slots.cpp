// Window slots: see slots.hpp. Sizes are rounded up by at most an eighth, so that routings that
// differ a little from step to step find the same slot again.

#include "exchange/slots.hpp"

#include <bit>

#include <fmt/format.h>

#include "ferry/error.hpp"

namespace ferry::detail {
namespace {

constexpr std::uint64_t kSmallestSlotBytes = 16 * 1024;

std::uint64_t rounded_capacity(std::uint64_t bytes) {
  if (bytes <= kSmallestSlotBytes) return kSmallestSlotBytes;
  const std::uint64_t step = std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

bool is_free(const Slot& slot) { return slot.leases.load(std::memory_order_acquire) == 0; }

}  // namespace

SlotPool::SlotPool(Transport& transport) : transport_(transport) {}

std::unique_ptr<SlotLease> SlotPool::take(std::uint64_t bytes, const std::string& holder,
                                          SlotContent content) {
  std::shared_ptr<Slot> best;
  for (const auto& slot : slots_) {
    if (!is_free(*slot) || slot->content != content || slot->capacity_bytes < bytes) continue;
    if (!best || slot->capacity_bytes < best->capacity_bytes) best = slot;
  }
  // A slot far too large is left for whoever needs it.
  const std::uint64_t capacity = rounded_capacity(bytes);
  if (!best || best->capacity_bytes > 4 * capacity) {
    if (reserved_bytes_ + capacity > limit_bytes) retire_free();
    if (reserved_bytes_ + capacity > limit_bytes) refuse(capacity);
    best = std::make_shared<Slot>();
    best->layout.node_size =
        static_cast<int>(transport_.topology().ranks_of(transport_.node()).size());
    best->key = next_key_++;
    best->capacity_bytes = capacity;
    best->content = content;
    best->base = transport_.create_region(best->key, best->layout.data_offset() + capacity);
    best->memory = transport_.hold_region(best->key);
    if (content == SlotContent::rows) {
      transport_.mark_payload(best->key, best->layout.data_offset());
    }
    reserved_bytes_ += capacity;
    slots_.push_back(best);
  }
  best->shown = false;
  best->wanted_bytes = bytes;
  best->holder = holder;
  return std::make_unique<SlotLease>(best);
}

std::unique_ptr<SlotLease> SlotPool::find(const void* data) const {
  for (const auto& slot : slots_) {
    if (slot->data() == data && !is_free(*slot)) return std::make_unique<SlotLease>(slot);
  }
  return nullptr;
}

void SlotPool::fill_free(unsigned char value) {
  for (const auto& slot : slots_) {
    if (is_free(*slot)) transport_.fill({slot->data(), slot->capacity_bytes}, value);
  }
}

void SlotPool::retire_free() {
  std::erase_if(slots_, [this](const std::shared_ptr<Slot>& slot) {
    if (!is_free(*slot)) return false;
    transport_.retire_region(slot->key);
    reserved_bytes_ -= slot->capacity_bytes;
    return true;
  });
}

void SlotPool::refuse(std::uint64_t bytes) const {
  std::string holders;
  for (const auto& slot : slots_) {
    holders += fmt::format("{}{} ({} bytes)", holders.empty() ? "" : ", ", slot->holder,
                           slot->capacity_bytes);
  }
  throw Error(
      ErrorCode::limit_exceeded,
      fmt::format("window pool: a slot of {} bytes is needed on rank {}, but {} of {} bytes "
                  "are held by: {}; fix: drop handles that are no longer used, or raise "
                  "pool_limit_bytes",
                  bytes, transport_.rank(), reserved_bytes_, limit_bytes,
                  holders.empty() ? "nobody" : holders));
}

}  // namespace ferry::detail
