#pragma once
// What plans and calls of plan are made in, kept from one to the next (see plan/memory.hpp). It
// belongs to the engine and not to an exchange: what a rank keeps is bounded however many
// exchanges it has.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "plan/membership.hpp"
#include "plan/rank_plan.hpp"

namespace ferry::detail {

/// Objects that are over and keep their memory for the next of their kind, a few at most.
/// Invariants:
///   1. No more than kMost are kept, and no more than kMostBytes in all.
///   2. A place is empty or owns what it points to, and changes hands by one atomic exchange: the
///      last handle of a plan may go on any thread.
template <typename T>
class Spares : public std::enable_shared_from_this<Spares<T>> {
 public:
  static constexpr std::size_t kMost = 4;
  static constexpr std::uint64_t kMostBytes = 16ULL << 20;

  struct GiveBack {
    // Shared with the engine and all that was taken: a plan may outlive its exchange and engine.
    std::shared_ptr<Spares> spares;
    void operator()(T* used) const noexcept { spares->keep(std::unique_ptr<T>(used)); }
  };
  using Handle = std::unique_ptr<T, GiveBack>;

  Spares() = default;
  Spares(const Spares&) = delete;
  Spares& operator=(const Spares&) = delete;
  ~Spares() {
    for (std::atomic<T*>& place : places_) delete place.load(std::memory_order_acquire);
  }

  /// One that is kept, with whatever it held last, or else a new one.
  Handle take() {
    for (std::atomic<T*>& place : places_) {
      T* const kept = place.exchange(nullptr, std::memory_order_acq_rel);
      if (kept == nullptr) continue;
      bytes_.fetch_sub(memory_bytes(*kept), std::memory_order_relaxed);
      return Handle(kept, {this->shared_from_this()});
    }
    return Handle(new T, {this->shared_from_this()});
  }

  /// Bytes that are kept.
  std::uint64_t kept_bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  void keep(std::unique_ptr<T> used) noexcept {
    const std::uint64_t bytes = memory_bytes(*used);
    if (bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes <= kMostBytes) {
      for (std::atomic<T*>& place : places_) {
        T* empty = nullptr;
        if (!place.compare_exchange_strong(empty, used.get(), std::memory_order_acq_rel)) continue;
        used.release();
        return;
      }
    }
    bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  }

  std::array<std::atomic<T*>, kMost> places_{};
  std::atomic<std::uint64_t> bytes_{0};
};

/// The memberships that a plan is made of.
struct PlanInputs {
  /// Of another rank, for this rank's node.
  struct Decoded {
    bool there = false;
    plan::Membership membership;
    plan::Membership grouped;  ///< with token_major
  };
  std::vector<plan::Membership> own;  ///< per node
  /// The same as a plan takes it: with token_major grouped by rank, else empty.
  std::vector<plan::Membership> own_grouped;
  std::vector<Decoded> decoded;  ///< per rank; what is not `there` is of an earlier plan
};
inline std::uint64_t memory_bytes(const PlanInputs& inputs) {
  std::uint64_t bytes = 0;
  for (const plan::Membership& own : inputs.own) bytes += plan::memory_bytes(own);
  for (const plan::Membership& own : inputs.own_grouped) bytes += plan::memory_bytes(own);
  for (const PlanInputs::Decoded& decoded : inputs.decoded) {
    bytes += plan::memory_bytes(decoded.membership) + plan::memory_bytes(decoded.grouped);
  }
  return bytes;
}

/// Of one engine.
struct PlanMemory {
  // Shared with plans, and with calls of plan, that were made in it.
  std::shared_ptr<Spares<plan::RankPlan>> plans = std::make_shared<Spares<plan::RankPlan>>();
  std::shared_ptr<Spares<PlanInputs>> inputs = std::make_shared<Spares<PlanInputs>>();
};

}  // namespace ferry::detail
