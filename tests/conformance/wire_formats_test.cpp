// Cases about quantised rows between nodes: rows, sums and gradients are those of the oracle bit
// for bit, whatever the strategy, layout, weights, row length and block; what is not finite stays
// with its token; gradients are quantised only where that was asked for; bytes are as planned.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>

#include <fmt/format.h>

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

constexpr WireFormat kFp8 = WireFormat::fp8_e4m3fn;
constexpr WireFormat kInt8 = WireFormat::int8;

/// The formats of one layer; gradients unset: never quantised.
struct Wires {
  WireFormat dispatch;
  WireFormat combine;
  std::optional<WireFormat> combine_backward{};
  std::optional<WireFormat> dispatch_backward{};
  std::int64_t block_columns = 128;
};

const Wires kWires[] = {
    {kFp8, kInt8},
    {kInt8, kFp8, kInt8, kFp8, 64},
    {WireFormat::bf16, kInt8, kFp8, kInt8, 2048},
    {kFp8, kFp8, WireFormat::f16, WireFormat::f32},
    {kInt8, WireFormat::f32, std::nullopt, kInt8, 64},
};

class WireFormats : public Conformance {
 protected:
  Layer layer(const Wires& wires, std::int64_t hidden) const {
    Group made = group(kExperts, hidden);
    made.wire_dispatch = wires.dispatch;
    made.wire_combine = wires.combine;
    made.wire_combine_backward = wires.combine_backward;
    made.wire_dispatch_backward = wires.dispatch_backward;
    made.wire_block_columns = wires.block_columns;
    const RoutingSpec spec{
        .num_experts = kExperts, .num_topk = 5, .none_share = 0.1, .repeat_share = 0.2};
    return {made, make_all_routing(spec, ragged(5), 11)};
  }
  static constexpr int kExperts = 13;
};

TEST_P(WireFormats, EverythingIsTheOracles) {
  for (std::size_t i = 0; i < std::size(kWires); ++i) {
    const Wires& wires = kWires[i];
    for (const std::int64_t hidden : {i % 2 == 0 ? 1 : 128, i % 3 == 0 ? 7 : 129}) {
      SCOPED_TRACE(fmt::format("{} out, {} back, hidden {}, blocks of {}",
                               to_string(wires.dispatch), to_string(wires.combine), hidden,
                               wires.block_columns));
      run(layer(wires, hidden), {.backward = Backward::weights, .uses = 2});
    }
  }
}

TEST_P(WireFormats, SoAreLongRows) {
  const Wires& wires = kWires[static_cast<std::size_t>(GetParam().dtype) % 2];
  run(layer(wires, 2880), {.backward = Backward::weights});
}

TEST_P(WireFormats, WhatIsNotFiniteStaysWithItsToken) {
  for (const float value :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Layer special = layer(kWires[0], 129);
    for (int rank = 0; rank < num_ranks(); ++rank) special.special_rows.push_back({rank, 1, value});
    run(special);
  }
}

// 65504 becomes 65536 in bf16, which f16 does not have.
TEST_P(WireFormats, TheLargestF16StaysFinite) {
  for (const WireFormat wire : {WireFormat::bf16, WireFormat::sparse_bf16}) {
    Layer large = layer({wire, WireFormat::f32, WireFormat::bf16, WireFormat::f32}, 129);
    for (int rank = 0; rank < num_ranks(); ++rank) {
      large.special_rows.push_back({rank, 1, 65504.0F});
    }
    run(large);
  }
}

TEST_P(WireFormats, ExtraBytesAndAlignmentRideAlong) {
  for (const Wires& wires : {kWires[0], kWires[1]}) {
    const Layer plain = layer(wires, 129);
    Group group = plain.group();
    group.extra_bytes = 12;
    if (group.layout == Layout::expert_major) group.row_alignment = 4;
    run({group, plain.all_routing()}, {.backward = Backward::weights, .uses = 2});
  }
}

TEST_P(WireFormats, RowsMayLeaveBeforeTheirPlan) {
  const Layer shared = layer(kWires[1], 129);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    RankLayer memory(context, shared, 3);
    // One rank comes so late that rows of others wait for it.
    if (context.rank() == 1) co_await support::pause(300);
    const Dispatched dispatched =
        co_await exchange.start_plan_and_dispatch(memory.routing(), memory.x());
    co_await use_rows(context, exchange, dispatched.rows, memory, {.backward = Backward::weights});
    if (shared.group().strategy != Strategy::node_gather) co_return;
    memory.use_seed(4);
    Pending<ExpertRows> gathering = exchange.start_gather(memory.x());
    if (context.rank() == 1) co_await support::pause(300);
    const Plan plan = co_await exchange.start_plan(memory.routing(), gathering);
    const ExpertRows rows = co_await gathering;
    co_await use_rows(context, exchange, rows, memory, {.backward = Backward::weights});
  });
}

/// How many elements of the gradients that reach a rank are infinite or NaN, and of how many, where
/// they come from its own node, or from another.
struct Overflow {
  std::int64_t lost = 0;
  std::int64_t elements = 0;
};

Overflow overflow_of(const support::BackwardReference& reference, int rank, bool from_own_node) {
  const Group& group = reference.forward().group();
  std::vector<float> values(static_cast<std::size_t>(group.hidden));
  Overflow overflow;
  for (const support::RowOrigin& origin : reference.forward().rows_of(rank)) {
    if (origin.is_alignment()) continue;
    if (group.topology.same_node(rank, origin.source) != from_own_node) continue;
    reference.grad_y(rank, origin, values);
    overflow.elements += group.hidden;
    overflow.lost += std::ranges::count_if(values, [](float v) { return !std::isfinite(v); });
  }
  return overflow;
}

// Rows forward saturate, so that no token is lost by crossing; gradients must not, or no loss
// scaler would see that they are lost. Inside a node they are FP32 sums or numbers of the dtype.
TEST_P(WireFormats, F16SaturatesForwardAndOverflowsBackward) {
  constexpr WireFormat kF16 = WireFormat::f16;
  Layer large = layer({kF16, kF16, kF16, kF16}, 129);
  const DType dtype = large.group().dtype;
  // Rows themselves can be too large for f16 in the other dtypes, in f16 only their sums can.
  const float row = dtype == DType::f16 ? 40000.F : 1e5F;
  for (int rank = 0; rank < num_ranks(); ++rank) large.special_rows.push_back({rank, 1, row});
  large.gradient_factor = dtype == DType::f16 ? 0x1p11F : 0x1p13F;
  run(large, {.backward = Backward::weights});
  if (dtype == DType::f16) return;
  const support::BackwardReference reference(large.reference(1), 2, large.gradient_factor);
  for (int rank = 0; rank < num_ranks(); ++rank) {
    EXPECT_EQ(overflow_of(reference, rank, true).lost, 0) << "rank " << rank;
    const Overflow remote = overflow_of(reference, rank, false);
    if (remote.elements > 0) {
      EXPECT_GT(remote.lost, 0) << "rank " << rank;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, WireFormats,
                         ::testing::ValuesIn(paired_points({"2x4", "8x1", "3+5"})), name_of);

class WireBytes : public WireFormats {};

// What the transports have sent, headers and metadata included.
TEST_P(WireBytes, RowsOf2048TakeAtMost53PercentOfBf16) {
  const auto bytes_of = [&](WireFormat format) {
    const Layer made = layer({format, format}, 2048);
    std::vector<std::uint64_t> sent(static_cast<std::size_t>(num_ranks()));
    run([&](RankContext& context) -> Task {
      ExchangeOptions options = options_of(made.group());
      options.fragment_bytes = 0;
      options.range_tokens = 0;
      Exchange exchange(context.transport(), made.group().placement,
                        {made.group().hidden, made.group().dtype}, options);
      co_await run_layer(context, exchange, made, {});
      const TrafficCounters counters = context.transport().counters();
      sent[static_cast<std::size_t>(context.rank())] =
          counters.payload_bytes + counters.metadata_bytes;
    });
    if (GetParam().transport == TransportKind::threads) support::gather_by_rank(sent);
    return static_cast<double>(std::accumulate(sent.begin(), sent.end(), std::uint64_t{0}));
  };
  const double bf16 = bytes_of(WireFormat::bf16);
  EXPECT_GT(bf16, 0);
  for (const WireFormat format : {kFp8, kInt8}) {
    EXPECT_LE(bytes_of(format), 0.53 * bf16) << to_string(format);
  }
}

INSTANTIATE_TEST_SUITE_P(All, WireBytes, ::testing::ValuesIn(few_points({"2x4", "3+5"})), name_of);

/// The bound of docs/wire-formats.md for a value of a block with this largest magnitude.
double bound_of(WireFormat format, double largest, double value) {
  const double size = std::fabs(value);
  const double half_step =
      format == kInt8 ? largest / 127 / 2 : std::max(size * 0x1p-4, largest / 448 * 0x1p-10);
  return half_step * (1 + 0x1p-14) + size * 0x1p-22;
}

/// How far one column of `out` may be from what f32 wires give, by docs/wire-formats.md.
class OutBound {
 public:
  OutBound(const Reference& exact, const Reference& quantised)
      : exact_(exact), quantised_(quantised) {}

  std::vector<double> of(int home, std::int64_t token) const {
    const Group& group = quantised_.group();
    const auto hidden = static_cast<std::size_t>(group.hidden);
    const auto block = static_cast<std::size_t>(group.wire_block_columns);
    std::vector<double> bounds(hidden);
    std::vector<float> y(hidden);
    std::vector<float> exact(hidden);
    for (const support::Term& term : quantised_.terms(home, token)) {
      const int rank = group.placement.rank_of(term.expert);
      if (group.topology.same_node(home, rank)) continue;
      quantised_.output(rank, {term.expert, home, token}, y);
      exact_.output(rank, {term.expert, home, token}, exact);
      for (std::size_t c = 0; c < hidden; ++c) {
        const std::size_t begin = c / block * block;
        double largest = 0;
        for (std::size_t i = begin; i < std::min(begin + block, hidden); ++i) {
          largest = std::max(largest, std::fabs(double{y[i]}));
        }
        bounds[c] += std::fabs(double{term.weight}) * (std::fabs(double{y[c]} - double{exact[c]}) +
                                                       bound_of(group.wire_combine, largest, y[c]));
      }
    }
    return bounds;
  }

 private:
  const Reference& exact_;
  const Reference& quantised_;
};

TEST(WireErrors, OfOutStayWithinTheBound) {
  Group group{.topology = Topology::from_sizes({1, 2}),
              .placement = Placement::contiguous(9, 3),
              .hidden = 150,
              .wire_block_columns = 64};
  const RoutingSpec spec{.num_experts = 9, .num_topk = 4};
  const std::vector<std::int64_t> tokens(3, 6);
  const std::vector<RoutingData> routing = make_all_routing(spec, tokens, 4);
  const Layer plain(group, routing);
  const Reference exact = plain.reference(8);
  for (const Strategy strategy :
       {Strategy::flat, Strategy::rank_dedup, Strategy::node_gather, Strategy::node_dedup}) {
    for (const auto& [out, back] : {std::pair(kFp8, kInt8), std::pair(kInt8, kFp8)}) {
      group.strategy = strategy;
      group.wire_dispatch = out;
      group.wire_combine = back;
      const Layer layer(group, routing);
      const Reference quantised = layer.reference(8);
      double worst = 0;
      for (int home = 0; home < 3; ++home) {
        for (std::int64_t token = 0; token < 6; ++token) {
          std::vector<float> wanted(150);
          std::vector<float> got(150);
          exact.out(home, token, wanted);
          quantised.out(home, token, got);
          const std::vector<double> bounds = OutBound(exact, quantised).of(home, token);
          for (std::size_t c = 0; c < 150; ++c) {
            const double error = std::fabs(double{got[c]} - double{wanted[c]});
            // Sums are rounded to FP32; what they add up to is at most 254 times the bound.
            const double rounding = 0x1p-13 * bounds[c] + 0x1p-20 * std::fabs(double{wanted[c]});
            ASSERT_LE(error, bounds[c] + rounding)
                << to_string(strategy) << " " << to_string(back) << " back, column " << c;
            if (bounds[c] > 0) worst = std::max(worst, error / bounds[c]);
          }
        }
      }
      EXPECT_GT(worst, 0.5) << to_string(strategy) << ": the bound is far too wide";
    }
  }
}

TEST(WireDefaults, GradientsAreQuantisedOnlyWhenAsked) {
  constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
  for (const DType dtype : kDTypes) {
    const ProgramResult result = support::run_program({}, [&](RankContext& context) -> Task {
      const auto shown = [&](const ExchangeOptions& options) {
        return Exchange(context.transport(), Placement::contiguous(1, 1), {8, dtype}, options)
            .options();
      };
      const ExchangeOptions unset = shown({.wire_dispatch = kFp8, .wire_combine = kInt8});
      support::require(unset.wire_combine_backward == wire_format_of(dtype) &&
                           unset.wire_dispatch_backward == wire_format_of(dtype),
                       "gradients follow a quantised format that nobody asked for");
      const ExchangeOptions asked = shown(
          {.wire_dispatch = kFp8, .wire_combine = WireFormat::f32, .wire_combine_backward = kInt8});
      support::require(
          asked.wire_combine_backward == kInt8 && asked.wire_dispatch_backward == WireFormat::f32,
          "gradients do not have the format that was asked for");
      co_return;
    });
    EXPECT_TRUE(result.ok()) << result.describe();
  }
}

}  // namespace
}  // namespace ferry::conformance
