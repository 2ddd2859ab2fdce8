#pragma once
// The strategies as rows of one table. They differ only in which rank a row lands on and in what
// one crossing row stands for; everything after that is the same code for all.

#include <span>
#include <string_view>

#include "ferry/options.hpp"

namespace ferry::plan {

/// What one row that crosses nodes stands for.
enum class RowUnit : std::uint8_t { token_expert, token_rank, token_node };

struct StrategyInfo {
  Strategy id;
  std::string_view name;
  RowUnit unit;
  bool sends_every_token;  ///< dispatch sends tokens to nodes where they have no expert, too
  std::string_view cost;   ///< one line: rows that cross per token, out / back
};

/// All strategies, in the order of the enum.
std::span<const StrategyInfo> strategies();
const StrategyInfo& info(Strategy strategy);
/// True when rows land on the node's rail rank, false when on the rank that holds the expert.
inline bool lands_on_rail(const StrategyInfo& strategy) {
  return strategy.unit == RowUnit::token_node;
}

}  // namespace ferry::plan
