// What others measured does not beat the bound of the plan that does what they do.

#include "planner/published.hpp"

#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace ferry::planner {
namespace {

Scenario scenario_of(const std::string& cluster, int num_nodes, std::int64_t tokens = 4096) {
  PlanOptions options;
  options.model = "deepseek-v3";
  options.cluster = cluster_of(cluster);
  options.num_nodes = num_nodes;
  options.tokens = {tokens};
  return make_scenario(options);
}

TEST(Published, NoMeasurementBeatsItsBound) {
  int compared = 0;
  const std::pair<const char*, std::vector<int>> measured_on[] = {
      {"h800", {2, 4, 8}}, {"h100", {2, 4}}, {"ascend-910b", {2}}};
  for (const auto& [cluster, sizes] : measured_on) {
    for (const int num_nodes : sizes) {
      const Scenario scenario = scenario_of(cluster, num_nodes);
      const StrategyEstimate estimate = Estimator(scenario).estimate(Strategy::node_dedup);
      for (const Published& one : published_for(scenario)) {
        for (const Call call : {Call::dispatch, Call::combine}) {
          const double bound = bound_like(scenario, estimate, one, call, Inside::token_major);
          const double measured = call == Call::dispatch ? one.dispatch : one.combine;
          // A rate is at most its bound, a duration at least.
          const bool is_rate = one.unit == Unit::logical_gb_per_s;
          EXPECT_LE(is_rate ? measured : bound, is_rate ? bound : measured)
              << one.what << " on " << cluster << ", nodes: " << num_nodes;
          ++compared;
        }
      }
    }
  }
  EXPECT_EQ(compared, 14);
}

TEST(Published, LogicalRatesFollowFromTheLinkAlone) {
  // At N nodes (N-1)/N of the logical rows cross, whatever the group limit: 50 N/(N-1) GB/s.
  for (const int num_nodes : {4, 8}) {
    const Scenario scenario = scenario_of("h100", num_nodes, 2048);
    const StrategyEstimate estimate = Estimator(scenario).estimate(Strategy::node_dedup);
    const double us = estimate.dispatch.inter_node.bound_us;
    // The worst rank, not the mean, sets the time: up to 4 % more.
    const double link = 50.0 * num_nodes / (num_nodes - 1);
    EXPECT_LE(logical_gb_per_s(scenario, estimate, Call::dispatch, us), link);
    EXPECT_GE(logical_gb_per_s(scenario, estimate, Call::dispatch, us), 0.96 * link);
  }
}

TEST(Published, IsShownOnlyForWhatWasMeasured) {
  EXPECT_EQ(published_for(scenario_of("h800", 2, 64)).size(), 1U);
  EXPECT_EQ(published_for(scenario_of("h100", 2, 64)).size(), 1U);    // the rate
  EXPECT_EQ(published_for(scenario_of("h100", 2, 4096)).size(), 2U);  // and the duration
  EXPECT_TRUE(published_for(scenario_of("a100", 2, 64)).empty());
  EXPECT_TRUE(published_for(scenario_of("h800", 3, 64)).empty());
  PlanOptions options;
  options.model = "deepseek-v3";
  options.cluster = cluster_of("h800");
  options.tokens = {64};
  options.pattern = tools::parse_routing("uniform");
  EXPECT_TRUE(published_for(make_scenario(options)).empty());
  options.pattern = tools::parse_routing("group:8,4");
  EXPECT_EQ(published_for(make_scenario(options)).size(), 1U);
  options.ranks_per_node = 4;
  EXPECT_TRUE(published_for(make_scenario(options)).empty());
}

}  // namespace
}  // namespace ferry::planner
