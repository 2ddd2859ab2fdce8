// Several plans and exchanges of different layouts and weight modes in flight: three plans of one
// exchange that end in every order, a hundred times over, and four exchanges at once.

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

using support::require;
using Order = std::array<std::size_t, 3>;

/// Every order of three things, by number; the number may be any.
Order order_of(std::size_t number) {
  Order order{0, 1, 2};
  for (std::size_t i = 0; i < number % 6; ++i) std::next_permutation(order.begin(), order.end());
  return order;
}

/// What one plan holds on one rank while its calls are in flight.
struct InFlight {
  InFlight(const RankContext& context, const Layer& layer, std::uint64_t seed)
      : memory(context, layer, seed) {}

  void start_dispatch(Exchange& exchange, std::uint64_t seed) {
    memory.use_seed(seed);
    dispatching.emplace(exchange.start_dispatch(*plan, memory.x(), memory.extra()));
  }
  /// The experts work in the window, in new memory of it, or in memory of their own, by turns.
  void start_combine(Exchange& exchange, std::uint64_t turn) {
    memory.check_rows(*rows);
    Matrix y = rows->matrix();
    if (turn % 3 == 1) y = output.emplace(exchange.output(*plan)).matrix();
    if (turn % 3 == 2) y = plain.emplace(plan->num_rows(), y.columns, y.dtype).matrix();
    memory.run_experts(*plan, rows->matrix(), y);
    combining.emplace(exchange.start_combine(*plan, y, memory.out()));
  }
  void end() {
    memory.check_out();
    output.reset();
    rows.reset();
  }

  RankLayer memory;
  std::optional<Plan> plan;
  std::optional<ExpertRows> rows;
  std::optional<OutputRows> output;
  std::optional<GuardedMatrix> plain;
  std::optional<Pending<ExpertRows>> dispatching;
  std::optional<Pending<void>> combining;
};

/// Points with one mode per strategy, so that all layouts and weight modes come up.
std::vector<Point> replay_points() {
  std::vector<Point> points;
  for (Point point : few_points({"2x4"})) {
    point.topology = {"1+3", {1, 3}};
    switch (point.strategy) {
      case Strategy::flat: point.mode = {Layout::expert_major, WeightMode::at_expert, 4, 8}; break;
      case Strategy::rank_dedup:
        point.mode = {Layout::token_major, WeightMode::at_expert, 1, 12};
        break;
      case Strategy::node_gather:
        point.mode = {Layout::expert_major, WeightMode::none, 16, 0, true};
        break;
      case Strategy::node_dedup: point.mode = {Layout::token_major, WeightMode::none, 1, 4}; break;
    }
    points.push_back(point);
    if (point.strategy == Strategy::node_dedup) {
      point.mode = {Layout::expert_major, WeightMode::at_combine, 3, 0, true};
      points.push_back(point);
    }
  }
  return points;
}

class Replays : public Conformance {};

TEST_P(Replays, ThreePlansEndInEveryOrderHundredTimes) {
  constexpr std::size_t kReplays = 100;
  std::vector<Layer> layers;
  for (const std::int64_t base : {2, 5, 3}) {
    const RoutingSpec spec{
        .num_experts = 2 * num_ranks() + 1, .num_topk = 3, .none_share = 0.1, .repeat_share = 0.2};
    layers.emplace_back(group(spec.num_experts, 6),
                        make_all_routing(spec, ragged(base), static_cast<std::uint64_t>(base)));
  }
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, layers.front().group());
    std::vector<InFlight> plans;
    std::vector<Pending<Plan>> planning;
    for (const Layer& layer : layers) plans.emplace_back(context, layer, 1);
    for (InFlight& one : plans) planning.push_back(exchange.start_plan(one.memory.routing()));
    const auto rank = static_cast<std::size_t>(context.rank());
    for (const std::size_t i : order_of(rank + 3)) {
      plans[i].plan.emplace(co_await planning[i]);
      plans[i].memory.check_plan(*plans[i].plan);
    }
    // Calls start in one order on all ranks and are waited for in another, which differs by rank in
    // every second replay. 36 replays meet every pair of orders of dispatch and combine.
    for (std::size_t replay = 0; replay < kReplays; ++replay) {
      context.at(fmt::format("replay {}", replay));
      poison_free_slots(context.transport(), 0xFF);
      const std::size_t shift = replay % 2 == 0 ? 0 : rank;
      for (const std::size_t i : order_of(replay / 3)) {
        plans[i].start_dispatch(exchange, 100 * replay + i);
      }
      for (const std::size_t i : order_of(replay + shift)) {
        plans[i].rows.emplace(co_await *plans[i].dispatching);
      }
      for (const std::size_t i : order_of(replay / 5)) plans[i].start_combine(exchange, replay + i);
      for (const std::size_t i : order_of(replay / 6 + shift)) {
        co_await *plans[i].combining;
        plans[i].end();
      }
    }
    require(exchange.metadata_rounds() == 3, "a replay made a metadata round");
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, Replays, ::testing::ValuesIn(replay_points()), name_of);

/// One exchange of the group of exchanges, on one rank.
struct Member {
  Member(RankContext& context, const Layer& layer, std::uint64_t seed)
      : exchange(make_exchange(context, layer.group())), one(context, layer, seed) {}
  Exchange exchange;
  InFlight one;
};

class ManyExchanges : public Conformance {
 protected:
  /// Exchanges that differ in everything that an exchange can differ in.
  std::vector<Layer> layers() const {
    struct Kind {
      Strategy strategy;
      DType dtype;
      std::int64_t hidden;
      Mode mode;
    };
    const Kind kinds[] = {
        {Strategy::flat, DType::f32, 9, {Layout::expert_major, WeightMode::at_combine}},
        {Strategy::rank_dedup, DType::bf16, 33, {Layout::token_major, WeightMode::none, 1, 12}},
        {Strategy::node_gather, DType::f16, 5, {Layout::expert_major, WeightMode::none, 16, 4}},
        {Strategy::node_dedup, DType::bf16, 70, {Layout::token_major, WeightMode::at_expert}},
        {Strategy::node_dedup, DType::f32, 1, {Layout::expert_major, WeightMode::at_expert, 7, 20}},
    };
    std::vector<Layer> result;
    for (const Kind& kind : kinds) {
      const auto number = static_cast<int>(result.size());
      const RoutingSpec spec{.num_experts = num_ranks() + 3 * number,
                             .num_topk = 1 + number,
                             .none_share = 0.1,
                             .repeat_share = 0.2};
      const Group base{.topology = GetParam().topology.topology(),
                       .placement = Placement::contiguous(spec.num_experts, num_ranks()),
                       .hidden = kind.hidden,
                       .dtype = kind.dtype,
                       .strategy = kind.strategy,
                       .wire_dispatch = wire_format_of(kind.dtype),
                       .wire_combine = wire_format_of(kind.dtype)};
      result.emplace_back(with_mode(base, kind.mode),
                          make_all_routing(spec, ragged(4 + number), 31));
    }
    return result;
  }
};

TEST_P(ManyExchanges, OfEveryModeShareATransport) {
  const std::vector<Layer> shared = layers();
  run([&](RankContext& context) -> Task {
    std::vector<Member> members;
    for (const Layer& layer : shared) members.emplace_back(context, layer, 1);
    std::vector<Pending<Plan>> planning;
    for (Member& member : members) {
      planning.push_back(member.exchange.start_plan(member.one.memory.routing()));
    }
    const std::size_t count = members.size();
    const auto first = static_cast<std::size_t>(context.rank());
    const auto at = [&](std::size_t i) { return (first + 2 * i) % count; };
    for (std::size_t i = 0; i < count; ++i) {
      members[at(i)].one.plan.emplace(co_await planning[at(i)]);
      members[at(i)].one.memory.check_plan(*members[at(i)].one.plan);
    }
    for (std::uint64_t use = 0; use < 4; ++use) {
      context.at(fmt::format("use {}", use));
      poison_free_slots(context.transport(), 0xFF);
      for (Member& member : members) member.one.start_dispatch(member.exchange, 40 + use);
      // The combine of one exchange starts while dispatches of others still run.
      for (std::size_t i = 0; i < count; ++i) {
        Member& member = members[at(i)];
        member.one.rows.emplace(co_await *member.one.dispatching);
        member.one.start_combine(member.exchange, use + at(i));
      }
      for (std::size_t i = count; i-- > 0;) {
        co_await *members[at(i)].one.combining;
        members[at(i)].one.end();
      }
    }
  });
}

std::vector<Point> exchange_points() {
  std::vector<Point> points = few_points({"1x8", "2x4", "8x1", "3+5"});
  std::erase_if(points, [](const Point& p) { return p.strategy != Strategy::node_dedup; });
  return points;
}
INSTANTIATE_TEST_SUITE_P(Shapes, ManyExchanges, ::testing::ValuesIn(exchange_points()), name_of);

}  // namespace
}  // namespace ferry::conformance
