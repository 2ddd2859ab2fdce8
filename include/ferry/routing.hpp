#pragma once
// The router's decision for one rank's tokens. A view: it owns nothing.

#include <cstdint>
#include <span>

namespace ferry {

/// Shapes: topk_idx [num_tokens, num_topk] row-major, -1 = no expert; topk_weights the same shape,
///         FP32, or empty for weight 1/num_topk each (only the first num_tokens rows are read).
/// Exactly one of topk_idx32 and topk_idx64 is set when num_tokens > 0; neither is copied.
struct Routing {
  std::int64_t num_tokens = 0;
  int num_topk = 1;
  std::span<const std::int32_t> topk_idx32{};
  std::span<const std::int64_t> topk_idx64{};
  std::span<const float> topk_weights{};

  static Routing of(std::int64_t num_tokens, int num_topk, std::span<const std::int32_t> topk_idx,
                    std::span<const float> topk_weights = {}) {
    return {num_tokens, num_topk, topk_idx, {}, topk_weights};
  }
  static Routing of(std::int64_t num_tokens, int num_topk, std::span<const std::int64_t> topk_idx,
                    std::span<const float> topk_weights = {}) {
    return {num_tokens, num_topk, {}, topk_idx, topk_weights};
  }
  std::int64_t expert(std::int64_t token, int slot) const {
    const auto at = static_cast<std::size_t>(token * num_topk + slot);
    return topk_idx64.empty() ? topk_idx32[at] : topk_idx64[at];
  }
  float weight(std::int64_t token, int slot) const {
    return topk_weights.empty() ? 1.0F / static_cast<float>(num_topk)
                                : topk_weights[static_cast<std::size_t>(token * num_topk + slot)];
  }
};

}  // namespace ferry
