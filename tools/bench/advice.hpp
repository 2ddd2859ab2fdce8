#pragma once
// What the figures mean, in plain words. Every sentence is chosen by measured figures and quotes
// them; none is a rule of thumb.

#include <string>
#include <vector>

#include "bench/result.hpp"

namespace ferry::bench {

/// The strategy with the smallest total. Requires: at least one result
const StrategyResult& best_of(const std::vector<StrategyResult>& results);
/// One line: why the best strategy is the best here.
std::string why_best(const RunContext& context, const std::vector<StrategyResult>& results);
/// One line: which change of the command line to try next.
std::string what_next(const RunContext& context, const std::vector<StrategyResult>& results);

}  // namespace ferry::bench
