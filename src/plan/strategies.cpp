// The table of strategies, and their names for options and messages.

#include "plan/strategies.hpp"

#include <array>
#include <cstddef>

#include "base/check.hpp"

namespace ferry {

std::string_view to_string(Strategy strategy) {
  switch (strategy) {
    case Strategy::flat: return "flat";
    case Strategy::rank_dedup: return "rank_dedup";
    case Strategy::node_gather: return "node_gather";
    case Strategy::node_dedup: return "node_dedup";
  }
  return "unknown";
}

std::optional<Strategy> strategy_from_string(std::string_view name) {
  for (const plan::StrategyInfo& row : plan::strategies()) {
    if (row.name == name) return row.id;
  }
  return std::nullopt;
}

namespace plan {
namespace {

constexpr std::array<StrategyInfo, 4> kStrategies{{
    {.id = Strategy::flat,
     .name = "flat",
     .unit = RowUnit::token_expert,
     .sends_every_token = false,
     .cost = "remote (token, expert) pairs / the same: k(1-1/N) each way under uniform routing"},
    {.id = Strategy::rank_dedup,
     .name = "rank_dedup",
     .unit = RowUnit::token_rank,
     .sends_every_token = false,
     .cost = "distinct remote ranks of a token / the same"},
    {.id = Strategy::node_gather,
     .name = "node_gather",
     .unit = RowUnit::token_node,
     .sends_every_token = true,
     .cost = "N-1, before routing is known / distinct remote nodes of a token"},
    {.id = Strategy::node_dedup,
     .name = "node_dedup",
     .unit = RowUnit::token_node,
     .sends_every_token = false,
     .cost = "distinct remote nodes of a token / the same: the fewest that unicast can need"},
}};

}  // namespace

std::span<const StrategyInfo> strategies() { return kStrategies; }

const StrategyInfo& info(Strategy strategy) {
  const auto at = static_cast<std::size_t>(strategy);
  FERRY_ASSERT(at < kStrategies.size() && kStrategies[at].id == strategy,
               "strategy number {} is not in the table", at);
  return kStrategies[at];
}

}  // namespace plan
}  // namespace ferry
