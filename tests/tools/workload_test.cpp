// Row counts against small routings counted by hand and against closed forms.

#include "bench/workload.hpp"

#include <gtest/gtest.h>

#include "common/failures.hpp"
#include "tools/trace_files.hpp"

namespace ferry::bench {
namespace {

BenchOptions options_for(int num_nodes, int ranks_per_node) {
  BenchOptions options;
  options.num_nodes = num_nodes;
  options.ranks_per_node = ranks_per_node;
  options.hidden = 16;
  return options;
}

TEST(CountRows, CountsDistinctExpertsRanksAndNodes) {
  // Two nodes of two ranks, eight experts, two per rank; one token on rank 0.
  BenchOptions options = options_for(2, 2);
  options.num_experts = 8;
  options.num_topk = 6;
  options.tokens = {1, 0, 0, 0};
  Workload workload = make_workload(options);
  workload.routing[0].topk_idx = {0, 5, -1, 4, 7, 5};
  const RowCounts counts = count_rows(workload);
  EXPECT_EQ(counts.received, (std::vector<std::int64_t>{1, 0, 2, 1}));
  EXPECT_EQ(counts.of(Strategy::flat).out.at(0, 1), 3);
  EXPECT_EQ(counts.of(Strategy::rank_dedup).out.at(0, 1), 2);
  EXPECT_EQ(counts.of(Strategy::node_dedup).out.at(0, 1), 1);
  EXPECT_EQ(counts.of(Strategy::node_gather).out.at(0, 1), 1);
  EXPECT_EQ(counts.bound, 1);
  EXPECT_EQ(counts.of(Strategy::flat).out.total(), 3);
  EXPECT_EQ(counts.of(Strategy::flat).out.into(1), 3);
  EXPECT_EQ(counts.of(Strategy::flat).out.into(0), 0);
}

TEST(CountRows, GatherSendsTokensWithoutAnExpertOutButNotBack) {
  BenchOptions options = options_for(3, 1);
  options.num_experts = 3;
  options.num_topk = 1;
  options.tokens = {1, 1, 0};
  Workload workload = make_workload(options);
  workload.routing[0].topk_idx = {0};
  workload.routing[1].topk_idx = {-1};
  const RowCounts counts = count_rows(workload);
  EXPECT_EQ(counts.of(Strategy::node_gather).out.total(), 4);
  EXPECT_EQ(counts.of(Strategy::node_gather).back.total(), 0);
  EXPECT_EQ(counts.bound, 0);
}

TEST(CountRows, UniformRoutingMeetsTheClosedForms) {
  // E=256, k=8, P=8, N=4: rows out per token 6.00, 5.45, 3, 2.71.
  BenchOptions options = options_for(4, 8);
  options.num_experts = 256;
  options.num_topk = 8;
  options.tokens = {256};
  const Workload workload = make_workload(options);
  const RowCounts counts = count_rows(workload);
  const auto per_token = [&](Strategy strategy) {
    return static_cast<double>(counts.of(strategy).out.total()) /
           static_cast<double>(workload.num_tokens());
  };
  EXPECT_NEAR(per_token(Strategy::flat), 6.00, 0.05);
  EXPECT_NEAR(per_token(Strategy::rank_dedup), 5.45, 0.05);
  EXPECT_EQ(per_token(Strategy::node_gather), 3.0);
  EXPECT_NEAR(per_token(Strategy::node_dedup), 2.71, 0.03);
}

TEST(MakeWorkload, TakesWholeSequencesOfATraceAndSaysWhatItCut) {
  const tools::TemporaryDirectory directory;
  tools::write_small_trace(directory);
  BenchOptions options = options_for(1, 2);
  options.hidden.reset();
  options.trace_directory = directory.path().string();
  Workload workload = make_workload(options);
  EXPECT_EQ(workload.shape.hidden, 16);
  EXPECT_EQ(workload.num_topk, 2);
  EXPECT_EQ(workload.routing[0].num_tokens, 2);
  EXPECT_EQ(workload.routing[1].num_tokens, 4);
  EXPECT_EQ(workload.routing[1].topk_idx.front(), 2);
  EXPECT_EQ(workload.notes.size(), 1U);

  options.tokens = {1};
  workload = make_workload(options);
  EXPECT_EQ(workload.num_tokens(), 2);
  ASSERT_EQ(workload.notes.size(), 2U);
  EXPECT_NE(workload.notes[1].find("2 of 2 ranks"), std::string::npos);
}

TEST(MakeWorkload, RefusesMoreTopkThanExperts) {
  BenchOptions options = options_for(1, 2);
  options.num_experts = 4;
  options.num_topk = 5;
  EXPECT_THROW(make_workload(options), tools::UsageError);
}

}  // namespace
}  // namespace ferry::bench
