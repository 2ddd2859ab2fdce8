// Plans and memberships that are made over earlier ones are those that are made from nothing: of
// the world before, which had other sizes, another strategy, other nodes.

#include <gtest/gtest.h>

#include "plan/memory.hpp"
#include "planned.hpp"

namespace ferry::test {
namespace {

using Memberships = std::vector<plan::Membership>;

TEST(PlanProperty, a_plan_over_another_is_a_plan_from_nothing) {
  plan::RankPlan kept;
  for_each_world([&](const Planned& planned) {
    const Topology& topology = planned.topology;
    const plan::RankPlan& any = planned.plans.front();
    const plan::PlanContext context{topology, planned.experts, any.strategy, any.range_tokens};
    std::vector<Memberships> of_ranks;
    for (const Routing& routing : planned.world.routing()) {
      of_ranks.push_back(plan::split_by_node(routing, planned.experts, topology));
    }
    for (int rank = 0; rank < topology.num_ranks(); ++rank) {
      const auto node = static_cast<std::size_t>(topology.node_of(rank));
      plan::ColumnCounts counts{.num_columns = planned.experts.num_columns(topology.node_of(rank)),
                                .values = {}};
      std::vector<const plan::Membership*> of_sources;
      for (const Memberships& own : of_ranks) {
        const auto row = plan::count_columns(own[node], counts.num_columns);
        counts.values.insert(counts.values.end(), row.begin(), row.end());
        of_sources.push_back(&own[node]);
      }
      const auto at = static_cast<std::size_t>(rank);
      plan::make_rank_plan(context, rank, {of_ranks[at], of_sources, counts}, kept);
      ASSERT_EQ(kept, planned.plans[at]) << "rank " << rank;
    }
  });
}

TEST(PlanProperty, memberships_over_others_are_memberships_from_nothing) {
  Memberships kept;
  bool slots = false;
  for_each_world([&](const Planned& planned) {
    slots = !slots;
    for (const Routing& routing : planned.world.routing()) {
      plan::split_by_node(routing, planned.experts,
                          {.num_nodes = planned.topology.num_nodes(), .slots = slots}, kept);
      ASSERT_EQ(kept, plan::split_by_node(routing, planned.experts, planned.topology, slots));
    }
  });
}

TEST(PlanMemory, what_a_smaller_plan_leaves_over_is_kept_and_counted) {
  std::vector<int> values;
  plan::resize_for_overwrite(values, 1000);
  EXPECT_EQ(values.capacity(), 1000U);  // exactly: growth by doubling would be kept for good
  const int* const memory = values.data();
  plan::resize_for_overwrite(values, 10);
  plan::resize_for_overwrite(values, 900);
  EXPECT_EQ(values.data(), memory);
  EXPECT_EQ(plan::capacity_bytes(values, values), 2 * 1000 * sizeof(int));
}

}  // namespace
}  // namespace ferry::test
