#pragma once
// What a Mixture-of-Experts layer of well-known models looks like to the exchange, with the source
// of each figure.

#include <cstdint>
#include <span>
#include <string>

#include "common/generator.hpp"
#include "ferry/dtype.hpp"

namespace ferry::planner {

struct Model {
  std::string name;
  std::int64_t hidden = 0;
  int num_experts = 0;  ///< routed ones; shared experts stay on every rank and send nothing
  int num_topk = 0;
  int num_groups = 1;  ///< 1 = no group limit
  int groups_per_token = 1;
  DType dtype = DType::bf16;
  std::string source;

  /// How its router spreads tokens when nothing is known of them: uniform, within the group limit.
  tools::RoutingPattern routing() const;
  tools::RouterShape shape() const { return {num_experts, num_topk}; }
};

std::span<const Model> models();
/// Errors: UsageError that lists the names
const Model& model_of(const std::string& name);

}  // namespace ferry::planner
