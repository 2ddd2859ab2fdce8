// Cases about sizes: any hidden, any top-k, many experts, other shapes of the group, many tokens.

#include <fmt/format.h>

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

class Shapes : public Conformance {};

TEST_P(Shapes, AnyHidden) {
  for (const std::int64_t hidden : {1, 7, 1024, 2880, 3584, 6656, 7168}) {
    SCOPED_TRACE(fmt::format("hidden {}", hidden));
    const RoutingSpec spec{.num_experts = 2 * num_ranks() + 1, .num_topk = 3};
    run(Layer(group(spec.num_experts, hidden), make_all_routing(spec, ragged(4), 41)));
  }
}

TEST_P(Shapes, AnyTopk) {
  for (const int num_topk : {1, 2, 6, 8, 16, 22, 32, 64}) {
    SCOPED_TRACE(fmt::format("num_topk {}", num_topk));
    const RoutingSpec spec{.num_experts = 67, .num_topk = num_topk};
    run(Layer(group(spec.num_experts, 5), make_all_routing(spec, ragged(5), 43)));
  }
}

TEST_P(Shapes, ManyExperts) {
  for (const int num_experts : {256, 512, 2048}) {
    SCOPED_TRACE(fmt::format("num_experts {}", num_experts));
    const RoutingSpec spec{.num_experts = num_experts, .num_topk = 8};
    run(Layer(group(num_experts, 3), make_all_routing(spec, ragged(6), 47)));
  }
}

INSTANTIATE_TEST_SUITE_P(Matrix, Shapes, ::testing::ValuesIn(few_points({"1x8", "2x4", "3+5"})),
                         name_of);

/// Shapes of the group that are not in the matrix.
std::vector<Point> other_groups() {
  const std::vector<NamedTopology> shapes = {
      {"5", {5}},         {"1+5", {1, 5}},   {"3+4", {3, 4}}, {"2x3", {3, 3}},
      {"3x8", {8, 8, 8}}, {"16x1", std::vector<int>(16, 1)}, {"5+1+1", {5, 1, 1}}};
  std::vector<Point> points;
  for (Point point : few_points({"1x1"})) {
    for (const NamedTopology& shape : shapes) {
      point.topology = shape;
      points.push_back(point);
    }
  }
  return points;
}

class Groups : public Conformance {};

TEST_P(Groups, AnyShapeOfTheGroup) {
  const RoutingSpec spec{.num_experts = 2 * num_ranks() + 3, .num_topk = 4, .none_share = 0.1};
  run(Layer(group(spec.num_experts), make_all_routing(spec, ragged(6), 53)));
}

TEST_P(Groups, OneTokenOnTheFirstOfManyRanks) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(num_ranks()), 0);
  tokens.front() = 1;
  const RoutingSpec spec{.num_experts = num_ranks(), .num_topk = 1};
  run(Layer(group(spec.num_experts, 8), make_all_routing(spec, tokens, 59)));
}

TEST_P(Groups, RanksOfANodeNeedNotBeNeighbours) {
  std::vector<int> node_of_rank;
  std::vector<int> socket_of_rank;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    node_of_rank.push_back(rank % 2);
    socket_of_rank.push_back((rank / 2) % 2);
  }
  const RoutingSpec spec{.num_experts = 2 * num_ranks() + 3, .num_topk = 4};
  Group scattered = group(spec.num_experts);
  scattered.topology = Topology::from_map(node_of_rank, socket_of_rank);
  const Layer layer(scattered, make_all_routing(spec, ragged(6), 61));
  ProgramOptions options = program();
  options.topology = scattered.topology;
  const ProgramResult result =
      support::run_program(options, [&](RankContext& context) -> Task {
        Exchange exchange = make_exchange(context, layer.group());
        co_await run_layer(context, exchange, layer, {});
      });
  EXPECT_TRUE(result.ok()) << result.describe();
}

INSTANTIATE_TEST_SUITE_P(More, Groups, ::testing::ValuesIn(other_groups()), name_of);

class Many : public Conformance {};

TEST_P(Many, TokensOnOneRank) {
  std::vector<std::int64_t> tokens = ragged(3);
  tokens[1] = 65536;
  const RoutingSpec spec{.num_experts = 16, .num_topk = 2};
  const Layer layer(group(spec.num_experts, 2), make_all_routing(spec, tokens, 67));
  run([&](RankContext& context) -> Task {
    ExchangeOptions options = options_of(layer.group());
    options.fragment_bytes = 0;
    options.range_tokens = 0;
    Exchange exchange(context.transport(), layer.group().placement,
                      {layer.group().hidden, layer.group().dtype}, options);
    co_await run_layer(context, exchange, layer, {});
  });
}

std::vector<Point> threads_only() {
  std::vector<Point> points = few_points({"2x4"});
  std::erase_if(points, [](const Point& p) { return p.transport == TransportKind::stepped; });
  return points;
}
INSTANTIATE_TEST_SUITE_P(More, Many, ::testing::ValuesIn(threads_only()), name_of);

}  // namespace
}  // namespace ferry::conformance
