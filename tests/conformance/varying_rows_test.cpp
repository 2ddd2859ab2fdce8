// Cases about rows whose size depends on their values: quantised rows with a limit on their error,
// and sparse rows. Rows, sums and gradients are those of the oracle bit for bit; what crossed is
// counted, and is what the transport sent.

#include <iterator>
#include <limits>
#include <numeric>

#include <fmt/format.h>

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

constexpr WireFormat kFp8 = WireFormat::fp8_e4m3fn;
constexpr WireFormat kInt8 = WireFormat::int8;

class VaryingRows : public Conformance {
 protected:
  static constexpr int kExperts = 13;

  Layer layer(Group group) const {
    const RoutingSpec spec{
        .num_experts = kExperts, .num_topk = 5, .none_share = 0.1, .repeat_share = 0.2};
    return {std::move(group), make_all_routing(spec, ragged(7), 11)};
  }
  Group limited(float limit, std::int64_t hidden) const {
    Group made = group(kExperts, hidden);
    made.wire_dispatch = kInt8;
    made.wire_combine = kFp8;
    made.wire_combine_backward = kFp8;
    made.wire_dispatch_backward = kInt8;
    made.wire_block_columns = 64;
    made.max_relative_error = limit;
    return made;
  }
  Group sparse(float ratio, std::int64_t hidden) const {
    Group made = group(kExperts, hidden);
    made.wire_dispatch = WireFormat::sparse_bf16;
    made.wire_combine = WireFormat::sparse_f32;
    made.wire_combine_backward = WireFormat::sparse_f16;
    made.wire_dispatch_backward = WireFormat::sparse_bf16;
    made.wire_block_columns = 64;
    made.wire_sparse_ratio = ratio;
    return made;
  }
  /// What all ranks sent together.
  struct Sent {
    std::uint64_t rows = 0;  ///< of dispatch
    std::uint64_t payload_bytes = 0;
    std::uint64_t escalated_rows = 0;
    std::uint64_t escalated_outputs = 0;
  };

  Sent run_all(const Layer& made, const LayerRun& wanted) {
    std::vector<WireStatistics> of_ranks(static_cast<std::size_t>(num_ranks()));
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, made.group());
      LayerRun run = wanted;
      run.check_bytes = false;  // what is planned is a bound
      const std::uint64_t before = context.transport().counters().payload_bytes;
      co_await run_layer(context, exchange, made, run);
      const WireStatistics used = exchange.wire_statistics();
      check_counters(made, wanted, used, context.transport().counters().payload_bytes - before);
      of_ranks[static_cast<std::size_t>(context.rank())] = used;
    });
    const auto sum = [&](const auto& figure) {
      std::vector<std::uint64_t> values;
      for (const WireStatistics& used : of_ranks) values.push_back(figure(used));
      if (GetParam().transport == TransportKind::threads) support::gather_by_rank(values);
      return std::accumulate(values.begin(), values.end(), std::uint64_t{0});
    };
    return {.rows = sum([](const WireStatistics& used) { return used.dispatch.rows; }),
            .payload_bytes =
                sum([](const WireStatistics& used) { return used.dispatch.payload_bytes; }),
            .escalated_rows =
                sum([](const WireStatistics& used) { return used.dispatch.escalated_rows; }),
            .escalated_outputs =
                sum([](const WireStatistics& used) { return used.combine.escalated_rows; })};
  }

  static void check_counters(const Layer& made, const LayerRun& run, const WireStatistics& used,
                             std::uint64_t counted) {
    std::uint64_t of_rows = 0;
    for (const WireUse& use :
         {used.dispatch, used.combine, used.combine_backward, used.dispatch_backward}) {
      of_rows += use.payload_bytes;
    }
    support::require(of_rows <= counted, "rows took more bytes than the transport sent");
    if (run.backward != Backward::none) return;
    // Headers and extra bytes are the rest.
    const auto extra = static_cast<std::uint64_t>(made.group().extra_bytes);
    const std::uint64_t rest = counted - of_rows - used.dispatch.rows * extra;
    support::require(rest % 72 == 0, fmt::format("{} bytes are no headers", rest));
  }

  bool crosses() const { return GetParam().topology.topology().num_nodes() > 1; }
};

TEST_P(VaryingRows, RowsBeyondTheLimitEscalate) {
  for (const std::int64_t hidden : {1, 65, 200}) {
    SCOPED_TRACE(hidden);
    const Sent some =
        run_all(layer(limited(0.007F, hidden)), {.backward = Backward::weights, .uses = 2});
    if (crosses() && hidden > 1) {
      EXPECT_GT(some.escalated_rows, 0U);
      EXPECT_LT(some.escalated_rows, some.rows);
      EXPECT_GT(some.escalated_outputs, 0U);
    }
    const Sent none = run_all(layer(limited(0.9F, hidden)), {.backward = Backward::weights});
    EXPECT_EQ(none.escalated_rows, 0U);
    EXPECT_EQ(none.escalated_outputs, 0U);
  }
}

TEST_P(VaryingRows, WhatIsNotFiniteEscalatesAndIsKept) {
  for (const float value :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Layer special = layer(limited(0.9F, 129));
    for (int rank = 0; rank < num_ranks(); ++rank) special.special_rows.push_back({rank, 1, value});
    const Sent used = run_all(special, {});
    if (crosses()) {
      EXPECT_GT(used.escalated_rows, 0U);
    }
  }
}

TEST_P(VaryingRows, SparseRowsKeepTheirLargestValues) {
  for (const float ratio : {1.0F, 0.3F, 0.01F}) {
    for (const std::int64_t hidden : {ratio < 1 ? 1 : 65, ratio == 0.3F ? 700 : 129}) {
      SCOPED_TRACE(fmt::format("ratio {}, hidden {}", ratio, hidden));
      const Sent used =
          run_all(layer(sparse(ratio, hidden)), {.backward = Backward::weights, .uses = 2});
      const std::uint64_t rows = used.rows;
      EXPECT_LE(used.payload_bytes, rows * static_cast<std::uint64_t>(hidden) * 2);
      if (hidden == 700) {
        EXPECT_LE(used.payload_bytes, rows * (700 / 8 + 1 + (700 * 2) / 3));
      }
    }
  }
}

TEST_P(VaryingRows, ExtraBytesRideAlong) {
  for (Group group : {limited(0.007F, 129), sparse(0.2F, 129)}) {
    group.extra_bytes = 12;
    run_all(layer(group), {.uses = 2});
  }
}

TEST_P(VaryingRows, MayLeaveBeforeTheirPlan) {
  for (const Group& group : {limited(0.007F, 129), sparse(0.2F, 129)}) {
    const Layer shared = layer(group);
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      RankLayer memory(context, shared, 3);
      if (context.rank() == 1) co_await support::pause(300);
      const Dispatched dispatched =
          co_await exchange.start_plan_and_dispatch(memory.routing(), memory.x());
      co_await use_rows(context, exchange, dispatched.rows, memory, {});
    });
  }
}

std::vector<Point> points() {
  std::vector<Point> result;
  std::size_t at = 0;
  for (const Point& point : mode_points({"2x4", "8x1", "3+5"})) {
    if (point.mode.row_alignment != 1 || point.mode.extra_bytes != 0) continue;
    if (at++ % 7 == 0) result.push_back(point);
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(All, VaryingRows, ::testing::ValuesIn(points()), name_of);

}  // namespace
}  // namespace ferry::conformance
