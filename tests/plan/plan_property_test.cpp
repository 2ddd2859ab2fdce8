// What holds for the plans of any world: windows, counts, rows between the ranks of a node,
// fragments, rails.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/traffic.hpp"
#include "planned.hpp"

namespace ferry::test {
namespace {

/// What arrives in each row of the windows, found by following all targets of all plans.
struct Arrival {
  std::int64_t row;
  int expert, source;
  std::uint32_t token;
};
std::vector<std::vector<Arrival>> follow_targets(const Planned& planned) {
  std::vector<std::vector<Arrival>> windows(planned.plans.size());
  const auto arrive = [&](int node, const plan::Target& target, int source, std::uint32_t token) {
    const OracleTarget to = as_oracle(planned, node, target);
    windows[static_cast<std::size_t>(to.rank)].push_back({to.row, to.expert, source, token});
  };
  for (const plan::RankPlan& plan : planned.plans) {
    const int node = planned.topology.node_of(plan.rank);
    for (std::uint32_t token = 0; token < plan.num_tokens; ++token) {
      for (std::uint32_t i = plan.home_begin[token]; i < plan.home_begin[token + 1]; ++i) {
        arrive(node, plan.home_targets[i], plan.rank, token);
      }
    }
    for (const plan::LanePair& pair : plan.landing) {
      const plan::Lane& lane = pair.dispatch;
      for (std::size_t item = 0; item < lane.num_items(); ++item) {
        for (std::uint32_t i = lane.target_begin[item]; i < lane.target_begin[item + 1]; ++i) {
          arrive(node, lane.targets[i], lane.peer, lane.tokens[item]);
        }
      }
    }
  }
  return windows;
}

TEST(PlanProperty, windows_are_filled_once_and_ordered_by_expert_source_token) {
  for_each_world([](const Planned& planned) {
    std::vector<std::vector<Arrival>> windows = follow_targets(planned);
    for (std::size_t rank = 0; rank < windows.size(); ++rank) {
      std::vector<Arrival>& rows = windows[rank];
      ASSERT_EQ(static_cast<std::int64_t>(rows.size()), planned.plans[rank].num_rows());
      std::sort(rows.begin(), rows.end(),
                [](const Arrival& a, const Arrival& b) { return a.row < b.row; });
      for (std::size_t at = 0; at < rows.size(); ++at) {
        ASSERT_EQ(rows[at].row, static_cast<std::int64_t>(at));
        if (at == 0) continue;
        const auto key = [](const Arrival& a) { return std::tuple(a.expert, a.source, a.token); };
        ASSERT_LT(key(rows[at - 1]), key(rows[at])) << "rank " << rank << " row " << at;
      }
    }
  });
}

TEST(PlanProperty, counts_are_the_histogram_of_ids) {
  for_each_world([](const Planned& planned) {
    std::map<int, std::int64_t> histogram;
    for (const auto& [key, row] : planned.oracle.row) ++histogram[std::get<0>(key)];
    for (const plan::RankPlan& plan : planned.plans) {
      std::vector<std::int64_t> expected;
      const auto& map = planned.world.rank_of_expert;
      for (std::size_t expert = 0; expert < map.size(); ++expert) {
        if (map[expert] == plan.rank) expected.push_back(histogram[static_cast<int>(expert)]);
      }
      ASSERT_EQ(plan.expert_counts, expected);
      ASSERT_EQ(plan.expert_offsets.size(), expected.size() + 1);
      for (std::size_t at = 0; at < expected.size(); ++at) {
        ASSERT_EQ(plan.expert_offsets[at + 1] - plan.expert_offsets[at], expected[at]);
      }
    }
  });
}

TEST(PlanProperty, written_rows_agree_between_writer_and_owner) {
  for_each_world([](const Planned& planned) {
    for (int node = 0; node < planned.topology.num_nodes(); ++node) {
      const std::vector<int>& ranks = planned.topology.ranks_of(node);
      for (std::size_t writer = 0; writer < ranks.size(); ++writer) {
        for (std::size_t owner = 0; owner < ranks.size(); ++owner) {
          const auto& from = planned.plans[static_cast<std::size_t>(ranks[writer])];
          const auto& to = planned.plans[static_cast<std::size_t>(ranks[owner])];
          const auto found = planned.oracle.written.find({ranks[writer], ranks[owner]});
          const auto expected = found == planned.oracle.written.end() ? 0 : found->second;
          ASSERT_EQ(from.rows_to[owner], expected) << ranks[writer] << " to " << ranks[owner];
          ASSERT_EQ(to.rows_from[writer], expected) << ranks[writer] << " to " << ranks[owner];
        }
      }
    }
  });
}

void check_fragments(const plan::Lane& lane, const plan::Framing& framing) {
  const std::uint64_t rows = framing.rows_per_fragment;
  std::uint64_t items = 0;
  std::uint64_t bytes = 0;
  std::uint64_t index = 0;
  for (plan::FragmentCursor at(lane, rows); !at.at_end(); at.advance()) {
    const plan::Fragment& fragment = at.current();
    const std::uint32_t range_end = lane.range_begin[fragment.range + 1];
    ASSERT_EQ(fragment.index, index++);
    ASSERT_EQ(fragment.first, items);
    ASSERT_LE(fragment.count, rows);
    ASSERT_GE(fragment.first, lane.range_begin[fragment.range]);
    items += fragment.count;
    ASSERT_LE(items, range_end);
    // Only the end of a range leaves a fragment short.
    ASSERT_TRUE(fragment.count == rows || items == range_end);
    bytes += fragment.count * framing.row_bytes + framing.header_bytes;
    ASSERT_GE(plan::fragments_through(lane, rows, fragment.range), index);
    if (fragment.range == 0) continue;
    ASSERT_LT(plan::fragments_through(lane, rows, fragment.range - 1), index);
  }
  ASSERT_EQ(items, lane.num_items());
  ASSERT_EQ(plan::num_fragments(lane, rows), index);
  ASSERT_EQ(plan::lane_bytes(lane, framing), bytes);
}

TEST(PlanProperty, fragments_cover_every_item_once_inside_its_range) {
  for_each_world([](const Planned& planned) {
    for (const plan::RankPlan& plan : planned.plans) {
      for (const plan::LanePair& pair : plan.landing) {
        for (const std::uint64_t rows : {1U, 3U, 100U}) {
          const plan::Framing framing{40, 7, rows};
          ASSERT_NO_FATAL_FAILURE(check_fragments(pair.dispatch, framing));
          ASSERT_NO_FATAL_FAILURE(check_fragments(pair.back(), framing));
        }
      }
    }
  });
}

TEST(PlanProperty, rails_are_those_of_the_oracle) {
  for_each_world([](const Planned& planned) {
    const Topology& topology = planned.topology;
    for (int source = 0; source < topology.num_ranks(); ++source) {
      for (int node = 0; node < topology.num_nodes(); ++node) {
        if (topology.node_of(source) == node) {
          ASSERT_EQ(topology.rail_rank(source, node), source);
          continue;
        }
        const int rail = topology.rail_rank(source, node);
        ASSERT_EQ(rail, oracle_rail_rank(planned.world, source, node));
        const std::vector<int> sources = topology.sources_landing_at(rail);
        ASSERT_TRUE(std::binary_search(sources.begin(), sources.end(), source));
      }
    }
  });
}

}  // namespace
}  // namespace ferry::test
