// What ranks of a node tell each other when one of them reads nothing for long: no notice is lost,
// and none is written over one that was not read.

#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "exchange/control.hpp"
#include "exchange/stepped_ranks.hpp"

namespace ferry::testing {
namespace {

TEST(Notices, MoreThanFitWaitForTheirReader) {
  SteppedRanks ranks(Topology::uniform(1, 2));
  const std::vector<Plan> plans = ranks.plan_all();
  std::vector<Pending<ExpertRows>> calls;
  for (const int rank : ranks.all()) {
    for (std::uint64_t call = 0; call < ferry::detail::kNotices + 20; ++call) {
      calls.push_back(ranks.exchange(rank).start_dispatch(plans[static_cast<std::size_t>(rank)],
                                                          ranks.x(rank)));
    }
    ranks.work({rank}, 20);  // the other rank has read nothing of this
  }
  EXPECT_TRUE(ranks.work_until_done(calls));
}

TEST(Notices, RefusalsOutliveTheirExchange) {
  // More texts than there is room for: the rest is told after the exchange has gone.
  constexpr int kPlans = ferry::detail::kTexts + 3;
  SteppedRanks ranks(Topology::uniform(1, 2));
  for (int plan = 0; plan < kPlans; ++plan) {
    const std::int32_t bad_id = 100 + plan;
    ranks.exchange(0).start_plan(Routing::of(1, 1, std::span(&bad_id, 1)));
  }
  ranks.drop_exchange(0);
  for (int plan = 0; plan < kPlans; ++plan) {
    auto call = ranks.exchange(1).start_plan(ranks.routing(1));
    ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return call.done(); })) << plan;
    const auto error = error_of(call);
    ASSERT_TRUE(error.has_value()) << plan;
    EXPECT_NE(std::string(error->what()).find(std::to_string(100 + plan)), std::string::npos)
        << error->what();
  }
}

}  // namespace
}  // namespace ferry::testing
