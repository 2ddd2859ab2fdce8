// Placement: one list of ranks per expert, checked when it is made.

#include "ferry/placement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "base/hash.hpp"
#include "ferry/error.hpp"

namespace ferry {
namespace {

[[noreturn]] void refuse_placement(const std::string& text) {
  throw Error(ErrorCode::invalid_argument, "placement: " + text);
}

void check_ranks(std::size_t expert, const std::vector<int>& ranks) {
  if (ranks.empty()) {
    refuse_placement(
        fmt::format("expert {} is on no rank; allowed: at least one rank; fix: place it", expert));
  }
  for (std::size_t copy = 0; copy < ranks.size(); ++copy) {
    if (ranks[copy] < 0) {
      refuse_placement(
          fmt::format("expert {} is on rank {}; allowed: 0 and above; fix: name an existing rank",
                      expert, ranks[copy]));
    }
    const auto before = ranks.begin() + static_cast<std::ptrdiff_t>(copy);
    if (std::find(ranks.begin(), before, ranks[copy]) != before) {
      refuse_placement(
          fmt::format("expert {} is twice on rank {}; allowed: one copy per rank; fix: name each "
                      "rank once",
                      expert, ranks[copy]));
    }
  }
}

}  // namespace

Placement Placement::contiguous(int num_experts, int num_ranks) {
  if (num_experts < 1 || num_ranks < 1) {
    refuse_placement(
        fmt::format("{} experts on {} ranks; allowed: at least 1 of each; fix: give both sizes",
                    num_experts, num_ranks));
  }
  std::vector<int> rank_of_expert(static_cast<std::size_t>(num_experts));
  for (int expert = 0; expert < num_experts; ++expert) {
    const std::int64_t product = static_cast<std::int64_t>(expert) * num_ranks;
    rank_of_expert[static_cast<std::size_t>(expert)] = static_cast<int>(product / num_experts);
  }
  return from_map(rank_of_expert);
}

Placement Placement::from_map(const std::vector<int>& rank_of_expert) {
  std::vector<std::vector<int>> ranks_of_expert;
  ranks_of_expert.reserve(rank_of_expert.size());
  for (const int rank : rank_of_expert) ranks_of_expert.push_back({rank});
  return with_replicas(std::move(ranks_of_expert));
}

Placement Placement::with_replicas(std::vector<std::vector<int>> ranks_of_expert) {
  if (ranks_of_expert.empty()) {
    refuse_placement(
        "the map has no expert; allowed: at least 1; fix: name the rank of every expert");
  }
  for (std::size_t expert = 0; expert < ranks_of_expert.size(); ++expert) {
    check_ranks(expert, ranks_of_expert[expert]);
  }
  Placement made;
  made.ranks_of_expert_ = std::move(ranks_of_expert);
  return made;
}

bool Placement::has_replicas() const {
  return std::any_of(ranks_of_expert_.begin(), ranks_of_expert_.end(),
                     [](const std::vector<int>& ranks) { return ranks.size() > 1; });
}

std::uint64_t Placement::hash() const {
  std::uint64_t hash = base::mix64(ranks_of_expert_.size());
  for (const std::vector<int>& ranks : ranks_of_expert_) {
    // The length keeps {{0, 1}, {2}} and {{0}, {1, 2}} apart.
    hash = base::combine_hash(hash, ranks.size());
    for (const int rank : ranks) {
      hash = base::combine_hash(hash, static_cast<std::uint64_t>(rank));
    }
  }
  return hash;
}

}  // namespace ferry
