// Records as bytes, and times of ranks whose clocks differ.

#include "bench/job_ranks.hpp"

#include <gtest/gtest.h>

#include "bench/result.hpp"
#include "common/failures.hpp"

namespace ferry::bench {
namespace {

RankRecords sample_records(double start_s) {
  RankRecord record;
  record.repeats.resize(2);
  record.repeats[0].memcpy = {start_s, start_s + 1};
  record.repeats[0].plan = {2, 3};
  record.repeats[0].dispatch = {4, 5};
  record.repeats[0].combine = {6, 7};
  record.repeats[1].memcpy = {1, 9};
  record.repeats[1].plan = {2, 8};
  record.repeats[1].dispatch = {3, 7};
  record.repeats[1].combine = {4, 6};
  record.counted = {.metadata = 1, .dispatch = 2, .combine = 3, .control = 4};
  record.summary.rows_received = 5;
  record.memory = {.pool = 6, .staging = 7, .plan = 8};
  record.metadata_rounds = 9;
  record.indices = {.tokens = {21, 22, 23, 24}, .experts = {}, .bytes = 25, .best_bytes = 26};
  record.step = {.metadata_rounds = 17, .host_stalls = 18, .stall_us = 19};
  record.step_no_reuse.stall_us = 20;
  BaselineRecord baseline;
  baseline.repeats = {{{10, 11}, {12, 13}, {14, 15}}};
  baseline.buffer_bytes = 16;
  return {{record, {}}, {baseline, {}}};
}

TEST(Records, SurviveTheWayToAnotherRank) {
  const RankRecords sent = sample_records(0.5);
  const RankRecords got = from_bytes(to_bytes(sent));
  ASSERT_EQ(got.strategies.size(), 2U);
  ASSERT_EQ(got.baselines.size(), 2U);
  const RankRecord& record = got.strategies[0];
  ASSERT_EQ(record.repeats.size(), 2U);
  EXPECT_EQ(record.repeats[0].memcpy.start_s, 0.5);
  EXPECT_EQ(record.repeats[1].combine.end_s, 6);
  EXPECT_EQ(record.counted.control, 4U);
  EXPECT_EQ(record.summary.rows_received, 5);
  EXPECT_EQ(record.memory.all(), 21U);
  EXPECT_EQ(record.metadata_rounds, 9U);
  EXPECT_EQ(record.indices.tokens[3], 24U);
  EXPECT_EQ(record.indices.best_bytes, 26U);
  EXPECT_EQ(record.step.host_stalls, 18U);
  EXPECT_EQ(record.step_no_reuse.stall_us, 20);
  EXPECT_TRUE(got.strategies[1].repeats.empty());
  ASSERT_EQ(got.baselines[0].repeats.size(), 1U);
  EXPECT_EQ(got.baselines[0].repeats[0].combine.end_s, 15);
  EXPECT_EQ(got.baselines[0].buffer_bytes, 16U);
}

TEST(Records, OfAnotherFormAreRefused) {
  std::vector<std::byte> bytes = to_bytes(sample_records(0));
  EXPECT_THROW(from_bytes(std::span(bytes).first(bytes.size() - 1)), tools::EnvironmentError);
  bytes.push_back({});
  EXPECT_THROW(from_bytes(bytes), tools::EnvironmentError);
  EXPECT_THROW(from_bytes(std::vector<std::byte>(16, std::byte{0xFF})), tools::EnvironmentError);
}

struct TwoRanks {
  BenchOptions options;
  Workload workload{Topology::single_node(2),
                    Placement::contiguous(2, 2),
                    {8, DType::bf16},
                    1,
                    {},
                    "uniform",
                    {}};
  RowCounts counts;

  /// Rank 0 works in 0..2 s, rank 1 from `start_s` for one second.
  StrategyResult result(double start_s, bool one_clock) {
    options.strategies = {Strategy::flat};
    options.repeat = 1;
    workload.routing.resize(2);
    counts = count_rows(workload);
    RunContext context{options, workload, counts, nullptr, {}, {.one_clock = one_clock}};
    const Interval of[] = {{0, 2}, {start_s, start_s + 1}};
    for (const Interval& own : of) {
      RankRecord record;
      record.repeats = {{own, own, own, own}};
      context.ranks.push_back({{record}, {}});
    }
    return summarise(context).strategies.front();
  }
};

TEST(Times, AreFromFirstStartToLastEndOnOneClock) {
  EXPECT_DOUBLE_EQ(TwoRanks().result(1.5, true).plan_us.median, 2.5e6);
  EXPECT_DOUBLE_EQ(TwoRanks().result(0.5, true).plan_us.median, 2e6);
}

TEST(Times, AreTheLongestOwnDurationOnSeveralClocks) {
  EXPECT_DOUBLE_EQ(TwoRanks().result(1e6, false).plan_us.median, 2e6);
}

}  // namespace
}  // namespace ferry::bench
