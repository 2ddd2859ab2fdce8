// Cases about rows that leave before their plan is made: start_gather, which does not know the
// routing yet, and plan_and_dispatch.

#include <fmt/format.h>

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

using support::failure_of;
using support::Failure;
using support::require;

class Early : public Conformance {
 protected:
  Layer layer(std::uint64_t seed) const {
    const RoutingSpec spec{.num_experts = 2 * num_ranks() + 1, .num_topk = 3, .none_share = 0.2,
                           .repeat_share = 0.1};
    std::vector<std::int64_t> tokens = ragged(12);
    tokens.back() = 0;
    return {group(spec.num_experts), make_all_routing(spec, tokens, seed)};
  }
};

Task finish_layer(RankContext& context, Exchange& exchange, RankLayer& memory, const Plan& plan,
                  const ExpertRows& rows) {
  memory.check_plan(plan);
  co_await use_rows(context, exchange, rows, memory, {});
}

class GatherFirst : public Early {};

TEST_P(GatherFirst, RowsAreThereWhenThePlanIs) {
  const Layer shared = layer(1);
  for (const std::uint64_t gate_steps : {0U, 40U, 400U}) {
    SCOPED_TRACE(fmt::format("gate takes {} steps", gate_steps));
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      for (int step = 0; step < 3; ++step) {
        RankLayer memory(context, shared, 11 + static_cast<std::uint64_t>(step));
        Pending<ExpertRows> gathering = exchange.start_gather(memory.x());
        co_await support::pause(context.rank() % 2 == 0 ? gate_steps : 0);
        const Plan plan = co_await exchange.start_plan(memory.routing(), gathering);
        const ExpertRows rows = co_await gathering;
        co_await finish_layer(context, exchange, memory, plan, rows);
        // The plan is one like any other: later uses dispatch on it.
        memory.use_seed(21);
        co_await use_plan(context, exchange, plan, memory, {.y = OutputPlace::window});
      }
    });
    if (HasFailure()) return;
  }
}

TEST_P(GatherFirst, StagingStaysInItsBudget) {
  const Layer shared = layer(2);
  run([&](RankContext& context) -> Task {
    set_limits(context.transport(), {.gather_staging_bytes = 1});
    Exchange exchange = make_exchange(context, shared.group());
    RankLayer memory(context, shared, 11);
    Pending<ExpertRows> gathering = exchange.start_gather(memory.x());
    co_await support::pause(300);
    const Plan plan = co_await exchange.start_plan(memory.routing(), gathering);
    const ExpertRows rows = co_await gathering;
    co_await finish_layer(context, exchange, memory, plan, rows);
  });
}

TEST_P(GatherFirst, TwoAreInFlight) {
  const Layer a = layer(3);
  const Layer b = layer(4);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, a.group());
    RankLayer of_a(context, a, 11);
    RankLayer of_b(context, b, 12);
    Pending<ExpertRows> gathering_a = exchange.start_gather(of_a.x());
    Pending<ExpertRows> gathering_b = exchange.start_gather(of_b.x());
    const Plan plan_b = co_await exchange.start_plan(of_b.routing(), gathering_b);
    const Plan plan_a = co_await exchange.start_plan(of_a.routing(), gathering_a);
    const ExpertRows rows_a = co_await gathering_a;
    const ExpertRows rows_b = co_await gathering_b;
    co_await finish_layer(context, exchange, of_b, plan_b, rows_b);
    co_await finish_layer(context, exchange, of_a, plan_a, rows_a);
  });
}

TEST_P(GatherFirst, BadRoutingDropsWhatWasStaged) {
  const Layer shared = layer(5);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    RankLayer memory(context, shared, 11);
    for (int round = 0; round < 3; ++round) {
      Pending<ExpertRows> gathering = exchange.start_gather(memory.x());
      co_await support::pause(60);
      RoutingData bad{.num_tokens = memory.routing().num_tokens, .num_topk = 1, .topk_idx = {},
                      .topk_weights = {}};
      bad.topk_idx.assign(static_cast<std::size_t>(bad.num_tokens), 0);
      if (context.rank() == 0) bad.topk_idx[0] = 100000;
      const auto planning =
          co_await failure_of([&] { return exchange.start_plan(bad.view(), gathering); });
      require(planning && planning->code == ErrorCode::invalid_argument, "the plan ended well");
      const auto waiting = co_await failure_of([&] { return std::move(gathering); });
      require(waiting && waiting->text == planning->text, "the dispatch says something else");
    }
    co_await run_layer(context, exchange, shared, {.check_bytes = false});
  });
}

TEST_P(GatherFirst, ANumberOfTokensThatDiffersIsRefused) {
  const Layer shared = layer(6);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    RankLayer memory(context, shared, 11);
    Pending<ExpertRows> gathering = exchange.start_gather(memory.x());
    Routing routing = memory.routing();
    if (context.rank() == 0) --routing.num_tokens;
    const auto failure =
        co_await failure_of([&] { return exchange.start_plan(routing, gathering); });
    require(failure && failure->code == ErrorCode::invalid_argument &&
                failure->text.find("start_gather was given") != std::string::npos,
            failure ? failure->text : "the plan ended well");
    co_await run_layer(context, exchange, shared, {.check_bytes = false});
  });
}

TEST_P(GatherFirst, ADispatchThatIsNotThisPlansIsRefusedOnEveryRank) {
  const Layer shared = layer(9);
  for (const bool foreign : {true, false}) {
    SCOPED_TRACE(foreign ? "of another exchange" : "given twice");
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      Exchange other = make_exchange(context, shared.group());
      RankLayer memory(context, shared, 11);
      Pending<ExpertRows> first = exchange.start_gather(memory.x());
      Pending<ExpertRows> second = exchange.start_gather(memory.x());
      Pending<ExpertRows> others = other.start_gather(memory.x());
      const Plan plan = co_await exchange.start_plan(memory.routing(), first);
      Pending<ExpertRows>& wrong = foreign ? others : first;
      const auto failure = co_await failure_of([&] {
        return exchange.start_plan(memory.routing(), context.rank() == 0 ? wrong : second);
      });
      require(failure && failure->code == ErrorCode::invalid_argument &&
                  failure->text.find("on rank 0") != std::string::npos,
              failure ? failure->text : "the plan ended well");
      // The dispatch that has its plan, and the one of the other exchange, go on.
      const ExpertRows rows = co_await first;
      co_await finish_layer(context, exchange, memory, plan, rows);
      const Plan of_other = co_await other.start_plan(memory.routing(), others);
      const ExpertRows rows_of_other = co_await others;
      co_await finish_layer(context, other, memory, of_other, rows_of_other);
      co_await run_layer(context, exchange, shared, {.check_bytes = false});
    });
    if (HasFailure()) return;
  }
}

TEST_P(GatherFirst, GivenUpOrDroppedItEndsEverywhere) {
  const Layer shared = layer(7);
  for (std::uint64_t after = 0; after < 120; after += 13) {
    SCOPED_TRACE(fmt::format("after {}", after));
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      RankLayer memory(context, shared, 11);
      {
        Pending<ExpertRows> gathering = exchange.start_gather(memory.x());
        if (context.rank() == context.num_ranks() / 2) {
          co_await support::pause(after);
        } else {
          const auto planning = co_await failure_of(
              [&] { return exchange.start_plan(memory.routing(), gathering); });
          require(planning && planning->code == ErrorCode::cancelled,
                  planning ? planning->text : "a plan without all metadata");
        }
      }
      co_await run_layer(context, exchange, shared, {.check_bytes = false});
    });
    if (HasFailure()) return;
  }
}

TEST_P(GatherFirst, WaitBeforeThePlanIsAnErrorAndNoHang) {
  const Layer shared = layer(8);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    RankLayer memory(context, shared, 11);
    Pending<ExpertRows> gathering = exchange.start_gather(memory.x());
    try {
      (void)gathering.wait();
      require(false, "it ended well");
    } catch (const Error& error) {
      require(error.code() == ErrorCode::invalid_argument, error.what());
    }
    const Plan plan = co_await exchange.start_plan(memory.routing(), gathering);
    const ExpertRows rows = co_await gathering;
    co_await finish_layer(context, exchange, memory, plan, rows);
  });
}

std::vector<Point> gather_points() {
  std::vector<Point> points = few_points({"1x8", "2x4", "4x2", "8x1", "3+5"});
  std::erase_if(points, [](const Point& p) { return p.strategy != Strategy::node_gather; });
  return points;
}
INSTANTIATE_TEST_SUITE_P(Matrix, GatherFirst, ::testing::ValuesIn(gather_points()), name_of);

class PlanAndDispatch : public Early {};

TEST_P(PlanAndDispatch, GivesWhatTheTwoCallsGive) {
  const Layer shared = layer(1);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    for (int step = 0; step < 3; ++step) {
      RankLayer memory(context, shared, 11 + static_cast<std::uint64_t>(step));
      // One rank comes so late that all it needs for the plan is there already.
      if (context.rank() == step) co_await support::pause(500);
      const Dispatched dispatched =
          co_await exchange.start_plan_and_dispatch(memory.routing(), memory.x());
      co_await finish_layer(context, exchange, memory, dispatched.plan, dispatched.rows);
      memory.use_seed(31);
      co_await use_plan(context, exchange, dispatched.plan, memory, {.y = OutputPlace::window});
    }
  });
}

TEST_P(PlanAndDispatch, ABadRowCountOrRoutingIsRefusedOnEveryRank) {
  const Layer shared = layer(2);
  for (const bool bad_routing : {false, true}) {
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      RankLayer memory(context, shared, 11);
      ConstMatrix x = memory.x();
      Routing routing = memory.routing();
      const bool culprit = context.rank() == 0;
      if (culprit && !bad_routing) ++x.columns;
      if (culprit && bad_routing) routing.num_topk = 0;
      const auto failure =
          co_await failure_of([&] { return exchange.start_plan_and_dispatch(routing, x); });
      require(failure && failure->code == ErrorCode::invalid_argument,
              failure ? failure->text : "it ended well");
      co_await run_layer(context, exchange, shared, {.check_bytes = false});
    });
    if (HasFailure()) return;
  }
}

TEST_P(PlanAndDispatch, GivenUpItEndsEverywhere) {
  const Layer shared = layer(3);
  for (std::uint64_t after = 0; after < 160; after += 13) {
    SCOPED_TRACE(fmt::format("after {}", after));
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      RankLayer memory(context, shared, 11);
      Pending<Dispatched> pending =
          exchange.start_plan_and_dispatch(memory.routing(), memory.x());
      if (context.rank() == 1) {
        co_await support::pause(after);
        pending.cancel("given up");
      }
      const auto failure = co_await failure_of([&] { return std::move(pending); });
      require(!failure || failure->code == ErrorCode::cancelled, failure ? failure->text : "");
      co_await run_layer(context, exchange, shared, {.check_bytes = false});
    });
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Matrix, PlanAndDispatch,
                         ::testing::ValuesIn(few_points({"1x8", "2x4", "4x2", "8x1", "3+5"})),
                         name_of);

}  // namespace
}  // namespace ferry::conformance
