// Compares the results of the way back with its oracle and names the first difference.

#include "support/verify_backward.hpp"

#include <bit>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "support/numbers.hpp"
#include "support/rows.hpp"

namespace ferry::support {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<float> row_of(const BackwardReference& reference) {
  return std::vector<float>(static_cast<std::size_t>(reference.forward().group().hidden));
}

bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

}  // namespace

void fill_grad_out(const BackwardReference& reference, int rank, Matrix grad_out) {
  std::vector<float> values = row_of(reference);
  for (std::int64_t token = 0; token < grad_out.rows; ++token) {
    reference.grad_out(rank, token, values);
    store_values(values, grad_out, token);
  }
}

void fill_grad_rows(const BackwardReference& reference, int rank, Matrix grad_rows) {
  const std::vector<RowOrigin> origins = reference.forward().rows_of(rank);
  std::vector<float> values = row_of(reference);
  for (std::size_t row = 0; row < origins.size(); ++row) {
    reference.grad_row(rank, origins[row], values);
    if (origins[row].is_alignment()) values.assign(values.size(), kNaN);
    store_values(values, grad_rows, static_cast<std::int64_t>(row));
  }
}

std::vector<float> grad_row_weights(const BackwardReference& reference, int rank,
                                    const Plan& plan) {
  const std::vector<RowOrigin> origins = reference.forward().rows_of(rank);
  std::vector<float> gradients;
  const std::size_t slots = origins.empty() ? 0 : plan.topk_idx().size() / origins.size();
  for (std::size_t row = 0; row < origins.size(); ++row) {
    const RowOrigin& origin = origins[row];
    if (slots == 0) {
      gradients.push_back(origin.is_alignment() ? kNaN
                                                : reference.grad_row_weight(
                                                      origin.source, origin.token, origin.expert));
    }
    for (std::size_t slot = 0; slot < slots; ++slot) {
      const std::int32_t local = plan.topk_idx()[row * slots + slot];
      gradients.push_back(local < 0 ? kNaN
                                    : reference.grad_row_weight(
                                          origin.source, origin.token,
                                          plan.local_experts()[static_cast<std::size_t>(local)]));
    }
  }
  return gradients;
}

std::optional<std::string> check_grad_y(const BackwardReference& reference, int rank,
                                        ConstMatrix rows) {
  const std::vector<RowOrigin> origins = reference.forward().rows_of(rank);
  if (rows.rows != static_cast<std::int64_t>(origins.size())) {
    return fmt::format("rank {}: combine_backward gave {} rows, expected {}", rank, rows.rows,
                       origins.size());
  }
  std::vector<float> values = row_of(reference);
  for (std::size_t row = 0; row < origins.size(); ++row) {
    reference.grad_y(rank, origins[row], values);
    if (const auto difference = find_difference(rows, static_cast<std::int64_t>(row), values)) {
      return fmt::format("rank {}: gradient of output {} (expert {}, source rank {}, token {})",
                         rank, to_string(*difference), origins[row].expert, origins[row].source,
                         origins[row].token);
    }
  }
  return std::nullopt;
}

std::optional<std::string> check_grad_weights(const BackwardReference& reference, int rank,
                                              std::span<const float> grad_weights) {
  const Routing& routing = reference.forward().routing(rank);
  for (std::int64_t token = 0; token < routing.num_tokens; ++token) {
    for (int slot = 0; slot < routing.num_topk; ++slot) {
      const float expected = reference.grad_weight(rank, token, slot);
      const float actual = grad_weights[static_cast<std::size_t>(token * routing.num_topk + slot)];
      if (same_bits(actual, expected)) continue;
      return fmt::format("rank {}: gradient of weight [{}, {}] is {} ({:#x}), expected {} ({:#x})",
                         rank, token, slot, actual, std::bit_cast<std::uint32_t>(actual), expected,
                         std::bit_cast<std::uint32_t>(expected));
    }
  }
  return std::nullopt;
}

std::optional<std::string> check_grad_x(const BackwardReference& reference, int rank,
                                        ConstMatrix grad_x) {
  std::vector<float> values = row_of(reference);
  for (std::int64_t token = 0; token < reference.forward().routing(rank).num_tokens; ++token) {
    reference.grad_x(rank, token, values);
    if (const auto difference = find_difference(grad_x, token, values)) {
      return fmt::format("rank {}: gradient of x, {}", rank, to_string(*difference));
    }
  }
  return std::nullopt;
}

}  // namespace ferry::support
