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
