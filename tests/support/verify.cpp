// Compares rows and sums of an exchange with the oracle and names the first difference.

#include "support/verify.hpp"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "support/rows.hpp"

namespace ferry::support {
namespace {

std::string describe(const RowOrigin& origin) {
  if (origin.is_alignment()) return "alignment row";
  return fmt::format("expert {}, source rank {}, token {}", origin.expert, origin.source,
                     origin.token);
}

}  // namespace

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
    reference.row(rank, expected[i], values);
    if (const auto difference = find_difference(rows, static_cast<std::int64_t>(i), values)) {
      return fmt::format("rank {}: dispatched {} ({})", rank, to_string(*difference),
                         describe(expected[i]));
    }
  }
  return std::nullopt;
}

namespace {

constexpr std::int64_t kRowStart = 64;
constexpr std::int64_t kExtraStart = 16;

// A stride holds a row and its extra bytes and no more than it takes to start both where they may;
// the window is exactly its rows.
std::optional<std::string> check_window(const Group& group, int rank, const ExpertRows& rows) {
  const ConstMatrix matrix = rows.matrix();
  const auto row_bytes = group.hidden * static_cast<std::int64_t>(element_bytes(group.dtype));
  const std::int64_t needed = row_bytes + group.extra_bytes;
  const std::int64_t stride = matrix.stride_bytes();
  if (stride % kRowStart != 0 || stride < needed || stride >= needed + kRowStart + kExtraStart) {
    return fmt::format("rank {}: a stride of {} bytes for rows of {} and {} extra bytes", rank,
                       stride, row_bytes, group.extra_bytes);
  }
  if (reinterpret_cast<std::uintptr_t>(matrix.data) % kRowStart != 0) {
    return fmt::format("rank {}: rows do not start at 64-byte boundaries", rank);
  }
  const std::uint64_t planned = rows.plan().summary().window_bytes;
  if (planned != static_cast<std::uint64_t>(matrix.rows * stride)) {
    return fmt::format("rank {}: window_bytes is {} for {} rows with a stride of {}", rank, planned,
                       matrix.rows, stride);
  }
  return std::nullopt;
}

std::optional<std::string> check_extra(const Reference& reference, int rank,
                                       const ExpertRows& rows) {
  const std::int64_t extra_bytes = reference.group().extra_bytes;
  const ConstMatrix matrix = rows.matrix();
  const std::vector<RowOrigin> origins = reference.rows_of(rank);
  std::vector<std::byte> expected(static_cast<std::size_t>(extra_bytes));
  for (std::int64_t row = 0; row < matrix.rows; ++row) {
    const std::span<const std::byte> actual = rows.extra(row);
    const RowOrigin& origin = origins[static_cast<std::size_t>(row)];
    if (actual.size() != expected.size()) {
      return fmt::format("rank {}: row {} has {} extra bytes, expected {}", rank, row,
                         actual.size(), extra_bytes);
    }
    if (extra_bytes == 0) continue;
    const std::byte* const values_end =
        matrix.row(row) + matrix.columns * static_cast<std::int64_t>(element_bytes(matrix.dtype));
    if (actual.data() < values_end ||
        actual.data() + extra_bytes > matrix.row(row) + matrix.stride_bytes()) {
      return fmt::format("rank {}: the extra bytes of row {} lie outside of its stride", rank, row);
    }
    reference.extra(origin, expected);
    const auto [got, wanted] = std::mismatch(actual.begin(), actual.end(), expected.begin());
    if (got != actual.end()) {
      return fmt::format("rank {}: extra byte {} of row {} is {:#x}, expected {:#x} ({})", rank,
                         got - actual.begin(), row, std::to_integer<int>(*got),
                         std::to_integer<int>(*wanted), describe(origin));
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> check_rows(const Reference& reference, int rank,
                                      const ExpertRows& rows) {
  if (auto fault = check_rows(reference, rank, rows.matrix())) return fault;
  if (auto fault = check_window(reference.group(), rank, rows)) return fault;
  return check_extra(reference, rank, rows);
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

namespace {

void run_token_major(const Plan& plan, ConstMatrix rows, Matrix y) {
  for (std::int64_t row = 0; row < plan.num_rows(); ++row) {
    const std::size_t num_topk = plan.topk_idx().size() / static_cast<std::size_t>(plan.num_rows());
    const auto first = static_cast<std::size_t>(row) * num_topk;
    WeightedExperts experts;
    for (std::size_t slot = 0; slot < num_topk; ++slot) {
      const std::int32_t local = plan.topk_idx()[first + slot];
      if (local < 0) continue;
      experts.experts.push_back(plan.local_experts()[static_cast<std::size_t>(local)]);
      experts.weights.push_back(plan.topk_weights()[first + slot]);
    }
    apply_experts(experts, rows, y, row);
  }
}

}  // namespace

void run_experts(const Plan& plan, ConstMatrix rows, Matrix y, WeightMode weights) {
  if (plan.expert_offsets().empty()) return run_token_major(plan, rows, y);
  for (std::size_t i = 0; i < plan.local_experts().size(); ++i) {
    const int expert = plan.local_experts()[i];
    const std::int64_t first = plan.expert_offsets()[i];
    for (std::int64_t row = first; row < first + plan.expert_counts()[i]; ++row) {
      if (weights == WeightMode::at_expert) {
        const float weight = plan.row_sources().weight[static_cast<std::size_t>(row)];
        apply_experts({{expert}, {weight}}, rows, y, row);
      } else {
        apply_expert(expert, rows, y, row);
      }
    }
  }
}

}  // namespace ferry::support
