#pragma once
// What every plan must say, computed slowly from the definitions with sorted maps. Shares no code
// with the library; only the name of the strategy goes in.

#include <cstdint>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "worlds.hpp"

namespace ferry::test {

struct OracleTarget {
  int rank = 0;
  int expert = 0;
  float weight = 0;
  std::int64_t row = 0;
  bool operator==(const OracleTarget&) const = default;
};

struct OracleItem {
  int token = 0;
  std::vector<OracleTarget> targets;
};

struct Oracle {
  /// Row of (expert, source, token) in the window of the expert's rank.
  std::map<std::tuple<int, int, int>, std::int64_t> row;
  /// Own tokens with experts on the own node, by (rank, token).
  std::map<std::pair<int, int>, std::vector<OracleTarget>> home;
  /// Items by (source, landing rank); only pairs with an item.
  std::map<std::pair<int, int>, std::vector<OracleItem>> out;
  std::map<std::pair<int, int>, std::vector<OracleItem>> back;
  /// Rows that one rank writes into another's window, by (writer, owner).
  std::map<std::pair<int, int>, std::uint64_t> written;
};

Oracle make_oracle(const World& world, std::string_view strategy);

/// The rank of `node` where rows of `source` land under the node strategies.
int oracle_rail_rank(const World& world, int source, int node);

}  // namespace ferry::test
