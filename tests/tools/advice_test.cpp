// The advice quotes measured figures, and follows what limited the run.

#include "bench/advice.hpp"

#include <gtest/gtest.h>

namespace ferry::bench {
namespace {

struct Setting {
  BenchOptions options;
  Workload workload;
  RowCounts counts;
};

Setting make_setting(int num_nodes) {
  Setting setting{{},
                  {Topology::uniform(num_nodes, 2),
                   Placement::contiguous(4, 2 * num_nodes),
                   {16, DType::bf16},
                   2,
                   {},
                   "uniform",
                   {},
                   {}},
                  {}};
  setting.options.num_nodes = num_nodes;
  setting.options.ranks_per_node = 2;
  return setting;
}

RunContext make_context(const Setting& setting, bool paced) {
  return {setting.options,
          setting.workload,
          setting.counts,
          nullptr,
          {},
          {.transport = "threads",
           .paced = paced,
           .fragment_bytes = 61440,
           .range_tokens = 64,
           .link_bits_per_s = paced ? 1e9 : 0}};
}

StrategyResult result_of(Strategy strategy, double us, std::uint64_t bytes) {
  StrategyResult result;
  result.strategy = strategy;
  result.plan_us.median = us / 10;
  result.dispatch_us.median = us * 0.45;
  result.combine_us.median = us * 0.45;
  result.memcpy_us.median = us;
  result.counted.dispatch = bytes / 2;
  result.counted.combine = bytes / 2;
  result.link_utilisation_dispatch = 0.95;
  result.link_utilisation_combine = 0.9;
  return result;
}

TEST(Advice, QuotesTheBytesAndTheLink) {
  const Setting setting = make_setting(2);
  const RunContext context = make_context(setting, true);
  const std::vector<StrategyResult> results = {result_of(Strategy::flat, 1000, 40'000'000),
                                               result_of(Strategy::node_dedup, 500, 10'000'000)};
  EXPECT_EQ(best_of(results).strategy, Strategy::node_dedup);
  const std::string why = why_best(context, results);
  EXPECT_NE(why.find("node_dedup is 2.00 times as fast as flat, most of it in"), std::string::npos)
      << why;
  EXPECT_NE(why.find("0.25 times the bytes of flat"), std::string::npos) << why;
  EXPECT_NE(why.find("busy for 95 % of dispatch"), std::string::npos) << why;
  EXPECT_NE(why.find("time follows bytes"), std::string::npos) << why;
}

TEST(Advice, NamesQuantisedRowsWithWhatTheySaveAndLose) {
  Setting setting = make_setting(2);
  setting.workload.shape.hidden = 2048;
  const std::vector<StrategyResult> full = {result_of(Strategy::flat, 1000, 40'000'000)};
  const auto next = [&](const std::vector<StrategyResult>& results) {
    return what_next(make_context(setting, true), results);
  };
  // A row of 2048 is 4096 bytes in bf16, and 2048 + 4 x 16 quantised.
  std::string words = next(full);
  EXPECT_NE(words.find("--wire fp8 or int8: the link is the limit"), std::string::npos) << words;
  EXPECT_NE(words.find("both ways would be 48 % fewer bytes"), std::string::npos) << words;
  EXPECT_NE(words.find("at most 1/16 of itself"), std::string::npos) << words;
  EXPECT_NE(words.find("the largest of its 128 columns, int8 by 1/254"), std::string::npos)
      << words;

  setting.options.wire.dispatch = WireFormat::fp8_e4m3fn;
  words = next(full);
  EXPECT_NE(words.find("--wire combine=fp8 or int8"), std::string::npos) << words;
  EXPECT_NE(words.find("sums back would be 24 % fewer"), std::string::npos) << words;
  std::vector<StrategyResult> few_back = full;
  few_back.front().counted.combine = few_back.front().counted.dispatch / 20;
  EXPECT_EQ(next(few_back).find("--wire"), std::string::npos) << next(few_back);

  setting.options.wire = {.combine = WireFormat::int8};
  words = next(full);
  EXPECT_NE(words.find("--wire dispatch=fp8 or int8"), std::string::npos) << words;
  setting.options.wire.dispatch = WireFormat::int8;
  EXPECT_EQ(next(full).find("--wire"), std::string::npos) << next(full);

  setting.options.wire = {};
  std::vector<StrategyResult> idle = full;
  idle.front().link_utilisation_dispatch = idle.front().link_utilisation_combine = 0.4;
  EXPECT_EQ(next(idle).find("--wire"), std::string::npos) << next(idle);
}

TEST(Advice, FollowsTheSettingOfTheRun) {
  const std::vector<StrategyResult> one = {result_of(Strategy::flat, 1000, 0)};
  const Setting single = make_setting(1);
  EXPECT_NE(why_best(make_context(single, false), one).find("on one node"), std::string::npos);
  EXPECT_NE(what_next(make_context(single, false), one).find("--nodes 2"), std::string::npos);

  const Setting two = make_setting(2);
  EXPECT_NE(what_next(make_context(two, false), one).find("--link-rate"), std::string::npos);
  EXPECT_NE(what_next(make_context(two, true), one).find("faster --link-rate"), std::string::npos);
  EXPECT_NE(what_next(make_context(make_setting(4), true), one).find("--nodes 2"),
            std::string::npos);

  Setting wide = make_setting(2);
  wide.options.wire.combine = WireFormat::f32;
  EXPECT_NE(what_next(make_context(wide, true), one).find("--wire bf16: sums back"),
            std::string::npos);

  std::vector<StrategyResult> planning = one;
  planning.front().plan_us.median = 5000;
  EXPECT_NE(what_next(make_context(two, true), planning).find("planning is"), std::string::npos);

  std::vector<StrategyResult> idle = one;
  idle.front().link_utilisation_dispatch = 0.2;
  idle.front().link_utilisation_combine = 0.3;
  EXPECT_NE(what_next(make_context(two, true), idle).find("only 30 %"), std::string::npos);
}

}  // namespace
}  // namespace ferry::bench
