// What failed in one exchange: see failures.hpp.

#include "exchange/failures.hpp"

#include <algorithm>
#include <functional>
#include <string_view>

#include "base/hash.hpp"

namespace ferry::detail {

Failures::Failed& Failures::entry(std::uint32_t plan) {
  Failed& failed = plans_[plan];
  failed.left.resize(node_size_, false);
  return failed;
}

bool Failures::add(std::uint32_t plan, const Error& error) {
  if (ever_.contains(plan)) return false;
  entry(plan).error = error;
  lose_order();
  ever_.emplace(plan, std::hash<std::string_view>()(error.what()));
  digest_ ^= base::mix64(std::uint64_t{plan} + 1);
  return true;
}

const Error* Failures::find(std::uint32_t plan) const {
  const auto found = plans_.find(plan);
  return found != plans_.end() && found->second.error ? &*found->second.error : nullptr;
}

bool Failures::knows(const Error& error) const {
  const std::size_t hash = std::hash<std::string_view>()(error.what());
  return std::ranges::any_of(ever_, [hash](const auto& failed) { return failed.second == hash; });
}

void Failures::mark_left(std::uint32_t plan, int local_rank) {
  if (ever_.contains(plan) && !plans_.contains(plan)) return;  // forgotten
  entry(plan).left[local_rank] = true;
}

bool Failures::has_left(std::uint32_t plan, int local_rank) const {
  const auto found = plans_.find(plan);
  return found != plans_.end() && found->second.left[local_rank];
}

bool Failures::all_left(std::uint32_t plan) const {
  const auto found = plans_.find(plan);
  return found != plans_.end() && std::ranges::all_of(found->second.left, std::identity{});
}

std::vector<std::uint32_t> Failures::known() const {
  std::vector<std::uint32_t> plans;
  for (const auto& [plan, failed] : plans_) plans.push_back(plan);
  return plans;
}

void Failures::lose_order() {
  order_lost_ = true;
  agreed_ = false;
}

void Failures::compare(const std::vector<std::uint16_t>& digests) {
  const std::uint16_t own = digest();
  agreed_ = std::ranges::all_of(digests, [own](std::uint16_t other) { return other == own; });
}

// A rank that still holds a failed plan may make calls on it that others leave out.
bool Failures::open_plan() {
  const bool lost = order_lost_;
  if (agreed_ && plans_.empty()) order_lost_ = false;
  return lost;
}

}  // namespace ferry::detail
