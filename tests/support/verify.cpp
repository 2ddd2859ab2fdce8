// Compares rows and sums of an exchange with the oracle and names the first difference.

#include "support/verify.hpp"

#include <vector>

#include <fmt/format.h>

#include "support/rows.hpp"

namespace ferry::support {

std::optional<std::string> check_plan(const Reference& reference, int rank, const Plan& plan) {
  const std::vector<RowOrigin> rows = reference.rows_of(rank);
  std::vector<std::int32_t> experts;
  std::vector<std::int64_t> counts;
  for (int expert = 0; expert < reference.group().placement.num_experts(); ++expert) {
    if (reference.group().placement.rank_of(expert) != rank) continue;
    experts.push_back(expert);
    counts.push_back(0);
    for (const RowOrigin& row : rows) counts.back() += row.expert == expert ? 1 : 0;
  }
  if (plan.num_rows() != static_cast<std::int64_t>(rows.size())) {
    return fmt::format("rank {}: the plan has {} rows, expected {}", rank, plan.num_rows(),
                       rows.size());
  }
  if (plan.local_experts().size() != experts.size() ||
      plan.expert_counts().size() != experts.size() ||
      plan.expert_offsets().size() != experts.size() + 1) {
    return fmt::format("rank {}: the plan has {} experts, {} counts and {} offsets, expected {}",
                       rank, plan.local_experts().size(), plan.expert_counts().size(),
                       plan.expert_offsets().size(), experts.size());
  }
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    if (plan.local_experts()[i] != experts[i] || plan.expert_counts()[i] != counts[i] ||
        plan.expert_offsets()[i] != offset) {
      return fmt::format(
          "rank {}: local expert {} is {} with {} rows from row {}, expected {} with {} from {}",
          rank, i, plan.local_experts()[i], plan.expert_counts()[i], plan.expert_offsets()[i],
          experts[i], counts[i], offset);
    }
    offset += counts[i];
  }
  if (plan.expert_offsets().back() != offset) {
    return fmt::format("rank {}: the last offset is {}, expected {}", rank,
                       plan.expert_offsets().back(), offset);
  }
  return std::nullopt;
}

std::optional<std::string> check_rows(const Reference& reference, int rank, ConstMatrix rows) {
  const std::vector<RowOrigin> expected = reference.rows_of(rank);
  const std::int64_t hidden = reference.group().hidden;
  if (rows.rows != static_cast<std::int64_t>(expected.size()) || rows.columns != hidden ||
      rows.dtype != reference.group().dtype) {
    return fmt::format("rank {}: dispatch gave {} rows of {} {}, expected {} of {} {}", rank,
                       rows.rows, rows.columns, to_string(rows.dtype), expected.size(), hidden,
                       to_string(reference.group().dtype));
  }
  std::vector<float> values(static_cast<std::size_t>(hidden));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    reference.row(expected[i], values);
    if (const auto difference = find_difference(rows, static_cast<std::int64_t>(i), values)) {
      return fmt::format("rank {}: dispatched {} (expert {}, source rank {}, token {})", rank,
                         to_string(*difference), expected[i].expert, expected[i].source,
                         expected[i].token);
    }
  }
  return std::nullopt;
}

std::optional<std::string> check_out(const Reference& reference, int rank, ConstMatrix out) {
  std::vector<float> values(static_cast<std::size_t>(reference.group().hidden));
  for (std::int64_t token = 0; token < reference.routing(rank).num_tokens; ++token) {
    reference.out(rank, token, values);
    if (const auto difference = find_difference(out, token, values)) {
      return fmt::format("rank {}: combined {}", rank, to_string(*difference));
    }
  }
  return std::nullopt;
}

void run_experts(const Plan& plan, ConstMatrix rows, Matrix y) {
  for (std::size_t i = 0; i < plan.local_experts().size(); ++i) {
    for (std::int64_t row = plan.expert_offsets()[i]; row < plan.expert_offsets()[i + 1]; ++row) {
      apply_expert(plan.local_experts()[i], rows, y, row);
    }
  }
}

}  // namespace ferry::support
