// Lanes. Every function counts first and reserves exactly: a plan allocates per lane, and only
// where an earlier one left too little; it is linear in the entries of its memberships.

#include "plan/lanes.hpp"

#include <cstddef>
#include <numeric>
#include <span>

#include "base/check.hpp"
#include "plan/memory.hpp"

namespace ferry::plan {
namespace {

/// Columns [first, end) of a node.
struct ColumnRange {
  int first = 0;
  int end = 0;
  /// One comparison, without a branch to mispredict: a holder rank skips most of the entries.
  bool contains(std::uint16_t column) const {
    return static_cast<unsigned>(column - first) < static_cast<unsigned>(end - first);
  }
};

ColumnRange columns_of(const PlanContext& context, int rank) {
  const int first = context.experts.first_column(rank);
  return {first, first + static_cast<int>(context.experts.experts_of_rank(rank).size())};
}

void set_ranges(Lane& lane, std::uint64_t source_tokens, std::uint64_t range_tokens) {
  const std::uint64_t num_ranges = (source_tokens + range_tokens - 1) / range_tokens;
  lane.range_begin.assign(1, 0);
  lane.range_begin.reserve(num_ranges + 1);
  std::size_t item = 0;
  for (std::uint64_t range = 0; range < num_ranges; ++range) {
    const std::uint64_t end_token = (range + 1) * range_tokens;
    while (item < lane.tokens.size() && lane.tokens[item] < end_token) ++item;
    lane.range_begin.push_back(static_cast<std::uint32_t>(item));
  }
}

void set_values(LanePair& pair, const PlanContext& context) {
  const Lane& back = pair.back();
  pair.values.peer = back.peer;
  pair.values.range_begin.clear();
  pair.values.range_begin.reserve(back.range_begin.size());
  FERRY_ASSERT(std::uint64_t{back.target_begin.back()} * context.values_per_target <= UINT32_MAX,
               "{} targets with {} weights each on one lane", back.target_begin.back(),
               context.values_per_target);
  for (const std::uint32_t item : back.range_begin) {
    pair.values.range_begin.push_back(back.target_begin[item] * context.values_per_target);
  }
}

void finish(LanePair& pair, const Crossing& crossing, int peer) {
  const std::uint64_t range_tokens = crossing.context.range_tokens;
  pair.dispatch.peer = peer;
  set_ranges(pair.dispatch, crossing.membership.num_tokens, range_tokens);
  for (Lane& lane : pair.combine) {
    lane.peer = peer;
    set_ranges(lane, crossing.membership.num_tokens, range_tokens);
  }
  set_values(pair, crossing.context);
}

void set_all_tokens(const Membership& membership, Lane& lane) {
  resize_for_overwrite(lane.tokens, membership.num_tokens);
  std::iota(lane.tokens.begin(), lane.tokens.end(), 0U);
}

Directions directions(const Crossing& crossing) {
  const bool every_token = info(crossing.context.strategy).sends_every_token;
  return every_token ? Directions::apart : Directions::same;
}

/// Source end where rows land on the rail rank: one lane for the node.
void add_outgoing_to_rail(const Crossing& crossing, LaneList& outgoing) {
  const Membership& membership = crossing.membership;
  const bool every_token = info(crossing.context.strategy).sends_every_token;
  if (membership.tokens.empty() && !(every_token && membership.num_tokens > 0)) return;
  LanePair& pair = outgoing.add(directions(crossing));
  Lane& back = every_token ? pair.combine.front() : pair.dispatch;
  back.tokens = membership.tokens;
  back.target_begin = membership.entry_begin;
  if (every_token) set_all_tokens(membership, pair.dispatch);
  finish(pair, crossing, crossing.context.topology.rail_rank(crossing.source, crossing.node));
}

/// One entry of a membership, seen from the rank that holds its expert.
struct RankEntry {
  std::uint32_t entry = 0;
  std::uint32_t place = 0;  ///< of the rank in the node
  std::uint32_t token = 0;
  bool makes_item =
      false;  ///< all do for (token, expert), the first of each rank for (token, rank)
};

/// Calls visit(RankEntry) for every entry of a membership.
template <typename Visit>
void for_each_rank_entry(const Crossing& crossing, std::span<const std::uint16_t> local_rank,
                         const Visit& visit) {
  const Membership& membership = crossing.membership;
  const bool each_expert = info(crossing.context.strategy).unit == RowUnit::token_expert;
  const std::size_t num_ranks = crossing.context.topology.ranks_of(crossing.node).size();
  std::vector<std::uint64_t> last_seen(num_ranks);  // token + 1
  for (std::size_t i = 0; i < membership.tokens.size(); ++i) {
    const std::uint32_t token = membership.tokens[i];
    for (std::uint32_t entry = membership.entry_begin[i]; entry < membership.entry_begin[i + 1];
         ++entry) {
      const std::uint32_t place = local_rank[membership.columns[entry]];
      const bool seen = last_seen[place] == std::uint64_t{token} + 1;
      last_seen[place] = std::uint64_t{token} + 1;
      visit(RankEntry{entry, place, token, each_expert || !seen});
    }
  }
}

/// Source end where rows land on the ranks that hold the experts: one lane for each of them.
void add_outgoing_to_holders(const Crossing& crossing, LaneList& outgoing) {
  const PlanContext& context = crossing.context;
  const std::vector<int>& ranks = context.topology.ranks_of(crossing.node);
  const std::vector<std::uint16_t> local_rank =
      local_ranks(context.experts, context.topology, crossing.node);
  const bool has_weights = info(context.strategy).unit == RowUnit::token_expert;

  std::vector<std::size_t> num_items(ranks.size());
  for_each_rank_entry(crossing, local_rank, [&](const RankEntry& entry) {
    num_items[entry.place] += entry.makes_item ? 1 : 0;
  });
  std::vector<std::size_t> lane_of(ranks.size());
  for (std::size_t place = 0; place < ranks.size(); ++place) {
    if (num_items[place] == 0) continue;
    lane_of[place] = outgoing.size();
    Lane& lane = outgoing.add(directions(crossing)).dispatch;
    lane.tokens.reserve(num_items[place]);
    lane.target_begin.reserve(num_items[place] + 1);
    lane.target_begin.push_back(0);
    if (has_weights) lane.weights.reserve(num_items[place]);
  }
  for_each_rank_entry(crossing, local_rank, [&](const RankEntry& entry) {
    Lane& lane = outgoing[lane_of[entry.place]].dispatch;
    if (!entry.makes_item) {
      ++lane.target_begin.back();
      return;
    }
    lane.tokens.push_back(entry.token);
    lane.target_begin.push_back(lane.target_begin.back() + 1);
    if (has_weights) lane.weights.push_back(crossing.membership.weights[entry.entry]);
  });
  for (std::size_t place = 0; place < ranks.size(); ++place) {
    if (num_items[place] > 0) finish(outgoing[lane_of[place]], crossing, ranks[place]);
  }
}

/// Stable, so that slots stay ascending inside a rank. At most 64 targets, most often in order or
/// nearly so: insertion beats std::stable_sort, which allocates.
void order_by_rank(std::span<Target> targets) {
  for (std::size_t i = 1; i < targets.size(); ++i) {
    const Target moved = targets[i];
    std::size_t at = i;
    for (; at > 0 && targets[at - 1].local_rank > moved.local_rank; --at) {
      targets[at] = targets[at - 1];
    }
    targets[at] = moved;
  }
}

void reserve_landing(const Membership& membership, RowUnit unit, ColumnRange columns, Lane& lane) {
  std::size_t num_items = 0;
  std::size_t num_targets = 0;
  for (std::size_t i = 0; i < membership.tokens.size(); ++i) {
    const std::size_t before = num_targets;
    for (std::uint32_t entry = membership.entry_begin[i]; entry < membership.entry_begin[i + 1];
         ++entry) {
      num_targets += columns.contains(membership.columns[entry]) ? 1 : 0;
    }
    if (num_targets > before) ++num_items;
  }
  if (unit == RowUnit::token_expert) num_items = num_targets;
  lane.tokens.reserve(num_items);
  lane.target_begin.reserve(num_items + 1);
  lane.targets.clear();
  lane.targets.reserve(num_targets);
}

/// Where every entry lands here: items and targets are those of the membership.
void land_all(const Membership& membership, RowCursor cursor, Lane& lane) {
  lane.tokens = membership.tokens;
  lane.target_begin = membership.entry_begin;
  resize_for_overwrite(lane.targets, membership.num_entries());
  for (std::size_t at = 0; at < membership.num_entries(); ++at) {
    lane.targets[at] = cursor.take(membership.columns[at], membership.weights[at]);
  }
  for (std::size_t i = 0; i < lane.tokens.size(); ++i) {
    const std::uint32_t first = lane.target_begin[i];
    order_by_rank(std::span(lane.targets).subspan(first, lane.target_begin[i + 1] - first));
  }
}

/// Items with at least one target in `columns`, which are those of one rank, and their targets.
void land(const Crossing& crossing, ColumnRange columns, RowCursor cursor, Lane& lane) {
  const Membership& membership = crossing.membership;
  const RowUnit unit = info(crossing.context.strategy).unit;
  reserve_landing(membership, unit, columns, lane);
  lane.target_begin.push_back(0);
  const auto end_item = [&lane](std::uint32_t token) {
    lane.tokens.push_back(token);
    lane.target_begin.push_back(static_cast<std::uint32_t>(lane.targets.size()));
  };
  for (std::size_t i = 0; i < membership.tokens.size(); ++i) {
    const std::size_t first = lane.targets.size();
    for (std::uint32_t entry = membership.entry_begin[i]; entry < membership.entry_begin[i + 1];
         ++entry) {
      if (!columns.contains(membership.columns[entry])) continue;
      lane.targets.push_back(cursor.take(membership.columns[entry], membership.weights[entry]));
      if (unit == RowUnit::token_expert) end_item(membership.tokens[i]);
    }
    if (unit == RowUnit::token_expert || lane.targets.size() == first) continue;
    end_item(membership.tokens[i]);
  }
}

/// The lane with every token of the source: those without an expert here have no targets.
void land_every_token(const Lane& lane, const Membership& membership, Lane& every) {
  set_all_tokens(membership, every);
  every.targets = lane.targets;
  resize_for_overwrite(every.target_begin, membership.num_tokens + 1);
  every.target_begin[0] = 0;
  std::size_t item = 0;
  for (std::uint64_t token = 0; token < membership.num_tokens; ++token) {
    if (item < lane.tokens.size() && lane.tokens[item] == token) ++item;
    every.target_begin[token + 1] = lane.target_begin[item];
  }
}

/// All but the targets, which only landing lanes have; they are written as a whole.
void clear(Lane& lane) {
  lane.peer = -1;
  lane.tokens.clear();
  lane.range_begin.assign(1, 0);
  lane.target_begin.clear();
  lane.weights.clear();
}

}  // namespace

LanePair& LaneList::add(Directions directions) {
  if (used_ == lanes_.size()) lanes_.emplace_back();
  LanePair& pair = lanes_[used_++];
  clear(pair.dispatch);
  pair.combine.resize(directions == Directions::apart ? 1 : 0);
  for (Lane& lane : pair.combine) clear(lane);
  clear(pair.values);
  return pair;
}

void add_outgoing(const Crossing& crossing, LaneList& outgoing) {
  if (lands_on_rail(info(crossing.context.strategy))) {
    add_outgoing_to_rail(crossing, outgoing);
  } else {
    add_outgoing_to_holders(crossing, outgoing);
  }
}

void add_landing(const Crossing& crossing, int rank, RowCursor cursor, LaneList& landing) {
  LanePair& pair = landing.add(directions(crossing));
  Lane& back = pair.combine.empty() ? pair.dispatch : pair.combine.front();
  if (lands_on_rail(info(crossing.context.strategy))) {
    land_all(crossing.membership, cursor, back);
  } else {
    land(crossing, columns_of(crossing.context, rank), cursor, back);
  }
  if (!pair.combine.empty()) land_every_token(back, crossing.membership, pair.dispatch);
  if (pair.dispatch.tokens.empty()) return landing.drop_last();
  finish(pair, crossing, crossing.source);
}

}  // namespace ferry::plan
