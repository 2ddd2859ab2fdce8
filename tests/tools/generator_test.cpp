// Generated routing: what --routing may say, the shares of hot experts and groups, and rows per
// token against closed forms.

#include "common/generator.hpp"

#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include "bench/workload.hpp"
#include "common/failures.hpp"

namespace ferry::tools {
namespace {

using Kind = RoutingPattern::Kind;

std::vector<support::RoutingData> generate(const std::string& routing, const RouterShape& shape,
                                           std::vector<std::int64_t> tokens = {300, 0, 500}) {
  const RoutingPattern pattern = parse_routing(routing);
  check_pattern(pattern, shape);
  return generate_routing(pattern, shape, tokens, 7);
}

/// Calls check(experts of the token) for every token of all ranks.
template <typename Check>
void for_each_token(const std::vector<support::RoutingData>& ranks, const Check& check) {
  for (const support::RoutingData& rank : ranks) {
    const auto num_topk = static_cast<std::size_t>(rank.num_topk);
    for (std::size_t at = 0; at < rank.topk_idx.size(); at += num_topk) {
      check(std::span(rank.topk_idx).subspan(at, num_topk));
    }
  }
}

std::string refusal(const std::string& routing, const RouterShape& shape) {
  try {
    generate(routing, shape);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(RoutingPattern, IsWhatItsTextSays) {
  EXPECT_EQ(parse_routing("uniform").kind, Kind::uniform);
  EXPECT_EQ(parse_routing("zipf:1.5").zipf_exponent, 1.5);
  EXPECT_EQ(parse_routing("khot:4").num_hot, 4);
  EXPECT_EQ(parse_routing("group:8,4").num_groups, 8);
  EXPECT_EQ(parse_routing("group:8,4").groups_per_token, 4);
  for (const char* text : {"uniform", "zipf:1.5", "khot:4", "group:8,4"}) {
    EXPECT_EQ(to_string(parse_routing(text)), text);
  }
  for (const char* bad : {"", "hot", "uniform:1", "zipf", "zipf:", "zipf:nan", "zipf:-1", "zipf:11",
                          "khot", "khot:", "khot:0", "khot:2.5", "khot:4,2", "group:8", "group:8,",
                          "group:8,9", "group:0,0", "group:8,4,2"}) {
    EXPECT_THROW(parse_routing(bad), UsageError) << bad;
  }
}

TEST(RoutingPattern, RefusesWhatTheExpertsDoNotAllow) {
  EXPECT_NE(refusal("uniform", {4, 5}).find("--topk 5"), std::string::npos);
  EXPECT_NE(refusal("khot:9", {8, 2}).find("9 hot experts of 8; allowed: 1..8"), std::string::npos);
  EXPECT_NE(refusal("group:3,2", {8, 2}).find("3 groups do not divide 8"), std::string::npos);
  EXPECT_NE(refusal("group:4,1", {8, 3}).find("top-3 of the 2 experts of 1"), std::string::npos);
  EXPECT_EQ(refusal("group:4,2", {8, 4}), "accepted");
}

TEST(Generator, EveryTokenHasDifferentExpertsAndWeightsOfSumOne) {
  const RouterShape shape{16, 5};
  for (const char* routing : {"uniform", "zipf:1.2", "khot:1", "khot:3", "khot:5", "khot:9",
                              "khot:13", "khot:16", "group:4,2", "group:16,5", "group:1,1"}) {
    const auto ranks = generate(routing, shape);
    EXPECT_EQ(ranks[0].num_tokens, 300);
    EXPECT_EQ(ranks[1].num_tokens, 0);
    for_each_token(ranks, [&](std::span<const std::int32_t> experts) {
      const std::set<std::int32_t> distinct(experts.begin(), experts.end());
      ASSERT_EQ(distinct.size(), 5U) << routing;
      ASSERT_GE(*distinct.begin(), 0) << routing;
      ASSERT_LT(*distinct.rbegin(), 16) << routing;
    });
    double sum = 0;
    for (const float weight : ranks[2].topk_weights) sum += weight;
    EXPECT_NEAR(sum, 500, 1e-3) << routing;
  }
}

TEST(Generator, FollowsTheSeedAndDiffersBetweenRanks) {
  for (const char* routing : {"uniform", "khot:3", "group:4,2"}) {
    const RoutingPattern pattern = parse_routing(routing);
    const std::vector<std::int64_t> tokens = {200, 200};
    const auto first = generate_routing(pattern, {16, 3}, tokens, 1);
    const auto again = generate_routing(pattern, {16, 3}, tokens, 1);
    const auto other = generate_routing(pattern, {16, 3}, tokens, 2);
    EXPECT_EQ(first[0].topk_idx, again[0].topk_idx) << routing;
    EXPECT_NE(first[0].topk_idx, other[0].topk_idx) << routing;
    EXPECT_NE(first[0].topk_idx, first[1].topk_idx) << routing;
  }
}

TEST(Khot, HotExpertsAreSpreadOverTheIds) {
  EXPECT_EQ(hot_experts(256, 4), (std::vector<std::int32_t>{0, 64, 128, 192}));
  EXPECT_EQ(hot_experts(10, 3), (std::vector<std::int32_t>{0, 3, 6}));
  EXPECT_EQ(hot_experts(4, 4), (std::vector<std::int32_t>{0, 1, 2, 3}));
}

TEST(Khot, EveryTokenTakesAsManyHotExpertsAsItCan) {
  struct Case {
    const char* routing;
    RouterShape shape;
    int hot_per_token;
  };
  // The last: fewer cold experts (3) than slots (6).
  for (const Case& one : {Case{"khot:2", {32, 6}, 2}, Case{"khot:6", {32, 6}, 6},
                          Case{"khot:20", {32, 6}, 6}, Case{"khot:5", {8, 6}, 5}}) {
    const int num_hot = parse_routing(one.routing).num_hot;
    const std::vector<std::int32_t> hot = hot_experts(one.shape.num_experts, num_hot);
    std::vector<double> load(static_cast<std::size_t>(one.shape.num_experts));
    const auto ranks = generate(one.routing, one.shape, {6000, 6000});
    for_each_token(ranks, [&](std::span<const std::int32_t> experts) {
      int of_hot = 0;
      for (const std::int32_t expert : experts) {
        ++load[static_cast<std::size_t>(expert)];
        of_hot += std::binary_search(hot.begin(), hot.end(), expert) ? 1 : 0;
      }
      ASSERT_EQ(of_hot, one.hot_per_token) << one.routing;
    });
    const double num_tokens = 12000;
    const int cold = one.shape.num_experts - num_hot;
    for (int expert = 0; expert < one.shape.num_experts; ++expert) {
      const bool is_hot = std::binary_search(hot.begin(), hot.end(), expert);
      const double share = is_hot ? 1.0 * one.hot_per_token / num_hot
                                  : 1.0 * (one.shape.num_topk - one.hot_per_token) / cold;
      EXPECT_NEAR(load[static_cast<std::size_t>(expert)] / num_tokens, share, 0.02)
          << one.routing << " expert " << expert;
    }
  }
}

TEST(Group, TokensUseThatManyGroupsAndAllGroupsAlike) {
  std::vector<double> load(64);
  std::size_t most_groups = 0;
  for_each_token(generate("group:8,3", {64, 6}, {4000, 4000}),
                 [&](std::span<const std::int32_t> experts) {
                   std::set<std::int32_t> groups;
                   for (const std::int32_t expert : experts) {
                     groups.insert(expert / 8);
                     ++load[static_cast<std::size_t>(expert)];
                   }
                   most_groups = std::max(most_groups, groups.size());
                 });
  EXPECT_EQ(most_groups, 3U);
  for (const double expert : load) EXPECT_NEAR(expert / 8000, 6.0 / 64, 0.02);
}

struct Expected {
  const char* routing;
  int num_nodes;
  double flat, rank_dedup, node_dedup;
  double error;
};

class RowsPerToken : public testing::TestWithParam<Expected> {};

TEST_P(RowsPerToken, MeetTheClosedForm) {
  const Expected& expected = GetParam();
  bench::BenchOptions options;
  options.num_nodes = expected.num_nodes;
  options.ranks_per_node = 8;
  options.num_experts = 256;
  options.num_topk = 8;
  options.hidden = 1;
  options.tokens = {32768 / options.num_ranks()};
  options.pattern = parse_routing(expected.routing);
  const bench::Workload workload = bench::make_workload(options);
  const bench::RowCounts counts = bench::count_rows(workload);
  const auto per_token = [&](Strategy strategy) {
    return static_cast<double>(counts.of(strategy).out.total()) /
           static_cast<double>(workload.num_tokens());
  };
  EXPECT_NEAR(per_token(Strategy::flat), expected.flat, expected.error);
  EXPECT_NEAR(per_token(Strategy::rank_dedup), expected.rank_dedup, expected.error);
  EXPECT_NEAR(per_token(Strategy::node_dedup), expected.node_dedup, expected.error);
}

// group:8,4: four groups hold 128 candidates, on 8 ranks of 16 at N=2 and on 32 ranks of 4 at N=8:
// 8 (1 - C(112,8)/C(128,8)) / 2 = 2.670 and 32 (1 - C(124,8)/C(128,8)) 7/8 = 6.439 remote ranks.
// khot:8 is exact: every token goes to one hot expert per node at N=8, four at N=2. khot:K beyond
// that: the ranks of the K hot experts for sure, the others as the k - K cold ones hit them.
INSTANTIATE_TEST_SUITE_P(ClosedForms, RowsPerToken,
                         testing::Values(Expected{"group:8,4", 2, 4, 2.670, 0.963, 0.03},
                                         Expected{"group:8,4", 8, 7, 6.439, 3.175, 0.03},
                                         Expected{"khot:8", 8, 7, 7, 7, 0},
                                         Expected{"khot:8", 2, 4, 4, 1, 0},
                                         Expected{"khot:1", 2, 4, 3.262, 0.9965, 0.03},
                                         Expected{"khot:4", 2, 4, 3.392, 1, 0.03}));

}  // namespace
}  // namespace ferry::tools
