#pragma once
// Window slots: node memory that one operation at a time shows to the ranks of its node. The pool
// belongs to the transport and serves all its exchanges. It grows as needed, up to a limit.
// Invariants:
//   1. A slot is free when nobody holds a lease on it. Leases are held by the caller's handles, by
//      running operations, and by ended ones until no peer can touch the slot any more.
//   2. `turn` is raised each time the slot is shown to peers; flags of an older turn mean nothing.
//   3. A slot is shown by one operation at a time (`shown_by`).

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "exchange/control.hpp"
#include "ferry/transport.hpp"

namespace ferry::detail {

/// Where things lie in a slot's region: written flags, released flags, then the data.
struct SlotLayout {
  int node_size = 1;

  Line& written(std::byte* base, int writer) const { return reinterpret_cast<Line*>(base)[writer]; }
  Line& released(std::byte* base, int reader) const {
    return reinterpret_cast<Line*>(base)[node_size + reader];
  }
  std::uint64_t data_offset() const {
    const std::uint64_t flags = 2ULL * static_cast<std::uint64_t>(node_size) * sizeof(Line);
    return (flags + 4095) / 4096 * 4096;
  }
};

class Operation;

/// What a slot holds: rows are payload, which only kernels touch.
enum class SlotContent : std::uint8_t { rows, metadata };

struct Slot {
  SlotContent content = SlotContent::rows;
  std::uint64_t key = 0;
  std::byte* base = nullptr;
  /// Of the region, shared by the transport and this slot: rows that somebody still looks at when
  /// the transport goes stay where they are.
  std::shared_ptr<const void> memory;
  SlotLayout layout;
  std::uint64_t capacity_bytes = 0;  ///< of the data
  std::uint64_t turn = 0;
  bool shown = false;                       ///< peers may touch it
  std::weak_ptr<const Operation> shown_by;  ///< watched: ended ones are found in Engine::retiring_
  std::uint64_t wanted_bytes = 0;           ///< by whoever took it last
  std::string holder;                       ///< who took it last, for the error of a full pool
  std::atomic<int> leases{0};               ///< atomic: a handle may be dropped on any thread

  std::byte* data() const { return base + layout.data_offset(); }
};

/// Keeps a slot from being handed out again.
class SlotLease {
 public:
  explicit SlotLease(std::shared_ptr<Slot> slot) : slot_(std::move(slot)) {
    slot_->leases.fetch_add(1, std::memory_order_relaxed);
  }
  SlotLease(const SlotLease& other) : SlotLease(other.slot_) {}
  SlotLease& operator=(const SlotLease&) = delete;
  ~SlotLease() { slot_->leases.fetch_sub(1, std::memory_order_acq_rel); }
  Slot& slot() const { return *slot_; }

 private:
  // Shared by the pool and the leases: a handle may outlive the pool.
  std::shared_ptr<Slot> slot_;
};

class SlotPool {
 public:
  explicit SlotPool(Transport& transport);

  /// A free slot of at least `bytes`, or a new one. Never waits.
  /// Errors: limit_exceeded with the holders, resource_exhausted.
  std::unique_ptr<SlotLease> take(std::uint64_t bytes, const std::string& holder,
                                  SlotContent content = SlotContent::rows);
  /// The slot whose data starts at this address, if it is one of this pool.
  std::unique_ptr<SlotLease> find(const void* data) const;

  std::uint64_t reserved_bytes() const { return reserved_bytes_; }
  void fill_free(unsigned char value);

  std::uint64_t limit_bytes = 64ULL << 30;

 private:
  void retire_free();
  [[noreturn]] void refuse(std::uint64_t bytes) const;

  Transport& transport_;
  std::vector<std::shared_ptr<Slot>> slots_;
  std::uint64_t next_key_ = 1;
  std::uint64_t reserved_bytes_ = 0;
};

}  // namespace ferry::detail
