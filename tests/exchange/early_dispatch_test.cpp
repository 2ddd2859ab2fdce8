// A dispatch that begins before its plan: what it is given must fit the plan, and neither outlives
// the other's failure.

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "exchange/stepped_ranks.hpp"

namespace ferry::testing {
namespace {

ExchangeOptions options_of(Strategy strategy) {
  ExchangeOptions options = small_ranges();
  options.strategy = strategy;
  return options;
}

TEST(EarlyDispatch, CannotBeWaitedForBeforeItsPlanIsStarted) {
  SteppedRanks ranks(nodes(2), options_of(Strategy::node_gather));
  auto gathering = ranks.exchange(0).start_gather(ranks.x(0));
  expect_error(error_of(gathering), ErrorCode::invalid_argument,
               "wait() before its plan was started");
}

TEST(EarlyDispatch, ItsPlanHasAsManyTokens) {
  SteppedRanks ranks(nodes(2), options_of(Strategy::node_gather));
  std::vector<Pending<ExpertRows>> gathering;
  std::vector<Pending<Plan>> planning;
  for (const int rank : ranks.all()) {
    gathering.push_back(ranks.exchange(rank).start_gather(ranks.x(rank)));
  }
  for (const int rank : ranks.all()) {
    Routing routing = ranks.routing(rank);
    if (rank == 0) --routing.num_tokens;
    planning.push_back(
        ranks.exchange(rank).start_plan(routing, gathering[static_cast<std::size_t>(rank)]));
  }
  ASSERT_TRUE(ranks.work_until_done(planning));
  ASSERT_TRUE(ranks.work_until_done(gathering));
  for (const int rank : ranks.all()) {
    expect_error(error_of(planning[static_cast<std::size_t>(rank)]), ErrorCode::invalid_argument,
                 "start_gather was given 24 rows");
    expect_error(error_of(gathering[static_cast<std::size_t>(rank)]), ErrorCode::invalid_argument,
                 "start_gather was given 24 rows");
  }
}

TEST(EarlyDispatch, GivenUpItTakesItsPlanAlong) {
  SteppedRanks ranks(nodes(2), options_of(Strategy::node_gather));
  std::vector<Pending<ExpertRows>> gathering;
  for (const int rank : ranks.all()) {
    gathering.push_back(ranks.exchange(rank).start_gather(ranks.x(rank)));
  }
  auto planning = ranks.exchange(1).start_plan(ranks.routing(1), gathering[1]);
  gathering[0].cancel("given up");
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return planning.done(); }));
  expect_error(error_of(planning), ErrorCode::cancelled, "given up");
  auto late = ranks.exchange(0).start_plan(ranks.routing(0), gathering[0]);
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return late.done(); }));
  expect_error(error_of(late), ErrorCode::cancelled, "given up");
}

TEST(EarlyDispatch, GivenUpItEndsAPlanThatRunsBesideIt) {
  SteppedRanks ranks(nodes(2), options_of(Strategy::node_gather));
  std::vector<Pending<ExpertRows>> gathering;
  for (const int rank : ranks.all()) {
    gathering.push_back(ranks.exchange(rank).start_gather(ranks.x(rank)));
  }
  auto planning = ranks.exchange(0).start_plan(ranks.routing(0), gathering[0]);
  gathering[0].cancel("given up");
  ranks.work(ranks.all(), 50);
  EXPECT_TRUE(planning.done());
  auto other = ranks.exchange(1).start_plan(ranks.routing(1), gathering[1]);
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return planning.done() && other.done(); }));
  expect_error(error_of(planning), ErrorCode::cancelled, "given up");
  expect_error(error_of(other), ErrorCode::cancelled, "given up");
}

TEST(EarlyDispatch, GivenUpItHoldsNoMemoryOfItsPlan) {
  SteppedRanks ranks(Topology::uniform(1, 2));
  std::uint64_t after_first = 0;
  for (int round = 0; round < 10; ++round) {
    auto given_up = ranks.exchange(0).start_plan_and_dispatch(ranks.routing(0), ranks.x(0));
    given_up.cancel("given up");
    auto other = ranks.exchange(1).start_plan_and_dispatch(ranks.routing(1), ranks.x(1));
    ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return other.done(); }));
    expect_error(error_of(other), ErrorCode::cancelled, "given up");
    ranks.work(ranks.all(), 50);
    if (round == 0) after_first = pool_bytes(ranks.transport(0));
  }
  EXPECT_EQ(pool_bytes(ranks.transport(0)), after_first);
}

TEST(EarlyDispatch, EndsWithAPlanThatFindsOtherOptions) {
  // Every rank finds the difference by itself: no refusal comes that would end the dispatch.
  SteppedRanks ranks(nodes(2));
  std::vector<Exchange> exchanges;
  std::vector<Pending<Dispatched>> calls;
  for (const int rank : ranks.all()) {
    ExchangeOptions options = small_ranges();
    options.ranges_in_flight += rank;
    exchanges.emplace_back(ranks.transport(rank), Placement::contiguous(2, 2),
                           RowShape{.hidden = kHidden, .dtype = DType::f32}, options);
    calls.push_back(exchanges.back().start_plan_and_dispatch(ranks.routing(rank), ranks.x(rank)));
  }
  ASSERT_TRUE(ranks.work_until_done(calls));
  for (Pending<Dispatched>& call : calls) {
    expect_error(error_of(call), ErrorCode::mismatch, "ranges_in_flight");
  }
}

TEST(EarlyDispatch, SendsNoMoreThanItsReceiverExpects) {
  // The receiver comes so late that all that may leave early has left.
  for (const Strategy strategy : {Strategy::flat, Strategy::rank_dedup, Strategy::node_dedup}) {
    SCOPED_TRACE(to_string(strategy));
    SteppedRanks ranks(nodes(2), options_of(strategy));
    std::vector<Pending<Dispatched>> calls;
    for (const int rank : ranks.all()) {
      calls.push_back(
          ranks.exchange(rank).start_plan_and_dispatch(ranks.routing(rank), ranks.x(rank)));
      ranks.work({rank}, 100);
    }
    ASSERT_TRUE(ranks.work_until_done(calls));
    for (Pending<Dispatched>& call : calls) EXPECT_FALSE(error_of(call).has_value());
  }
}

}  // namespace
}  // namespace ferry::testing
