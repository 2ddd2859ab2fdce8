#pragma once
// A layer of a routing trace, shared out to the ranks: whole sequences to each, as data-parallel
// training would.

#include <cstdint>
#include <string>
#include <vector>

#include "common/trace.hpp"
#include "support/routing.hpp"

namespace ferry::tools {

struct TraceRouting {
  std::vector<support::RoutingData> ranks;  ///< by rank
  std::vector<std::string> notes;           ///< how the tokens were shared out, and what was cut
};

/// One limit of tokens per rank; negative = no limit.
/// Errors: UsageError, EnvironmentError
TraceRouting share_out(const Trace& trace, int layer, const std::vector<std::int64_t>& limits);

/// --layer without --trace. Errors: UsageError
void check_layer(const std::string& trace_directory, int layer);

}  // namespace ferry::tools
