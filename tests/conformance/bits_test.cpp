// Cases about numbers: with an f32 wire the bits depend on nothing but topology, placement, routing
// and rows; with any other wire they are the oracle's for the recorded strategy and format.

#include <fmt/format.h>

#include "conformance/scenario.hpp"
#include "support/wire_numbers.hpp"

namespace ferry::conformance {
namespace {

using support::WeightKind;

constexpr Strategy kStrategies[] = {Strategy::flat, Strategy::rank_dedup, Strategy::node_gather,
                                    Strategy::node_dedup};
constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

/// One shape of the group; the rest is drawn inside the tests.
class Bits : public ::testing::TestWithParam<NamedTopology> {
 protected:
  Topology topology() const { return GetParam().topology(); }
  Layer layer(const Group& base, DType dtype) const {
    Group group = base;
    group.topology = topology();
    group.placement = Placement::contiguous(kNumExperts, topology().num_ranks());
    group.hidden = 37;
    group.dtype = dtype;
    const std::vector<std::int64_t> tokens(static_cast<std::size_t>(topology().num_ranks()), 11);
    const RoutingSpec spec{.num_experts = kNumExperts, .num_topk = 6, .none_share = 0.1,
                           .repeat_share = 0.2};
    return {group, make_all_routing(spec, tokens, 5)};
  }
  static constexpr int kNumExperts = 21;
};

struct Variant {
  TransportKind transport = TransportKind::threads;
  std::int64_t fragment_bytes = 0;
  std::int64_t range_tokens = 0;
};

/// Runs a layer three times on one plan; gives the hash of out on each rank.
std::vector<std::uint64_t> run_variant(const Layer& layer, const Variant& variant) {
  ProgramOptions options;
  options.transport = variant.transport;
  options.topology = layer.group().topology;
  std::vector<std::uint64_t> hashes(static_cast<std::size_t>(options.topology.num_ranks()));
  const ProgramResult result = support::run_program(options, [&](RankContext& context) -> Task {
    ExchangeOptions how = options_of(layer.group());
    how.fragment_bytes = variant.fragment_bytes;
    how.range_tokens = variant.range_tokens;
    Exchange exchange(context.transport(), layer.group().placement,
                      {layer.group().hidden, layer.group().dtype}, how);
    co_await run_layer(context, exchange, layer,
                       {.backward = Backward::weights, .uses = 3,
                        .new_seed_per_use = false,
                        .out_hash = &hashes[static_cast<std::size_t>(context.rank())]});
  });
  EXPECT_TRUE(result.ok()) << result.describe();
  if (variant.transport == TransportKind::threads) support::gather_by_rank(hashes);
  return hashes;
}

TEST_P(Bits, WithF32WiresNothingElseMatters) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    std::vector<std::vector<std::uint64_t>> seen;
    for (const Strategy strategy : kStrategies) {
      const Layer shared = layer({.strategy = strategy}, dtype);
      for (const TransportKind transport : {TransportKind::threads, TransportKind::stepped}) {
        for (const Variant& variant : {Variant{transport, 0, 0}, Variant{transport, 300, 1},
                                       Variant{transport, 700, 7}}) {
          SCOPED_TRACE(fmt::format("{} {} {} fragment_bytes {} range_tokens {}",
                                   to_string(strategy), to_string(dtype),
                                   support::to_string(transport), variant.fragment_bytes,
                                   variant.range_tokens));
          seen.push_back(run_variant(shared, variant));
          EXPECT_EQ(seen.back(), seen.front());
        }
      }
    }
  }
}

TEST_P(Bits, EveryPairOfWiresIsTheOracles) {
  for (const Strategy strategy : kStrategies) {
    for (const DType dtype : kDTypes) {
      for (const WireFormat wire_dispatch : support::kWireFormats) {
        for (const WireFormat wire_combine : support::kWireFormats) {
          // Quantised rows of other dtypes: wire_formats_test.cpp.
          const bool quantised = is_quantised(wire_dispatch) || is_quantised(wire_combine);
          if (quantised && dtype != DType::bf16) continue;
          SCOPED_TRACE(fmt::format("{} {}, wire {} out, {} back", to_string(strategy),
                                   to_string(dtype), to_string(wire_dispatch),
                                   to_string(wire_combine)));
          run_variant(layer({.strategy = strategy, .wire_dispatch = wire_dispatch,
                             .wire_combine = wire_combine},
                            dtype),
                      {.transport = TransportKind::stepped, .fragment_bytes = 300,
                       .range_tokens = 5});
        }
      }
    }
  }
}

TEST_P(Bits, UnsetWiresAreTheDtype) {
  for (const DType dtype : kDTypes) {
    const Layer shared = layer(
        {.wire_dispatch = wire_format_of(dtype), .wire_combine = wire_format_of(dtype)}, dtype);
    ProgramOptions options;
    options.topology = topology();
    const ProgramResult result = support::run_program(options, [&](RankContext& context) -> Task {
      Exchange exchange(context.transport(), shared.group().placement,
                        {shared.group().hidden, dtype}, {});
      support::require(exchange.options().wire_dispatch == wire_format_of(dtype) &&
                           exchange.options().wire_combine == wire_format_of(dtype),
                       "options() does not show the wires that are used");
      support::require(
          exchange.options().fragment_bytes > 0 && exchange.options().range_tokens > 0,
          "options() does not show the sizes that are used");
      co_await run_layer(context, exchange, shared, {});
    });
    EXPECT_TRUE(result.ok()) << result.describe();
  }
}

std::string shape_name(const ::testing::TestParamInfo<NamedTopology>& info) {
  std::string name = info.param.name;
  for (char& c : name) c = c == '+' ? 'p' : c;
  return name;
}

INSTANTIATE_TEST_SUITE_P(Shapes, Bits, ::testing::ValuesIn(all_topologies()), shape_name);

}  // namespace
}  // namespace ferry::conformance
