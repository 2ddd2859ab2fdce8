// Plans that fit on a page, written out by hand, and row numbers beyond 32 bits.

#include "plan/rank_plan.hpp"

#include <gtest/gtest.h>

#include "ferry/error.hpp"

namespace ferry::plan {
namespace {

using Ids = std::vector<std::int64_t>;
using Numbers = std::vector<std::uint32_t>;

/// Two nodes of two ranks, expert e on rank e. Rank 0 has two tokens, rank 3 has one.
class TwoByTwo : public testing::Test {
 protected:
  std::vector<RankPlan> plans(Strategy strategy) const {
    const std::vector<Routing> routing{Routing::of(2, 4, ids_0_, weights_0_),
                                       {.num_tokens = 0, .num_topk = 4},
                                       {.num_tokens = 0, .num_topk = 4},
                                       Routing::of(1, 4, ids_3_)};
    return make_all_plans({topology_, experts_, strategy, 1}, routing);
  }

  Topology topology_ = Topology::uniform(2, 2);
  ExpertIndex experts_{topology_, Placement::contiguous(4, 4)};
  Ids ids_0_{3, 1, 2, 0, /**/ 1, 1, -1, -1};
  std::vector<float> weights_0_{0.1F, 0.2F, 0.3F, 0.4F, 0.25F, 0.5F, 1, 1};
  Ids ids_3_{3, 2, -1, -1};
};

TEST_F(TwoByTwo, home_tokens_are_the_same_for_all_strategies) {
  for (const StrategyInfo& strategy : strategies()) {
    const std::vector<RankPlan> made = plans(strategy.id);
    EXPECT_EQ(made[0].home_begin, (Numbers{0, 2, 3}));
    ASSERT_EQ(made[0].home_targets.size(), 3U);
    EXPECT_EQ(made[0].home_targets[0].local_rank, 1U);  // slot 1 comes before slot 3
    EXPECT_EQ(made[0].home_targets[1].local_rank, 0U);
    EXPECT_EQ(made[0].home_targets[2].row, 1U);
    EXPECT_EQ(made[0].home_targets[2].weight, 0.75F);
    EXPECT_EQ(made[3].home_begin, (Numbers{0, 2}));
    EXPECT_EQ(made[3].home_targets[0].row, 1U);  // after the row of rank 0
    EXPECT_EQ(made[3].num_rows(), 2);
    EXPECT_EQ(made[1].home_begin, (Numbers{0}));
  }
}

TEST_F(TwoByTwo, flat_sends_a_row_to_each_expert_and_weighs_at_home) {
  const std::vector<RankPlan> made = plans(Strategy::flat);
  ASSERT_EQ(made[0].outgoing.size(), 2U);
  EXPECT_EQ(made[0].outgoing[0].dispatch.peer, 2);
  EXPECT_EQ(made[0].outgoing[1].dispatch.peer, 3);
  EXPECT_EQ(made[0].outgoing[0].dispatch.weights, (std::vector<float>{0.3F}));
  EXPECT_EQ(made[0].outgoing[0].dispatch.range_begin, (Numbers{0, 1, 1}));
  ASSERT_EQ(made[3].landing.size(), 1U);
  EXPECT_EQ(made[3].landing[0].dispatch.peer, 0);
  EXPECT_EQ(made[3].landing[0].dispatch.target_begin, (Numbers{0, 1}));
  EXPECT_EQ(made[3].landing[0].dispatch.targets[0].row, 0U);
  EXPECT_EQ(made[3].rows_from, (std::vector<std::uint64_t>{0, 2}));
  EXPECT_EQ(made[2].rows_from, (std::vector<std::uint64_t>{1, 1}));
}

TEST_F(TwoByTwo, node_dedup_sends_one_row_to_the_rail) {
  const std::vector<RankPlan> made = plans(Strategy::node_dedup);
  ASSERT_EQ(made[0].outgoing.size(), 1U);
  EXPECT_TRUE(made[0].outgoing[0].combine.empty());
  EXPECT_EQ(made[0].outgoing[0].dispatch.peer, 2);
  EXPECT_EQ(made[0].outgoing[0].dispatch.tokens, (Numbers{0}));
  const Lane& landing = made[2].landing.at(0).dispatch;
  EXPECT_EQ(landing.target_begin, (Numbers{0, 2}));
  EXPECT_EQ(landing.targets[0].local_rank, 0U);  // rank 2 before rank 3, though slot 2 after 0
  EXPECT_EQ(landing.targets[0].weight, 0.3F);
  EXPECT_EQ(landing.targets[1].local_rank, 1U);
  EXPECT_EQ(landing.targets[1].weight, 0.1F);
  EXPECT_TRUE(made[3].landing.empty());
  EXPECT_EQ(made[2].rows_to, (std::vector<std::uint64_t>{1, 1}));
  EXPECT_EQ(made[3].rows_from, (std::vector<std::uint64_t>{1, 1}));
}

TEST_F(TwoByTwo, node_gather_sends_all_and_gets_back_what_has_an_expert) {
  const std::vector<RankPlan> made = plans(Strategy::node_gather);
  ASSERT_EQ(made[0].outgoing.size(), 1U);
  EXPECT_EQ(made[0].outgoing[0].dispatch.tokens, (Numbers{0, 1}));
  EXPECT_EQ(made[0].outgoing[0].back().tokens, (Numbers{0}));
  const LanePair& landing = made[2].landing.at(0);
  EXPECT_EQ(landing.dispatch.target_begin, (Numbers{0, 2, 2}));
  EXPECT_EQ(landing.back().target_begin, (Numbers{0, 2}));
  // Rank 3 has no expert on node 0: its token goes there all the same, and nothing comes back.
  const LanePair& unwanted = made[3].outgoing.at(0);
  EXPECT_EQ(unwanted.dispatch.peer, 1);
  EXPECT_EQ(unwanted.dispatch.tokens, (Numbers{0}));
  EXPECT_EQ(unwanted.back().num_items(), 0U);
  EXPECT_EQ(unwanted.back().range_begin, (Numbers{0, 0}));
  EXPECT_TRUE(made[1].outgoing.empty());  // no tokens, no lane
}

TEST(RankPlan, only_the_landing_ranks_need_a_membership) {
  const Topology topology = Topology::from_sizes({1, 2});
  const ExpertIndex experts(topology, Placement::from_map({1, 2}));
  const ColumnCounts counts{.num_columns = 2, .values = {0, 5, 0, 0, 1, 0}};
  const PlanContext flat{topology, experts, Strategy::flat, 8};
  EXPECT_FALSE(needs_membership(flat, 1, 0, counts));
  EXPECT_TRUE(needs_membership(flat, 2, 0, counts));
  EXPECT_TRUE(needs_membership(flat, 1, 1, counts));
  EXPECT_FALSE(needs_membership(flat, 1, 2, counts));  // a rank of the node pushes by itself
  const PlanContext rail{topology, experts, Strategy::node_gather, 8};
  EXPECT_TRUE(needs_membership(rail, 1, 0, counts));
  EXPECT_FALSE(needs_membership(rail, 2, 0, counts));
}

/// Lower ranks with counts near the limit of 32 bits: rows of rank 2 and what lands on it start
/// beyond 2^32. Only the counts are large; nothing is allocated for those rows.
TEST(RankPlan, rows_beyond_32_bits) {
  const Topology topology = Topology::from_sizes({3, 1});
  const ExpertIndex experts(topology, Placement::from_map({2, 2, 3}));
  const std::uint32_t many = 4'000'000'000U;
  const ColumnCounts counts{.num_columns = 2, .values = {many, many, many, 1, 1, 1, 2, 1}};
  const Membership own{2, {1}, {0, 2}, {1, 0}, {0.5F, 0.5F}};
  const Membership of_3{9, {4, 7}, {0, 2, 3}, {0, 1, 0}, {1, 1, 1}};
  std::vector<Membership> mine{own, Membership()};
  mine[1].num_tokens = 2;
  const std::vector<const Membership*> sources{nullptr, nullptr, &mine[0], &of_3};
  const PlanContext context{topology, experts, Strategy::flat, 4};
  const RankPlan plan = make_rank_plan(context, 2, mine, sources, counts);

  const std::int64_t rows = 4'000'000'000;
  EXPECT_EQ(plan.expert_counts, (std::vector<std::int64_t>{2 * rows + 3, rows + 3}));
  EXPECT_EQ(plan.num_rows(), 3 * rows + 6);
  EXPECT_EQ(plan.home_targets[0].row, 3U * rows + 3 + 1);
  EXPECT_EQ(plan.home_targets[1].row, 2U * rows);
  const std::vector<Target>& landed = plan.landing.at(0).dispatch.targets;
  EXPECT_EQ(landed[0].row, 2U * rows + 1);
  EXPECT_EQ(landed[1].row, 3U * rows + 3 + 2);
  EXPECT_EQ(landed[2].row, 2U * rows + 2);
  EXPECT_EQ(plan.landing[0].dispatch.range_begin, (Numbers{0, 0, 3, 3}));
  EXPECT_EQ(plan.rows_from, (std::vector<std::uint64_t>{2U * rows, 1U * rows + 1, 2 + 3}));
}

TEST(RankPlan, missing_memberships_are_a_fault_of_the_caller) {
  const Topology topology = Topology::uniform(2, 1);
  const ExpertIndex experts(topology, Placement::contiguous(2, 2));
  const std::vector<Membership> own(2);
  const std::vector<const Membership*> sources{&own[0], nullptr};
  const ColumnCounts counts{.num_columns = 1, .values = {0, 3}};
  const PlanContext context{topology, experts, Strategy::flat, 4};
  EXPECT_THROW(make_rank_plan(context, 0, own, sources, counts), std::logic_error);
}

TEST(RankPlan, a_bad_routing_is_refused_with_its_rank) {
  const Topology topology = Topology::uniform(2, 1);
  const ExpertIndex experts(topology, Placement::contiguous(2, 2));
  const Ids ids{0};
  const Ids bad{2};
  try {
    make_all_plans({topology, experts, Strategy::flat, 1},
                   std::vector{Routing::of(1, 1, ids), Routing::of(1, 1, bad)});
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("topk_idx[0,0] = 2 on rank 1"), std::string::npos);
  }
}

}  // namespace
}  // namespace ferry::plan
