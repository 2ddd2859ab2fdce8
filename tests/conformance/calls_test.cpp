// Cases about the order of calls: plans in flight, replays, overlap, a rank that is slow by whole
// calls, where the experts' outputs lie, and blocking calls.

#include <fmt/format.h>

#include "conformance/scenario.hpp"
#include "ferry/threads.hpp"
#include "support/verify.hpp"

namespace ferry::conformance {
namespace {

using support::require;

class Calls : public Conformance {
 protected:
  Layer layer(std::uint64_t seed) const {
    const RoutingSpec spec{.num_experts = 2 * num_ranks() + 1, .num_topk = 3,
                           .none_share = 0.1};
    return {group(spec.num_experts), make_all_routing(spec, ragged(9), seed)};
  }
  std::vector<Layer> layers(int count) const {
    std::vector<Layer> result;
    for (int i = 0; i < count; ++i) result.push_back(layer(100 + static_cast<std::uint64_t>(i)));
    return result;
  }
};

/// What one batch holds on one rank while it is in flight.
struct Batch {
  explicit Batch(const RankContext& context, const Layer& layer, std::uint64_t seed)
      : memory(context, layer, seed) {}
  void run_experts(Exchange& exchange) {
    y.emplace(exchange.output(*plan));
    support::run_experts(*plan, rows->matrix(), y->matrix());
  }

  RankLayer memory;
  std::optional<Plan> plan;
  std::optional<ExpertRows> rows;
  std::optional<OutputRows> y;
  std::optional<Pending<ExpertRows>> dispatching;
  std::optional<Pending<void>> combining;
};

TEST_P(Calls, OutputsMayLieAnywhere) {
  for (const OutputPlace place :
       {OutputPlace::window, OutputPlace::dispatched_rows, OutputPlace::plain}) {
    SCOPED_TRACE(fmt::format("place {}", static_cast<int>(place)));
    run(layer(1), {.y = place, .uses = 3});
  }
}

TEST_P(Calls, ReplayGivesTheSameBits) {
  const Layer shared = layer(2);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    std::uint64_t first = 0;
    std::uint64_t last = 1;
    co_await run_layer(context, exchange, shared, {.new_seed_per_use = false, .out_hash = &first});
    co_await run_layer(context, exchange, shared,
                       {.uses = 6, .new_seed_per_use = false, .out_hash = &last});
    require(first == last, "a replay gave other bits than the first call");
  });
}

TEST_P(Calls, PlansInFlightEndInAnyOrder) {
  // plan a, b, c; dispatch c, a, b; combine b, c, a: all started before the first is waited for,
  // and each rank waits in an order of its own.
  const std::vector<Layer> shared = layers(3);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared[0].group());
    std::vector<Batch> batches;
    for (const Layer& one : shared) batches.emplace_back(context, one, 7);
    std::vector<Pending<Plan>> planning;
    for (Batch& batch : batches) {
      planning.push_back(exchange.start_plan(batch.memory.routing()));
    }
    const std::size_t first = static_cast<std::size_t>(context.rank()) % 3;
    for (std::size_t i = 0; i < 3; ++i) {
      const std::size_t at = (first + i) % 3;
      batches[at].plan.emplace(co_await planning[at]);
      batches[at].memory.check_plan(*batches[at].plan);
    }
    for (const std::size_t at : {2U, 0U, 1U}) {
      Batch& batch = batches[at];
      batch.dispatching.emplace(exchange.start_dispatch(*batch.plan, batch.memory.x()));
    }
    for (std::size_t i = 0; i < 3; ++i) {
      Batch& batch = batches[(first + 2 * i) % 3];
      batch.rows.emplace(co_await *batch.dispatching);
      batch.memory.check_rows(*batch.rows);
      batch.run_experts(exchange);
    }
    for (const std::size_t at : {1U, 2U, 0U}) {
      Batch& batch = batches[at];
      batch.combining.emplace(
          exchange.start_combine(*batch.plan, batch.y->matrix(), batch.memory.out()));
    }
    for (std::size_t i = 0; i < 3; ++i) {
      Batch& batch = batches[(first + i) % 3];
      co_await *batch.combining;
      batch.memory.check_out();
    }
  });
}

TEST_P(Calls, CombineOverlapsTheNextDispatch) {
  const std::vector<Layer> shared = layers(4);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared[0].group());
    std::optional<Batch> before;
    for (const Layer& one : shared) {
      Batch batch(context, one, 9);
      batch.plan.emplace(co_await exchange.start_plan(batch.memory.routing()));
      if (before) {
        before->combining.emplace(
            exchange.start_combine(*before->plan, before->y->matrix(), before->memory.out()));
      }
      batch.rows.emplace(co_await exchange.start_dispatch(*batch.plan, batch.memory.x()));
      batch.memory.check_rows(*batch.rows);
      batch.run_experts(exchange);
      if (before) {
        co_await *before->combining;
        before->memory.check_out();
      }
      before.reset();
      before.emplace(std::move(batch));
    }
    co_await exchange.start_combine(*before->plan, before->y->matrix(), before->memory.out());
    before->memory.check_out();
  });
}

TEST_P(Calls, SamePlanTwiceAtOnce) {
  // Two dispatches of one plan with other rows are in flight together: neither disturbs the other.
  const Layer shared = layer(3);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    Batch a(context, shared, 31);
    Batch b(context, shared, 32);
    a.plan.emplace(co_await exchange.start_plan(a.memory.routing()));
    b.plan = a.plan;
    a.dispatching.emplace(exchange.start_dispatch(*a.plan, a.memory.x()));
    b.dispatching.emplace(exchange.start_dispatch(*b.plan, b.memory.x()));
    b.rows.emplace(co_await *b.dispatching);
    a.rows.emplace(co_await *a.dispatching);
    a.memory.check_rows(*a.rows);
    b.memory.check_rows(*b.rows);
    a.run_experts(exchange);
    b.run_experts(exchange);
    a.combining.emplace(exchange.start_combine(*a.plan, a.y->matrix(), a.memory.out()));
    b.combining.emplace(exchange.start_combine(*b.plan, b.y->matrix(), b.memory.out()));
    co_await *a.combining;
    co_await *b.combining;
    a.memory.check_out();
    b.memory.check_out();
  });
}

TEST_P(Calls, RowsStayWhileTheyAreHeld) {
  // Handles of five steps are kept, as a backward pass would; later steps touch none of them.
  const std::vector<Layer> shared = layers(5);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared[0].group());
    std::vector<Batch> kept;
    for (const Layer& one : shared) {
      Batch& batch = kept.emplace_back(context, one, 41);
      batch.plan.emplace(co_await exchange.start_plan(batch.memory.routing()));
      batch.rows.emplace(co_await exchange.start_dispatch(*batch.plan, batch.memory.x()));
      poison_free_slots(context.transport(), 0xFF);
      batch.run_experts(exchange);
      co_await exchange.start_combine(*batch.plan, batch.y->matrix(), batch.memory.out());
      for (Batch& earlier : kept) earlier.memory.check_rows(*earlier.rows);
    }
    for (Batch& batch : kept) batch.memory.check_out();
  });
}

TEST_P(Calls, ASlowRankIsWaitedFor) {
  // A different rank sleeps before each call; the others come to be up to two calls ahead.
  const std::vector<Layer> shared = layers(6);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared[0].group());
    for (std::size_t i = 0; i < shared.size(); ++i) {
      const bool slow = context.rank() == static_cast<int>(i) % context.num_ranks();
      RankLayer memory(context, shared[i], 51 + i);
      if (slow) co_await support::pause(3000);
      const Plan plan = co_await exchange.start_plan(memory.routing());
      if (slow) co_await support::pause(3000);
      co_await use_plan(context, exchange, plan, memory, {.y = OutputPlace::dispatched_rows});
      co_await use_plan(context, exchange, plan, memory, {.y = OutputPlace::window});
    }
  });
}

TEST_P(Calls, TwoExchangesShareATransport) {
  const Layer narrow = layer(4);
  Group wide_group = narrow.group();
  wide_group.hidden = 70;
  wide_group.dtype = DType::f32;
  wide_group.wire_dispatch = wide_group.wire_combine = WireFormat::f32;
  const RoutingSpec spec{.num_experts = wide_group.placement.num_experts(), .num_topk = 2};
  const Layer wide(wide_group, make_all_routing(spec, ragged(6), 5));
  run([&](RankContext& context) -> Task {
    Exchange a = make_exchange(context, narrow.group());
    Exchange b = make_exchange(context, wide.group());
    Batch of_a(context, narrow, 61);
    Batch of_b(context, wide, 62);
    Pending<Plan> plan_a = a.start_plan(of_a.memory.routing());
    Pending<Plan> plan_b = b.start_plan(of_b.memory.routing());
    of_b.plan.emplace(co_await plan_b);
    of_a.plan.emplace(co_await plan_a);
    of_a.dispatching.emplace(a.start_dispatch(*of_a.plan, of_a.memory.x()));
    co_await use_plan(context, b, *of_b.plan, of_b.memory, {.y = OutputPlace::window});
    of_a.rows.emplace(co_await *of_a.dispatching);
    of_a.memory.check_rows(*of_a.rows);
    of_a.run_experts(a);
    co_await a.start_combine(*of_a.plan, of_a.y->matrix(), of_a.memory.out());
    of_a.memory.check_out();
  });
}

INSTANTIATE_TEST_SUITE_P(Matrix, Calls, ::testing::ValuesIn(all_points()), name_of);

class BlockingCalls : public Conformance {};

TEST_P(BlockingCalls, GiveTheSame) {
  const RoutingSpec spec{.num_experts = 2 * num_ranks() + 1, .num_topk = 3};
  const Layer layer(group(spec.num_experts), make_all_routing(spec, ragged(9), 71));
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, layer.group());
    RankLayer memory(context, layer, 73);
    barrier(context.transport());
    const Plan plan = exchange.plan(memory.routing());
    const ExpertRows rows = exchange.dispatch(plan, memory.x());
    memory.check_rows(rows);
    support::run_experts(plan, rows.matrix(), rows.matrix());
    exchange.combine(plan, rows.matrix(), memory.out());
    memory.check_out();
    // all_gather: sizes differ by rank, and may be 0.
    const std::vector<std::byte> mine(static_cast<std::size_t>(context.rank() * 5),
                                      static_cast<std::byte>(context.rank()));
    const auto all = all_gather(context.transport(), mine);
    require(all.size() == static_cast<std::size_t>(context.num_ranks()), "all_gather: size");
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      require(all[rank] == std::vector<std::byte>(rank * 5, static_cast<std::byte>(rank)),
              fmt::format("all_gather: bytes of rank {}", rank));
    }
    co_return;
  });
}

std::vector<Point> blocking_points() {
  std::vector<Point> points = few_points({"1x1", "1x8", "2x4", "8x1", "3+5"});
  std::erase_if(points, [](const Point& p) { return p.transport == TransportKind::stepped; });
  return points;
}
INSTANTIATE_TEST_SUITE_P(Matrix, BlockingCalls, ::testing::ValuesIn(blocking_points()), name_of);

}  // namespace
}  // namespace ferry::conformance
