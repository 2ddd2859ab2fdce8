#pragma once
// What failed in one exchange. Ranks leave a failed plan at different calls, so from then on their
// order of calls says nothing until all of them know of the same failures.

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "ferry/error.hpp"

namespace ferry::detail {

class Failures {
 public:
  explicit Failures(std::size_t node_size) : node_size_(node_size) {}

  /// False where the failure of this plan was known.
  bool add(std::uint32_t plan, const Error& error);
  /// With what a plan failed; null while it has not, or when nobody can ask any more.
  const Error* find(std::uint32_t plan) const;

  /// Whether a plan failed with this error, also one that is forgotten.
  bool knows(const Error& error) const;

  /// A rank of the node touches nothing of a plan any more.
  void mark_left(std::uint32_t plan, int local_rank);
  bool has_left(std::uint32_t plan, int local_rank) const;
  bool all_left(std::uint32_t plan) const;
  /// Forgets a plan that this rank cannot use any more. Requires: all_left(plan)
  void forget(std::uint32_t plan) { plans_.erase(plan); }
  std::vector<std::uint32_t> known() const;

  /// Whether this rank's order of calls may differ from that of others.
  bool order_lost() const { return order_lost_; }
  /// Which plans failed so far, for the metadata of the next one; 0 when none did.
  std::uint16_t digest() const { return static_cast<std::uint16_t>(digest_); }
  /// The digests of all ranks, seen by a plan: when they are equal, all know the same.
  void compare(const std::vector<std::uint16_t>& digests);
  /// A plan is opened, and places are counted anew. Returns whether the call itself stands in an
  /// order that was lost.
  bool open_plan();

 private:
  void lose_order();
  struct Failed {
    std::optional<Error> error;  ///< empty while only others know of it
    std::vector<bool> left;
  };
  Failed& entry(std::uint32_t plan);

  const std::size_t node_size_;
  std::map<std::uint32_t, Failed> plans_;
  /// All that failed, also those forgotten, with a hash of the error's text.
  std::map<std::uint32_t, std::size_t> ever_;
  std::uint64_t digest_ = 0;  ///< of ever_, whose order does not count
  bool order_lost_ = false;
  bool agreed_ = false;  ///< all ranks know of the same failures
};

}  // namespace ferry::detail
