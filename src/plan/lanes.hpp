#pragma once
// The lanes of one source to one remote node, made at both of their ends from the same membership.
// Invariant: both ends derive items only from (membership, strategy, placement), so that tokens and
// range_begin agree without a message.

#include <cstdint>
#include <span>
#include <vector>

#include "plan/rank_plan.hpp"

namespace ferry::plan {

/// Tokens of `source` that go to `node`.
struct Crossing {
  const PlanContext& context;
  int source = -1;
  int node = -1;
  const Membership& membership;
};

/// Gives out the rows of one source on one node, column by column, token by token.
struct RowCursor {
  std::span<const std::uint32_t> local_rank;  ///< per column
  std::span<std::uint64_t> next_row;          ///< per column

  Target take(std::uint16_t column, float weight) {
    return {.local_rank = local_rank[column], .weight = weight, .row = next_row[column]++};
  }
};

/// Appends the source ends, ascending rank; none where nothing crosses.
void add_outgoing(const Crossing& crossing, std::vector<LanePair>& outgoing);

/// Appends the end at the landing rank `rank`; nothing where no row of the source lands there.
void add_landing(const Crossing& crossing, int rank, RowCursor& cursor,
                 std::vector<LanePair>& landing);

}  // namespace ferry::plan
