#pragma once
// Generated routing as --routing names it: the one generator of all commands. It shapes what
// support::make_routing draws, so that equal flags and an equal seed give every command the same
// routing.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/routing.hpp"

namespace ferry::tools {

/// How generated routing spreads over experts.
struct RoutingPattern {
  enum class Kind : std::uint8_t { uniform, zipf, khot, group };
  Kind kind = Kind::uniform;
  double zipf_exponent = 0;  ///< zipf: popularity of the i-th expert is 1 / i^exponent
  int num_hot = 0;           ///< khot: experts that every token goes to first
  int num_groups = 1;        ///< group: consecutive groups of equal size
  int groups_per_token = 1;  ///< group: groups that a token's experts are drawn from

  bool operator==(const RoutingPattern&) const = default;
};

/// "uniform", "zipf:S", "khot:K" or "group:G,M".
/// Errors: UsageError that says what is allowed
RoutingPattern parse_routing(const std::string& text);
/// The text that parse_routing takes.
std::string to_string(const RoutingPattern& pattern);

/// Experts of the layer, and experts per token.
struct RouterShape {
  int num_experts = 1;
  int num_topk = 1;
};

/// Errors: UsageError where top-k or the pattern does not fit the experts
void check_pattern(const RoutingPattern& pattern, const RouterShape& shape);

/// The hot experts of khot:K: spread evenly over the ids, floor(i * num_experts / K), so that they
/// are as far apart as any placement in blocks allows.
std::vector<std::int32_t> hot_experts(int num_experts, int num_hot);

/// The routing of all ranks, tokens[r] tokens on rank r. Every token names num_topk different
/// experts:
///   uniform  any of them with the same chance
///   zipf     the popular ones more often
///   khot     min(num_topk, K) of the K hot ones; the rest uniform over the others
///   group    groups_per_token of the groups, uniform; then uniform over the experts of those
/// Requires: check_pattern
std::vector<support::RoutingData> generate_routing(const RoutingPattern& pattern,
                                                   const RouterShape& shape,
                                                   std::span<const std::int64_t> tokens,
                                                   std::uint64_t seed);

}  // namespace ferry::tools
