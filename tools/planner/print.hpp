#pragma once
// The two forms in which a plan is told: a table for people, one JSON object per line and strategy
// for programs.

#include <string>
#include <vector>

#include "planner/estimate.hpp"
#include "planner/options.hpp"
#include "planner/scenario.hpp"

namespace ferry::planner {

/// All that is printed.
struct PlanReport {
  const PlanOptions& options;
  const Scenario& scenario;
  std::uint64_t range_tokens = 0;
  std::vector<StrategyEstimate> estimates;
};

/// One line, schema "ferry.plan/1".
std::string to_json(const PlanReport& report, const StrategyEstimate& estimate);
/// What was planned, one line per strategy, published figures where there are any, sources.
std::string to_table(const PlanReport& report);

}  // namespace ferry::planner
