// Rows that cross under uniform and group-limited routing, against closed forms: E = 256 experts,
// k = 8, P = 8 ranks per node. About 33,000 tokens a case, so that four standard errors of a mean
// are below 0.03 rows.

#include <gtest/gtest.h>

#include <cmath>

#include "plan/rank_plan.hpp"
#include "plan/traffic.hpp"
#include "worlds.hpp"

namespace ferry::test {
namespace {

constexpr double kSamplingError = 0.03;
constexpr double kRoundedError = 0.005;  ///< of figures with two decimals

struct RowsPerToken {
  double out = 0;
  double back = 0;
};

RowsPerToken measure(int num_nodes, Strategy strategy, UniformRouting shape) {
  const Topology topology = Topology::uniform(num_nodes, 8);
  const plan::ExpertIndex experts(topology, Placement::contiguous(256, topology.num_ranks()));
  shape.num_tokens = 32768 / topology.num_ranks();
  shape.num_topk = 8;
  shape.num_experts = 256;
  std::vector<std::vector<std::int64_t>> ids;
  std::vector<Routing> routing;
  for (int rank = 0; rank < topology.num_ranks(); ++rank) {
    ids.push_back(uniform_ids(shape, static_cast<std::uint64_t>(rank) + 1));
    routing.push_back(Routing::of(shape.num_tokens, shape.num_topk, ids.back()));
  }
  RowsPerToken rows;
  for (const auto& plan : plan::make_all_plans({topology, experts, strategy, 64}, routing)) {
    const plan::RankTraffic total = plan::traffic(plan, topology, {});
    rows.out += static_cast<double>(total.rows_out);
    rows.back += static_cast<double>(total.rows_back);
  }
  const double num_tokens = 1.0 * shape.num_tokens * topology.num_ranks();
  return {rows.out / num_tokens, rows.back / num_tokens};
}

struct Row {
  int num_nodes;
  double flat, rank_dedup, node_gather, node_dedup;
};

class UniformTable : public testing::TestWithParam<Row> {};

TEST_P(UniformTable, rows_out_per_token) {
  const Row& row = GetParam();
  const RowsPerToken flat = measure(row.num_nodes, Strategy::flat, {});
  const RowsPerToken rank_dedup = measure(row.num_nodes, Strategy::rank_dedup, {});
  const RowsPerToken gather = measure(row.num_nodes, Strategy::node_gather, {});
  const RowsPerToken dedup = measure(row.num_nodes, Strategy::node_dedup, {});
  EXPECT_NEAR(flat.out, row.flat, kSamplingError + kRoundedError);
  EXPECT_NEAR(rank_dedup.out, row.rank_dedup, kSamplingError + kRoundedError);
  EXPECT_DOUBLE_EQ(gather.out, row.node_gather);
  EXPECT_NEAR(dedup.out, row.node_dedup, kSamplingError + kRoundedError);
  // What goes out comes back, but for tokens that gather sent in vain.
  EXPECT_DOUBLE_EQ(flat.back, flat.out);
  EXPECT_DOUBLE_EQ(rank_dedup.back, rank_dedup.out);
  EXPECT_DOUBLE_EQ(dedup.back, dedup.out);
  EXPECT_DOUBLE_EQ(gather.back, dedup.out);

  const double remote = (row.num_nodes - 1.0) / row.num_nodes;
  EXPECT_NEAR(dedup.out, remote * plan::expected_distinct_nodes(256, 8, row.num_nodes),
              kSamplingError);
  EXPECT_NEAR(rank_dedup.out, remote * plan::expected_distinct_nodes(256, 8, 8 * row.num_nodes),
              kSamplingError);
}

INSTANTIATE_TEST_SUITE_P(ClosedForms, UniformTable,
                         testing::Values(Row{2, 4.00, 3.26, 1, 0.997}, Row{4, 6.00, 5.45, 3, 2.71},
                                         Row{8, 7.00, 6.72, 7, 4.63}, Row{16, 7.5, 7.4, 15, 6.12}));

TEST(ClosedForms, group_limited_routing_crosses_less) {
  const UniformRouting groups{.num_groups = 8, .groups_per_token = 4};
  EXPECT_NEAR(measure(2, Strategy::node_dedup, groups).out, 0.963, kSamplingError / 4);
  EXPECT_NEAR(measure(8, Strategy::node_dedup, groups).out, 3.175, kSamplingError);
}

TEST(ClosedForms, expected_distinct_nodes) {
  EXPECT_DOUBLE_EQ(plan::expected_distinct_nodes(256, 8, 1), 1);
  EXPECT_DOUBLE_EQ(plan::expected_distinct_nodes(256, 0, 4), 0);
  EXPECT_DOUBLE_EQ(plan::expected_distinct_nodes(16, 1, 4), 1);
  EXPECT_DOUBLE_EQ(plan::expected_distinct_nodes(8, 8, 8), 8);
  // E = 4, k = 2, N = 2: of 6 pairs 2 lie on one node.
  EXPECT_DOUBLE_EQ(plan::expected_distinct_nodes(4, 2, 2), (2 * 1 + 4 * 2) / 6.0);
  EXPECT_NEAR(plan::expected_distinct_nodes(256, 8, 16) * 15 / 16, 6.12, kRoundedError);
}

}  // namespace
}  // namespace ferry::test
