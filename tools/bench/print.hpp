#pragma once
// The two forms in which a result is told: a table for people, one JSON object per line and
// strategy for programs.

#include <optional>
#include <string>
#include <vector>

#include "bench/result.hpp"

namespace ferry::bench {

/// One line, schema "ferry.bench/1".
std::string to_json(const RunContext& context, const StrategyResult& result,
                    const std::vector<BaselineResult>& baselines);
/// The line of a strategy whose verification failed: what was run, verified = false, the text; no
/// times, since what was timed was wrong. Without a strategy it was that of a baseline.
std::string to_json_failed(const RunContext& context, std::optional<Strategy> strategy,
                           const std::string& text);

/// The heading, one line per strategy, the baselines, and the advice.
std::string to_table(const RunContext& context, const RunResult& result);

}  // namespace ferry::bench
