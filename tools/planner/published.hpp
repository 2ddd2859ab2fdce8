#pragma once
// Figures that others have published for what `ferry plan` bounds: the check that a bound is one.

#include <cstdint>
#include <string>
#include <vector>

#include "planner/estimate.hpp"

namespace ferry::planner {

/// In which unit a figure was published.
enum class Unit : std::uint8_t {
  logical_gb_per_s,  ///< per rank; rows that stay on the home node count, too
  us,                ///< duration of the call
};
std::string_view to_string(Unit unit);

struct Published {
  std::string model;
  std::string cluster;
  int num_nodes = 0;
  int ranks_per_node = 8;
  std::int64_t tokens_per_rank = 0;
  double dispatch_element_bytes = 2;  ///< scales of a quantised format included
  double combine_element_bytes = 2;
  std::string what;  ///< who measured what, with the formats of both directions
  Unit unit = Unit::logical_gb_per_s;
  double dispatch = 0;
  double combine = 0;
  std::string source;
};

/// The figures for a scenario: same model, cluster and nodes, routed as the model routes. A rate
/// holds for any number of tokens that fills the links; a duration only for its own.
std::vector<Published> published_for(const Scenario& scenario);

/// How a row reaches several experts of one rank: once for each, or once in all.
enum class Inside : std::uint8_t { expert_major, token_major };

/// The bound of a call in the unit and the element sizes of a published figure.
double bound_like(const Scenario& scenario, const StrategyEstimate& estimate, const Published& one,
                  Call call, Inside inside);

}  // namespace ferry::planner
