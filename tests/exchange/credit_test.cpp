// What moves between nodes moves on credit: how much may be under way before a receiver starts its
// call, while a third rank is slow, and from one use to the next.

#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "exchange/stepped_ranks.hpp"

namespace ferry::testing {
namespace {

constexpr int kLong = 400;  ///< steps in which everything that can move has moved

std::uint64_t payload_sent(SteppedRanks& ranks, int rank) {
  return ranks.transport(rank).counters().payload_bytes;
}

TEST(Credit, ReceiverThatHasNotStartedGetsOneFragmentOfALane) {
  SteppedRanks ranks(nodes(2));
  const std::vector<Plan> plans = ranks.plan_all();
  auto sending = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
  ranks.work(ranks.all(), kLong);
  EXPECT_EQ(payload_sent(ranks, 0), kFragmentBytes);
  auto receiving = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
  EXPECT_TRUE(ranks.work_until(ranks.all(), [&] { return sending.done() && receiving.done(); }));
  EXPECT_EQ(payload_sent(ranks, 0), kFragments * kFragmentBytes);
}

TEST(Credit, SlowNodeHoldsBackRangesAndNoMemoryGrows) {
  // Home adds a range when the partial sums of all nodes are there: node 2 does not come.
  SteppedRanks ranks(nodes(3));
  const std::vector<Plan> plans = ranks.plan_all();
  std::vector<Pending<ExpertRows>> dispatching;
  for (const int rank : ranks.all()) {
    dispatching.push_back(
        ranks.exchange(rank).start_dispatch(plans[static_cast<std::size_t>(rank)], ranks.x(rank)));
  }
  ASSERT_TRUE(ranks.work_until_done(dispatching));
  const ExpertRows rows0 = dispatching[0].wait();
  const ExpertRows rows1 = dispatching[1].wait();
  const ExpertRows rows2 = dispatching[2].wait();
  ranks.work(ranks.all(), kLong);
  const std::uint64_t before = payload_sent(ranks, 1);
  auto home = ranks.exchange(0).start_combine(plans[0], rows0.matrix(), ranks.out(0));
  auto near = ranks.exchange(1).start_combine(plans[1], rows1.matrix(), ranks.out(1));
  ranks.work({0, 1}, kLong);
  // Two ranges ahead to rank 0; to rank 2, which has not started, what its plan has granted.
  EXPECT_EQ(payload_sent(ranks, 1) - before, (2 + 1) * kFragmentBytes);
  auto slow = ranks.exchange(2).start_combine(plans[2], rows2.matrix(), ranks.out(2));
  EXPECT_TRUE(
      ranks.work_until(ranks.all(), [&] { return home.done() && near.done() && slow.done(); }));
  EXPECT_EQ(payload_sent(ranks, 1) - before, 2 * kFragments * kFragmentBytes);
}

ExchangeOptions all_at_once() {
  ExchangeOptions options = small_ranges();
  options.ranges_in_flight = kFragments;
  return options;
}

/// Rank 0 has the credit for everything that it will send, and its sends do not end.
std::vector<SendLog::Sent> sent_at_once(SteppedRanks& ranks) {
  const std::vector<Plan> plans = ranks.plan_all();
  std::vector<Pending<ExpertRows>> dispatching;
  for (const int rank : ranks.all()) {
    if (rank == 0) continue;
    dispatching.push_back(
        ranks.exchange(rank).start_dispatch(plans[static_cast<std::size_t>(rank)], ranks.x(rank)));
  }
  ranks.work(ranks.all(), kLong);
  ranks.transport(0).hold();
  dispatching.push_back(ranks.exchange(0).start_dispatch(plans[0], ranks.x(0)));
  ranks.work(ranks.all(), kLong);
  const std::vector<SendLog::Sent> held = ranks.transport(0).fragments();
  ranks.transport(0).release();
  EXPECT_TRUE(ranks.work_until_done(dispatching));
  return held;
}

TEST(Credit, SlowPeerTakesHalfTheSendsOfARank) {
  SteppedRanks ranks(nodes(2), all_at_once());
  EXPECT_EQ(sent_at_once(ranks).size(), 4U);
}

TEST(Credit, SendsInFlightAreBounded) {
  SteppedRanks ranks(nodes(4), all_at_once());
  EXPECT_EQ(sent_at_once(ranks).size(), 8U);
}

TEST(Credit, RangesGoInAscendingOrderOverAllLanes) {
  SteppedRanks ranks(nodes(3), all_at_once());
  sent_at_once(ranks);
  const std::vector<SendLog::Sent>& sent = ranks.transport(0).fragments();
  ASSERT_EQ(sent.size(), 2U * kFragments);
  for (std::size_t i = 0; i < sent.size(); ++i) EXPECT_EQ(sent[i].header.index, i / 2) << i;
}

TEST(Credit, ReplayWaitsForNoGrant) {
  // A rank whose last call is over may compute for long before it looks at the network again. Rank
  // 1 has no tokens, so its dispatch is over with the last row that lands.
  SteppedRanks ranks(nodes(2));
  auto planning = ranks.exchange(0).start_plan(ranks.routing(0));
  auto planning_none =
      ranks.exchange(1).start_plan(Routing::of(0, 1, std::span<const std::int32_t>()));
  ASSERT_TRUE(
      ranks.work_until(ranks.all(), [&] { return planning.done() && planning_none.done(); }));
  const Plan plan = planning.wait();
  const Plan plan_none = planning_none.wait();
  const ConstMatrix none{nullptr, DType::f32, 0, kHidden, 0};
  auto first = ranks.exchange(0).start_dispatch(plan, ranks.x(0));
  auto receiving = ranks.exchange(1).start_dispatch(plan_none, none);
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return receiving.done(); }));
  ASSERT_TRUE(ranks.work_until({0}, [&] { return first.done(); }));
  const std::uint64_t before = payload_sent(ranks, 0);
  auto replay = ranks.exchange(0).start_dispatch(plan, ranks.x(0));
  ranks.work({0}, kLong);
  EXPECT_EQ(payload_sent(ranks, 0) - before, kFragmentBytes);
  auto receiving_again = ranks.exchange(1).start_dispatch(plan_none, none);
  EXPECT_TRUE(
      ranks.work_until(ranks.all(), [&] { return replay.done() && receiving_again.done(); }));
}

// One fragment of dispatch, combine, both backward operations, and of combine_backward with
// gradients of weights its rows and its numbers.
constexpr std::size_t kFirstReceives = 6;

TEST(Credit, ReplaysPostNoMoreReceivesThanThePlan) {
  SteppedRanks ranks(nodes(2));
  const std::vector<Plan> plans = ranks.plan_all();
  ranks.use(plans);
  ranks.work(ranks.all(), kLong);
  const std::size_t posted = ranks.num_posted(0, 1);
  EXPECT_GE(posted, kFirstReceives);
  EXPECT_LE(posted, 2U * kFragments + kFirstReceives);
  for (int use = 0; use < 10; ++use) ranks.use(plans);
  ranks.work(ranks.all(), kLong);
  EXPECT_EQ(ranks.num_posted(0, 1), posted);
}

TEST(Credit, PlansThatAreGoneLeaveNothingPosted) {
  SteppedRanks ranks(nodes(2));
  for (int time = 0; time < 20; ++time) ranks.plan_all();
  // Those of the last plan, and of the one that went when it was started.
  EXPECT_LE(ranks.num_posted(0, 1), 2 * kFirstReceives);
}

TEST(Credit, DispatchesGivenUpBeforeTheirPlanLeaveNothingPosted) {
  ExchangeOptions options = small_ranges();
  options.strategy = Strategy::node_gather;
  SteppedRanks ranks(nodes(2), options);
  std::size_t after_first = 0;
  for (int time = 0; time < 20; ++time) {
    std::vector<Pending<ExpertRows>> gathering;
    for (const int rank : ranks.all()) {
      gathering.push_back(ranks.exchange(rank).start_gather(ranks.x(rank)));
    }
    ranks.work(ranks.all(), 20);
    gathering[0].cancel("given up");
    ASSERT_TRUE(ranks.work_until_done(gathering));
    ranks.work(ranks.all(), kLong);
    if (time == 0) after_first = ranks.num_posted(0, 1);
  }
  EXPECT_LE(ranks.num_posted(0, 1), after_first);
}

}  // namespace
}  // namespace ferry::testing
