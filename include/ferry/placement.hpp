#pragma once
// Which rank holds which expert. Any map is allowed: uneven, fewer experts than ranks, scattered.

#include <cstdint>
#include <vector>

namespace ferry {

class Placement {
 public:
  /// Experts in blocks: expert e on rank floor(e * num_ranks / num_experts), so that the ranks'
  /// shares differ by at most one.
  static Placement contiguous(int num_experts, int num_ranks);
  /// rank_of_expert[e] = the rank that holds expert e.
  static Placement from_map(const std::vector<int>& rank_of_expert);
  /// ranks_of_expert[e] = every rank that holds a copy of expert e.
  static Placement with_replicas(std::vector<std::vector<int>> ranks_of_expert);

  int num_experts() const { return static_cast<int>(ranks_of_expert_.size()); }
  /// The first rank that holds the expert.
  int rank_of(int expert) const { return ranks_of_expert_[expert].front(); }
  const std::vector<int>& ranks_of(int expert) const { return ranks_of_expert_[expert]; }
  bool has_replicas() const;
  /// Raised by whoever moves experts; a plan is bound to the version it was made with.
  std::uint64_t version = 1;

  std::uint64_t hash() const;
  bool operator==(const Placement&) const = default;

 private:
  std::vector<std::vector<int>> ranks_of_expert_;
};

}  // namespace ferry
