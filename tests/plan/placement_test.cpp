// Placements, and how they look through a topology; names of strategies.

#include "ferry/placement.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "ferry/error.hpp"
#include "plan/experts.hpp"
#include "plan/strategies.hpp"

namespace ferry {
namespace {

template <typename Make>
void expect_refused(ErrorCode code, const std::string& part, const Make& make) {
  try {
    make();
    ADD_FAILURE() << "accepted, expected: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Placement, contiguous_shares_differ_by_at_most_one) {
  for (const int num_ranks : {1, 3, 5, 7, 8, 24, 48}) {
    for (const int num_experts : {1, 2, 7, 64, 256, 2048}) {
      const Placement placement = Placement::contiguous(num_experts, num_ranks);
      std::vector<int> share(static_cast<std::size_t>(num_ranks));
      int last = 0;
      for (int expert = 0; expert < num_experts; ++expert) {
        ASSERT_GE(placement.rank_of(expert), last);
        last = placement.rank_of(expert);
        ++share[static_cast<std::size_t>(last)];
      }
      const auto [low, high] = std::minmax_element(share.begin(), share.end());
      EXPECT_LE(*high - *low, 1) << num_experts << " experts on " << num_ranks << " ranks";
    }
  }
}

TEST(Placement, hash_follows_the_map_and_not_the_version) {
  Placement a = Placement::from_map({0, 1, 1});
  const Placement b = Placement::from_map({0, 1, 1});
  EXPECT_EQ(a.hash(), b.hash());
  EXPECT_NE(a.hash(), Placement::from_map({1, 0, 1}).hash());
  EXPECT_NE(Placement::with_replicas({{0, 1}, {2}}).hash(),
            Placement::with_replicas({{0}, {1, 2}}).hash());
  a.version = 2;
  EXPECT_EQ(a.hash(), b.hash());
  EXPECT_NE(a, b);
}

TEST(Placement, refuses_what_is_no_placement) {
  const auto code = ErrorCode::invalid_argument;
  expect_refused(code, "0 experts", [] { Placement::contiguous(0, 4); });
  expect_refused(code, "on 0 ranks", [] { Placement::contiguous(4, 0); });
  expect_refused(code, "no expert", [] { Placement::from_map({}); });
  expect_refused(code, "expert 1 is on rank -3", [] { Placement::from_map({0, -3}); });
  expect_refused(code, "expert 1 is on no rank", [] { Placement::with_replicas({{0}, {}}); });
  expect_refused(code, "twice on rank 2", [] { Placement::with_replicas({{2, 0, 2}}); });
}

TEST(ExpertIndex, columns_follow_rank_then_expert) {
  const Topology topology = Topology::from_map({0, 1, 0, 1});
  const plan::ExpertIndex index(topology, Placement::from_map({2, 0, 1, 0, 2}));
  EXPECT_EQ(index.experts_of_node(0), (std::vector<int>{1, 3, 0, 4}));
  EXPECT_EQ(index.experts_of_node(1), (std::vector<int>{2}));
  EXPECT_EQ(index.first_column(2), 2);
  EXPECT_EQ(index.column_of(4), 3);
  EXPECT_EQ(index.node_of(2), 1);
  EXPECT_EQ(index.experts_of_rank(0), (std::vector<int>{1, 3}));
  EXPECT_TRUE(index.experts_of_rank(3).empty());
  EXPECT_EQ(index.num_columns(1), 1);
}

TEST(ExpertIndex, refuses_ranks_outside_and_replicas) {
  const Topology topology = Topology::uniform(2, 2);
  expect_refused(ErrorCode::invalid_argument, "expert 1 is on rank 4; allowed: 0..3", [&] {
    plan::ExpertIndex(topology, Placement::from_map({0, 4}));
  });
  const Placement replicas = Placement::with_replicas({{0}, {1, 2}});
  EXPECT_TRUE(replicas.has_replicas());
  expect_refused(ErrorCode::unsupported, "expert 1 has 2 copies",
                 [&] { plan::ExpertIndex(topology, replicas); });
  expect_refused(ErrorCode::invalid_argument, "no expert",
                 [&] { plan::ExpertIndex(topology, Placement()); });
}

TEST(ExpertIndex, refuses_more_experts_per_node_than_a_column_number_can_name) {
  const Topology topology = Topology::uniform(1, 1);
  const auto all_on_rank_0 = [](std::size_t n) { return Placement::from_map(std::vector<int>(n)); };
  EXPECT_EQ(plan::ExpertIndex(topology, all_on_rank_0(65536)).column_of(65535), 65535);
  expect_refused(ErrorCode::unsupported, "node 0 holds 65537 experts",
                 [&] { plan::ExpertIndex(topology, all_on_rank_0(65537)); });
}

TEST(Strategies, names_go_both_ways) {
  EXPECT_EQ(plan::strategies().size(), 4U);
  for (const plan::StrategyInfo& row : plan::strategies()) {
    EXPECT_EQ(to_string(row.id), row.name);
    EXPECT_EQ(strategy_from_string(row.name), row.id);
    EXPECT_EQ(&plan::info(row.id), &row);
    EXPECT_FALSE(row.cost.empty());
  }
  EXPECT_EQ(strategy_from_string("automatic"), std::nullopt);
}

}  // namespace
}  // namespace ferry
