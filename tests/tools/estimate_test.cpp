// Rows, bytes and bounds of ferry plan: against closed forms, against the bench's own count of the
// same routing, and against pairs (token, expert) followed one by one.

#include "planner/estimate.hpp"

#include <algorithm>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "bench/workload.hpp"
#include "wire/headers.hpp"

namespace ferry::planner {
namespace {

constexpr double kSamplingError = 0.03;  ///< more than four standard errors of about 33,000 tokens
constexpr double kRoundedError = 0.005;  ///< of figures with two decimals

const Cluster kCluster{"test", 8, 50, LinkPer::rank, 160, "test"};

PlanOptions options_for(const std::string& model, int num_nodes, int ranks_per_node) {
  PlanOptions options;
  options.model = model;
  options.cluster = kCluster;
  options.num_nodes = num_nodes;
  options.ranks_per_node = ranks_per_node;
  options.tokens = {32768 / options.num_ranks()};
  return options;
}

double rows_per_token(const Scenario& scenario, Strategy strategy) {
  const StrategyEstimate estimate = Estimator(scenario).estimate(strategy);
  return static_cast<double>(estimate.dispatch.inter_node.rows) /
         static_cast<double>(scenario.num_tokens());
}

struct Row {
  int num_nodes;
  double flat, rank_dedup, node_gather, node_dedup;
};
class UniformTable : public testing::TestWithParam<Row> {};

TEST_P(UniformTable, RowsOutPerToken) {
  const Row& row = GetParam();
  PlanOptions options = options_for("deepseek-v3", row.num_nodes, 8);
  options.pattern = tools::RoutingPattern{};
  const Scenario scenario = make_scenario(options);
  const double error = kSamplingError + kRoundedError;
  EXPECT_NEAR(rows_per_token(scenario, Strategy::flat), row.flat, error);
  EXPECT_NEAR(rows_per_token(scenario, Strategy::rank_dedup), row.rank_dedup, error);
  EXPECT_DOUBLE_EQ(rows_per_token(scenario, Strategy::node_gather), row.node_gather);
  EXPECT_NEAR(rows_per_token(scenario, Strategy::node_dedup), row.node_dedup, error);
}

INSTANTIATE_TEST_SUITE_P(ClosedForms, UniformTable,
                         testing::Values(Row{2, 4.00, 3.26, 1, 0.997}, Row{4, 6.00, 5.45, 3, 2.71},
                                         Row{8, 7.00, 6.72, 7, 4.63}, Row{16, 7.5, 7.4, 15, 6.12}));

TEST(Estimate, DeepSeekV3RoutesWithinItsGroups) {
  const Scenario two = make_scenario(options_for("deepseek-v3", 2, 8));
  EXPECT_EQ(two.routing_name, "group:8,4");
  EXPECT_NEAR(rows_per_token(two, Strategy::node_dedup), 0.963, kSamplingError / 4);
  const Scenario eight = make_scenario(options_for("deepseek-v3", 8, 8));
  EXPECT_NEAR(rows_per_token(eight, Strategy::node_dedup), 3.175, kSamplingError);
}

TEST(Estimate, CountsTheRowsThatTheBenchCounts) {
  for (const char* routing : {"uniform", "zipf:1.0", "khot:3", "group:4,2"}) {
    PlanOptions options = options_for("gpt-oss-20b", 3, 4);
    options.tokens = {50, 0, 7, 100, 3, 3, 3, 90, 1, 20, 30, 40};
    options.pattern = tools::parse_routing(routing);
    const Scenario scenario = make_scenario(options);
    const bench::Workload workload{scenario.topology,
                                   scenario.placement,
                                   {16, DType::bf16},
                                   4,
                                   scenario.routing,
                                   routing,
                                   {},
                                   {}};
    const bench::RowCounts counts = bench::count_rows(workload);
    const Estimator estimator(scenario);
    for (const Strategy strategy :
         {Strategy::flat, Strategy::rank_dedup, Strategy::node_gather, Strategy::node_dedup}) {
      const StrategyEstimate estimate = estimator.estimate(strategy);
      EXPECT_EQ(static_cast<std::int64_t>(estimate.dispatch.inter_node.rows),
                counts.of(strategy).out.total())
          << routing << " " << to_string(strategy);
      EXPECT_EQ(static_cast<std::int64_t>(estimate.combine.inter_node.rows),
                counts.of(strategy).back.total())
          << routing << " " << to_string(strategy);
    }
  }
}

/// Rows inside a node by (writer, reader), from the definition of the landing rank.
struct InsideRows {
  std::map<std::pair<int, int>, std::uint64_t> per_expert;
  std::map<std::pair<int, int>, std::uint64_t> per_rank;
};

InsideRows follow(const Scenario& scenario, Strategy strategy) {
  const bool on_rail = strategy == Strategy::node_gather || strategy == Strategy::node_dedup;
  InsideRows inside;
  for (int source = 0; source < scenario.num_ranks(); ++source) {
    const support::RoutingData& data = scenario.routing[static_cast<std::size_t>(source)];
    for (std::int64_t token = 0; token < data.num_tokens; ++token) {
      std::set<std::pair<int, int>> pairs;
      for (int slot = 0; slot < data.num_topk; ++slot) {
        const int reader = scenario.placement.rank_of(
            data.topk_idx[static_cast<std::size_t>(token * data.num_topk + slot)]);
        const int node = scenario.topology.node_of(reader);
        const bool at_home = scenario.topology.node_of(source) == node;
        const int writer = at_home   ? source
                           : on_rail ? scenario.topology.rail_rank(source, node)
                                     : reader;
        if (writer == reader) continue;
        ++inside.per_expert[{writer, reader}];
        pairs.insert({writer, reader});
      }
      for (const auto& pair : pairs) ++inside.per_rank[pair];
    }
  }
  return inside;
}

void expect_flow(const Flow& flow, const std::map<std::pair<int, int>, std::uint64_t>& rows,
                 std::uint64_t row_bytes) {
  std::uint64_t total = 0;
  std::map<int, std::uint64_t> sent;
  std::map<int, std::uint64_t> received;
  for (const auto& [pair, count] : rows) {
    total += count;
    sent[pair.first] += count;
    received[pair.second] += count;
  }
  std::uint64_t worst = 0;
  for (const auto& [rank, count] : sent) worst = std::max(worst, count);
  for (const auto& [rank, count] : received) worst = std::max(worst, count);
  EXPECT_EQ(flow.rows, total);
  EXPECT_EQ(flow.bytes, total * row_bytes);
  EXPECT_EQ(flow.worst_bytes, worst * row_bytes);
}

TEST(Estimate, FollowsRowsInsideANode) {
  for (const char* routing : {"uniform", "khot:2"}) {
    PlanOptions options = options_for("deepseek-v2-lite", 3, 4);
    options.tokens = {40, 0, 7, 60, 3, 3, 3, 50, 1, 20, 30, 40};
    options.pattern = tools::parse_routing(routing);
    const Scenario scenario = make_scenario(options);
    const Estimator estimator(scenario);
    for (const Strategy strategy :
         {Strategy::flat, Strategy::rank_dedup, Strategy::node_gather, Strategy::node_dedup}) {
      SCOPED_TRACE(to_string(strategy));
      const StrategyEstimate estimate = estimator.estimate(strategy);
      const InsideRows inside = follow(scenario, strategy);
      expect_flow(estimate.dispatch.intra_node, inside.per_expert, 2048 * 2);
      expect_flow(estimate.combine.intra_node, inside.per_expert, 2048 * 2);
      expect_flow(estimate.intra_node_token_major,
                  strategy == Strategy::flat ? inside.per_expert : inside.per_rank, 2048 * 2);
    }
  }
}

TEST(Estimate, BytesAreRowsInTheirWireFormatAndHeaders) {
  PlanOptions options = options_for("mixtral-8x7b", 2, 1);
  options.tokens = {100, 0};
  options.pattern = tools::parse_routing("khot:2");  // experts 0 and 4: one on each rank
  options.wire = {.dispatch = WireFormat::bf16, .combine = WireFormat::f32};
  const StrategyEstimate estimate =
      Estimator(make_scenario(options)).estimate(Strategy::node_dedup);
  // 8192 B a row: 7 rows and a header a fragment; ranges of 8 x 3 rows (16384 B each),
  // so 4 ranges of 24 rows in 4 fragments and one of 4 in one. Back: 3 rows a fragment.
  EXPECT_EQ(estimate.dispatch.inter_node.rows, 100U);
  EXPECT_EQ(estimate.dispatch.inter_node.bytes, 100U * 8192 + 17 * wire::kFragmentHeaderBytes);
  EXPECT_EQ(estimate.combine.inter_node.bytes, 100U * 16384 + 34 * wire::kFragmentHeaderBytes);
  EXPECT_EQ(estimate.dispatch.inter_node.worst_bytes, estimate.dispatch.inter_node.bytes);
  EXPECT_DOUBLE_EQ(estimate.dispatch.inter_node.mean_bytes * 2,
                   static_cast<double>(estimate.dispatch.inter_node.bytes));
  EXPECT_EQ(estimate.dispatch.intra_node.bytes, 0U);
}

TEST(Estimate, TheBoundIsTheFullestLink) {
  PlanOptions options = options_for("mixtral-8x7b", 2, 4);
  options.tokens = {1000, 10, 10, 10, 10, 10, 10, 10};
  const StrategyEstimate per_rank =
      Estimator(make_scenario(options)).estimate(Strategy::node_dedup);
  const Flow& flow = per_rank.dispatch.inter_node;
  EXPECT_EQ(flow.worst_rank, 0);
  EXPECT_DOUBLE_EQ(flow.bound_us, static_cast<double>(flow.worst_bytes) / 50e3);
  EXPECT_DOUBLE_EQ(per_rank.dispatch.intra_node.bound_us,
                   static_cast<double>(per_rank.dispatch.intra_node.worst_bytes) / 160e3);
  EXPECT_DOUBLE_EQ(per_rank.dispatch.bound_us(),
                   std::max(flow.bound_us, per_rank.dispatch.intra_node.bound_us));

  // One link for the node carries what its four ranks send.
  options.cluster.link_per = LinkPer::node;
  const StrategyEstimate per_node =
      Estimator(make_scenario(options)).estimate(Strategy::node_dedup);
  EXPECT_EQ(per_node.dispatch.inter_node.worst_bytes, flow.worst_bytes);
  EXPECT_GT(per_node.dispatch.inter_node.bound_us, flow.bound_us);
  EXPECT_LT(per_node.dispatch.inter_node.bound_us, static_cast<double>(flow.bytes) / 50e3);
}

TEST(Estimate, AReceiverCanBeTheWorstRank) {
  PlanOptions options = options_for("mixtral-8x7b", 2, 4);
  options.tokens = {200};
  options.pattern = tools::parse_routing("khot:1");  // every token to expert 0, on rank 0
  const StrategyEstimate flat = Estimator(make_scenario(options)).estimate(Strategy::flat);
  // All 800 tokens of node 1 land on rank 0, which is more than any rank sends.
  EXPECT_EQ(flat.dispatch.inter_node.worst_rank, 0);
  EXPECT_GE(flat.dispatch.inter_node.worst_bytes, 800U * 8192);
}

TEST(Estimate, WithoutTokensNothingMoves) {
  PlanOptions options = options_for("mixtral-8x7b", 2, 2);
  options.tokens = {0};
  const Scenario scenario = make_scenario(options);
  const StrategyEstimate estimate = Estimator(scenario).estimate(Strategy::node_gather);
  EXPECT_EQ(estimate.dispatch.inter_node.bytes, 0U);
  EXPECT_EQ(estimate.dispatch.bound_us(), 0);
}

}  // namespace
}  // namespace ferry::planner
