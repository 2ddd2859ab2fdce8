#pragma once
// Routing generators: what a router might decide, the same for the same seed.

#include <cstdint>
#include <span>
#include <vector>

#include "ferry/routing.hpp"

namespace ferry::support {

/// A routing that owns its numbers.
struct RoutingData {
  std::int64_t num_tokens = 0;
  int num_topk = 1;
  std::vector<std::int32_t> topk_idx;
  std::vector<float> topk_weights;  ///< empty: none given

  Routing view() const {
    return Routing::of(num_tokens, num_topk, std::span<const std::int32_t>(topk_idx), topk_weights);
  }
};

enum class WeightKind : std::uint8_t {
  softmax,  ///< positive, sum 1
  odd,      ///< exact zeros, subnormals, negatives and large values among them
  none,     ///< no weights are given
};

struct RoutingSpec {
  int num_experts = 1;
  int num_topk = 1;
  /// Popularity of the i-th most popular expert is 1 / (i + 1)^zipf; 0 = uniform. Which expert is
  /// popular is a fixed shuffle, the same on all ranks.
  double zipf = 0;
  double none_share = 0;    ///< of slots that become -1
  double repeat_share = 0;  ///< of slots that name the expert of an earlier slot of the token again
  bool all_to_first = false;  ///< every slot names expert 0
  WeightKind weights = WeightKind::softmax;
};

/// The routing of one rank. Slots beyond num_experts different experts are -1.
RoutingData make_routing(const RoutingSpec& spec, std::int64_t num_tokens, std::uint64_t seed,
                         int rank);
/// The routing of all ranks, tokens[r] tokens on rank r.
std::vector<RoutingData> make_all_routing(const RoutingSpec& spec,
                                          std::span<const std::int64_t> tokens, std::uint64_t seed);
std::vector<Routing> views(std::span<const RoutingData> routing);

}  // namespace ferry::support
