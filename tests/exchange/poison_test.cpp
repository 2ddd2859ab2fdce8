// How a call that ends badly on one rank ends on the others: with one text, also where they have
// not started it, or have not even made its exchange.

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "exchange/stepped_ranks.hpp"
#include "wire/headers.hpp"

namespace ferry::testing {
namespace {

TEST(Poison, LongReasonIsCutToTheSameTextEverywhere) {
  SteppedRanks ranks(nodes(2));
  auto given_up = ranks.exchange(0).start_plan(ranks.routing(0));
  given_up.cancel(std::string(3000, 'x'));
  auto other = ranks.exchange(1).start_plan(ranks.routing(1));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return given_up.done() && other.done(); }));
  const auto own = error_of(given_up);
  const auto theirs = error_of(other);
  ASSERT_TRUE(own && theirs);
  EXPECT_EQ(std::string(own->what()), theirs->what());
  EXPECT_EQ(std::string(own->what()).size(), wire::kPoisonTextBytes);
}

TEST(Poison, RefusalWithoutAPlanIsKeptForACallNotStarted) {
  SteppedRanks others(nodes(2));
  const Plan foreign = others.plan_all()[0];
  for (const Topology& topology : {nodes(2), Topology::uniform(1, 2)}) {
    SteppedRanks ranks(topology);
    const std::vector<Plan> plans = ranks.plan_all();
    auto bad = ranks.exchange(0).start_dispatch(foreign, ranks.x(0));
    ranks.work(ranks.all(), 50);
    auto good = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
    ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return bad.done() && good.done(); }));
    const auto own = error_of(bad);
    const auto theirs = error_of(good);
    ASSERT_TRUE(own && theirs);
    EXPECT_EQ(own->code(), ErrorCode::stale_plan);
    EXPECT_EQ(std::string(own->what()), theirs->what());
  }
}

TEST(Poison, WhatElseEndsWithARefusalIsToldToTheOthers) {
  // The refusal of rank 0 names no plan: it does not know on which one rank 1 was.
  SteppedRanks others(nodes(2));
  const Plan foreign = others.plan_all()[0];
  SteppedRanks ranks(nodes(2));
  const std::vector<Plan> plans = ranks.plan_all();
  auto bad = ranks.exchange(0).start_dispatch(foreign, ranks.x(0));
  auto good = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
  ranks.work(ranks.all(), 50);
  const auto own = error_of(bad);
  ASSERT_TRUE(own && good.done());
  auto late = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return late.done(); }));
  expect_error(error_of(late), ErrorCode::stale_plan, own->what());
}

TEST(Poison, RanksAreQuietOnceAllKnow) {
  // In another order each refusal names a plan that another rank was not on.
  SteppedRanks ranks(nodes(3));
  const std::vector<Plan> a = ranks.plan_all();
  const std::vector<Plan> b = ranks.plan_all();
  std::vector<Pending<ExpertRows>> calls;
  for (const int rank : ranks.all()) {
    const std::vector<Plan>& plans = rank == 0 ? a : b;
    calls.push_back(
        ranks.exchange(rank).start_dispatch(plans[static_cast<std::size_t>(rank)], ranks.x(rank)));
  }
  ASSERT_TRUE(ranks.work_until_done(calls));
  ranks.work(ranks.all(), 100);
  std::vector<std::uint64_t> sent;
  for (const int rank : ranks.all()) {
    sent.push_back(ranks.transport(rank).counters().control_bytes);
  }
  ranks.work(ranks.all(), 100);
  for (const int rank : ranks.all()) {
    EXPECT_EQ(ranks.transport(rank).counters().control_bytes, sent[static_cast<std::size_t>(rank)]);
  }
}

/// An exchange of a rank, made later than the one that it has.
Exchange make_another(SteppedRanks& ranks, int rank) {
  return Exchange(ranks.transport(rank), Placement::contiguous(2, 2),
                  {.hidden = kHidden, .dtype = DType::f32}, small_ranges());
}

TEST(Poison, PlanAndRefusalMayComeBeforeTheirExchange) {
  for (const bool refused : {false, true}) {
    SCOPED_TRACE(refused);
    SteppedRanks ranks(nodes(2));
    Exchange early = make_another(ranks, 0);
    auto first = early.start_plan(ranks.routing(0));
    if (refused) first.cancel("no more of it");
    ranks.work(ranks.all(), 50);
    Exchange late = make_another(ranks, 1);
    auto second = late.start_plan(ranks.routing(1));
    ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return first.done() && second.done(); }));
    EXPECT_EQ(error_of(first).has_value(), refused);
    EXPECT_EQ(error_of(second).has_value(), refused);
  }
}

}  // namespace
}  // namespace ferry::testing
