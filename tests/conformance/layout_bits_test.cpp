// Numbers of layouts and weight modes: with f32 wires the bits of one layout and weight mode depend
// on no strategy, transport, alignment or extra bytes; with any other wire they are the oracle's.

#include <fmt/format.h>

#include "conformance/scenario.hpp"
#include "support/wire_numbers.hpp"

namespace ferry::conformance {
namespace {

constexpr Strategy kStrategies[] = {Strategy::flat, Strategy::rank_dedup, Strategy::node_gather,
                                    Strategy::node_dedup};
constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

struct Shape {
  NamedTopology topology;
  Mode mode;
};

/// One shape of the group in one layout and weight mode.
class LayoutBits : public ::testing::TestWithParam<Shape> {
 protected:
  static std::vector<Strategy> strategies() {
    std::vector<Strategy> legal;
    for (const Strategy strategy : kStrategies) {
      for (const Mode& mode : modes_of(strategy)) {
        if (mode == GetParam().mode) legal.push_back(strategy);
      }
    }
    return legal;
  }
  static Layer layer(const Group& base) {
    constexpr int kNumExperts = 21;
    Group group = base;
    group.topology = GetParam().topology.topology();
    group.placement = Placement::contiguous(kNumExperts, group.topology.num_ranks());
    group.hidden = 23;
    const std::vector<std::int64_t> tokens(static_cast<std::size_t>(group.topology.num_ranks()), 7);
    const RoutingSpec spec{
        .num_experts = kNumExperts, .num_topk = 6, .none_share = 0.1, .repeat_share = 0.2};
    return {group, make_all_routing(spec, tokens, 5)};
  }
};

/// Runs a layer twice on one plan; gives the hash of out on each rank.
std::vector<std::uint64_t> hashes_of(const Layer& layer, TransportKind transport) {
  ProgramOptions options;
  options.transport = transport;
  options.topology = layer.group().topology;
  std::vector<std::uint64_t> hashes(static_cast<std::size_t>(options.topology.num_ranks()));
  const ProgramResult result = support::run_program(options, [&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, layer.group());
    co_await run_layer(context, exchange, layer,
                       {.uses = 2,
                        .new_seed_per_use = false,
                        .out_hash = &hashes[static_cast<std::size_t>(context.rank())]});
  });
  EXPECT_TRUE(result.ok()) << result.describe();
  if (transport == TransportKind::threads) support::gather_by_rank(hashes);
  return hashes;
}

TEST_P(LayoutBits, WithF32WiresNothingElseMatters) {
  const Mode plain = GetParam().mode;
  Mode rich = plain;
  rich.extra_bytes = 20;
  rich.row_sources = true;
  if (rich.layout == Layout::expert_major) rich.row_alignment = 5;
  for (const DType dtype : kDTypes) {
    std::vector<std::vector<std::uint64_t>> seen;
    for (const Strategy strategy : strategies()) {
      for (const TransportKind transport : {TransportKind::threads, TransportKind::stepped}) {
        const Mode& mode = transport == TransportKind::threads ? plain : rich;
        SCOPED_TRACE(fmt::format("{} {} {} {}", to_string(strategy), to_string(dtype),
                                 to_string(mode), support::to_string(transport)));
        seen.push_back(
            hashes_of(layer(with_mode({.dtype = dtype, .strategy = strategy}, mode)), transport));
        EXPECT_EQ(seen.back(), seen.front());
      }
    }
  }
}

TEST_P(LayoutBits, EveryPairOfWiresIsTheOracles) {
  for (const Strategy strategy : strategies()) {
    for (const DType dtype : kDTypes) {
      for (const WireFormat wire_dispatch : support::kWireFormats) {
        for (const WireFormat wire_combine : support::kWireFormats) {
          // Quantised rows of other dtypes: wire_formats_test.cpp.
          const bool quantised = is_quantised(wire_dispatch) || is_quantised(wire_combine);
          if (quantised && dtype != DType::bf16) continue;
          SCOPED_TRACE(fmt::format("{} {}, wire {} out, {} back", to_string(strategy),
                                   to_string(dtype), to_string(wire_dispatch),
                                   to_string(wire_combine)));
          const Group group{.dtype = dtype,
                            .strategy = strategy,
                            .wire_dispatch = wire_dispatch,
                            .wire_combine = wire_combine};
          Mode mode = GetParam().mode;
          mode.extra_bytes = 4;
          hashes_of(layer(with_mode(group, mode)), TransportKind::stepped);
        }
      }
    }
  }
}

std::vector<Shape> shapes() {
  std::vector<Shape> result;
  for (const char* const name : {"2x4", "8x1", "3+5"}) {
    for (const Mode& mode : modes_of(Strategy::node_dedup)) {
      result.push_back({topology_named(name), mode});
    }
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Shapes, LayoutBits, ::testing::ValuesIn(shapes()), [](const auto& shape) {
  std::string name = shape.param.topology.name + "_" + to_string(shape.param.mode);
  for (char& c : name) c = c == '+' ? 'p' : c;
  return name;
});

}  // namespace
}  // namespace ferry::conformance
