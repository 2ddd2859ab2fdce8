// Rows in windows: nobody reads them before all of them are there, however many steps that takes,
// and two uses of one plan keep theirs apart.

#include <algorithm>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "exchange/stepped_ranks.hpp"

namespace ferry::testing {
namespace {

/// Rows of 256 KiB: a rank copies a few of its rows in a step.
constexpr std::int64_t kLongHidden = 64 * 1024;

void expect_rows(ConstMatrix rows, float value) {
  for (std::int64_t row = 0; row < rows.rows; ++row) {
    const auto* const elements = reinterpret_cast<const float*>(rows.row(row));
    for (std::int64_t column = 0; column < rows.columns; ++column) {
      ASSERT_EQ(elements[column], value) << "row " << row << ", column " << column;
    }
  }
}

TEST(Windows, RowsAreReadOnlyWhenAllOfThemAreWritten) {
  SteppedRanks ranks(Topology::uniform(1, 2), small_ranges(), kLongHidden);
  const std::vector<Plan> plans = ranks.plan_all();
  auto writing = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
  auto reading = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return reading.done(); }));
  const ExpertRows rows = reading.wait();
  expect_rows(rows.matrix(), 1.0F);
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return writing.done(); }));
}

TEST(Windows, OutputsAreReadOnlyWhenAllOfThemAreCopied) {
  ExchangeOptions options = small_ranges();
  options.range_tokens = kTokens;  // all outputs are read in one step
  SteppedRanks ranks(Topology::uniform(1, 2), options, kLongHidden);
  const std::vector<Plan> plans = ranks.plan_all();
  const std::vector<float> outputs(kTokens * kLongHidden, 3.0F);
  const ConstMatrix y{outputs.data(), DType::f32, kTokens, kLongHidden, 0};
  auto copying = ranks.exchange(0).start_combine(plans[0], y, ranks.out(0));
  auto reading = ranks.exchange(1).start_combine(plans[1], y, ranks.out(1));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return reading.done() && copying.done(); }));
  expect_rows(ranks.out(0), 3.0F);
  expect_rows(ranks.out(1), 3.0F);
}

TEST(Windows, UsesOfOnePlanAtOnceKeepTheirRowsApart) {
  // All fragments of the first use lie at rank 1 when its second dispatch starts: far more than a
  // call takes in one step.
  ExchangeOptions options = small_ranges();
  options.ranges_in_flight = kFragments;
  SteppedRanks ranks(nodes(2), options);
  const std::vector<Plan> plans = ranks.plan_all();
  const std::vector<float> values(kTokens * kHidden, 2.0F);
  const ConstMatrix other{values.data(), DType::f32, kTokens, kHidden, 0};
  auto first = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
  ranks.work(ranks.all(), 50);
  auto sending = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
  ranks.work({0}, 200);
  auto second = ranks.exchange(1).start_dispatch(plans[1], other);
  auto sending_again = ranks.exchange(0).start_dispatch(plans[0], other);
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] {
    return first.done() && second.done() && sending.done() && sending_again.done();
  }));
  expect_rows(first.wait().matrix(), 1.0F);
  expect_rows(second.wait().matrix(), 2.0F);
}

TEST(Windows, OneIsShownByOneCallAtATime) {
  // Rank 0 combines the same outputs on two plans. Rank 1 reads one row for the second, many for
  // the first: where it is done with the second, the first must not count as read.
  SteppedRanks ranks(Topology::uniform(1, 2));
  const std::vector<std::int32_t> ids(kTokens, 0);
  const auto plan_with = [&](std::int64_t tokens) {
    std::vector<Pending<Plan>> pending;
    for (const int rank : ranks.all()) {
      pending.push_back(
          ranks.exchange(rank).start_plan(Routing::of(rank == 0 ? 0 : tokens, 1, std::span(ids))));
    }
    EXPECT_TRUE(ranks.work_until_done(pending));
    std::vector<Plan> plans;
    for (Pending<Plan>& one : pending) plans.push_back(one.wait());
    return plans;
  };
  const std::vector<Plan> many = plan_with(kTokens);
  const std::vector<Plan> one = plan_with(1);
  const OutputRows output = ranks.exchange(0).output(many[0]);
  const Matrix y = output.matrix();
  std::fill_n(static_cast<float*>(y.data), kTokens * kHidden, 3.0F);
  std::vector<float> out_of_one(kHidden);
  const ConstMatrix no_rows{nullptr, DType::f32, 0, kHidden, 0};
  const Matrix no_out{nullptr, DType::f32, 0, kHidden, 0};
  const ConstMatrix first_row{y.data, DType::f32, 1, kHidden, y.row_stride_bytes};
  auto first = ranks.exchange(0).start_combine(many[0], y, no_out);
  auto second = ranks.exchange(0).start_combine(one[0], first_row, no_out);
  auto reading = ranks.exchange(1).start_combine(many[1], no_rows, ranks.out(1));
  auto reading_too = ranks.exchange(1).start_combine(
      one[1], no_rows, {out_of_one.data(), DType::f32, 1, kHidden, 0});
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return first.done(); }));
  std::fill_n(static_cast<float*>(y.data), kTokens * kHidden, 7.0F);  // the caller's again
  ASSERT_TRUE(ranks.work_until(
      ranks.all(), [&] { return second.done() && reading.done() && reading_too.done(); }));
  expect_rows(ranks.out(1), 3.0F);
}

TEST(Windows, CountsNeverLieWhereRowsHaveBeen) {
  // Memory of rows is closed to all but kernels where a test asks for it.
  SteppedRanks ranks(Topology::uniform(1, 2));
  const std::vector<Plan> plans = ranks.plan_all();
  const std::uint64_t counts = pool_bytes(ranks.transport(0));
  const OutputRows output = ranks.exchange(0).output(plans[0]);
  EXPECT_GT(pool_bytes(ranks.transport(0)), counts);
}

}  // namespace
}  // namespace ferry::testing
