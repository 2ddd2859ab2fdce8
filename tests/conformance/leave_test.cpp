// Cases about ranks that leave a failed plan at different calls: one gives its dispatch up, for
// some of the others it ends well and only the combine fails. What comes after the failed plan is
// not touched by it.

#include <algorithm>

#include <fmt/format.h>

#include "conformance/scenario.hpp"
#include "support/verify.hpp"

namespace ferry::conformance {
namespace {

using support::Failure;
using support::failure_of;
using support::require;

/// Who gives up, and after how many steps of its dispatch.
struct GivingUp {
  int rank = 0;
  std::uint64_t after = 0;
};

class Leaving : public Conformance {
 protected:
  Layer layer(std::uint64_t seed) const {
    // Few experts per token: not every rank needs every other one, so that calls end well on some.
    const RoutingSpec spec{.num_experts = 2 * num_ranks() + 1, .num_topk = 2};
    return {group(spec.num_experts), make_all_routing(spec, ragged(7), seed)};
  }
  std::vector<GivingUp> cases() const {
    std::vector<GivingUp> result;
    const std::uint64_t scale = GetParam().transport == TransportKind::stepped ? 1 : 3;
    for (int rank = 0; rank<num_ranks(); rank += num_ranks()> 4 ? 3 : 1) {
      for (std::uint64_t after = 0; after < 240; after += 17) {
        result.push_back({rank, after * scale});
      }
    }
    return result;
  }
};

/// Dispatch and combine as far as they go. Returns the failure, if there was one.
Task use_until_it_fails(RankContext& context, Exchange& exchange, const Plan& plan,
                        RankLayer& memory, GivingUp giving_up, std::optional<Failure>& failure) {
  if (context.rank() == giving_up.rank) {
    Pending<ExpertRows> pending = exchange.start_dispatch(plan, memory.x());
    co_await support::pause(giving_up.after);
    pending.cancel("given up");
    failure = co_await failure_of([&] { return std::move(pending); });
  } else {
    failure = co_await failure_of([&] { return exchange.start_dispatch(plan, memory.x()); });
  }
  if (failure) co_return;
  GuardedMatrix y(plan.num_rows(), memory.layer().group().hidden, memory.layer().group().dtype);
  failure =
      co_await failure_of([&] { return exchange.start_combine(plan, y.matrix(), memory.out()); });
}

void require_given_up(const std::optional<Failure>& failure) {
  if (!failure) return;
  require(failure->code == ErrorCode::cancelled, failure->text);
  require(failure->text.find("given up") != std::string::npos, failure->text);
}

TEST_P(Leaving, TheNextPlanWorks) {
  const Layer shared = layer(1);
  int failures = 0;
  for (const GivingUp& giving_up : cases()) {
    SCOPED_TRACE(fmt::format("rank {} after {}", giving_up.rank, giving_up.after));
    std::vector<bool> failed(static_cast<std::size_t>(num_ranks()));
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      std::optional<Failure> failure;
      {
        RankLayer memory(context, shared, 3);
        const Plan plan = co_await exchange.start_plan(memory.routing());
        co_await use_until_it_fails(context, exchange, plan, memory, giving_up, failure);
      }
      require_given_up(failure);
      co_await run_layer(context, exchange, shared, {.uses = 2, .check_bytes = false});
      failed[static_cast<std::size_t>(context.rank())] = failure.has_value();
    });
    failures += static_cast<int>(std::ranges::count(failed, true));
    if (HasFailure()) return;
  }
  EXPECT_GT(failures, num_ranks());
}

TEST_P(Leaving, PlansInFlightGoOn) {
  const Layer shared = layer(2);
  for (const GivingUp& giving_up : cases()) {
    SCOPED_TRACE(fmt::format("rank {} after {}", giving_up.rank, giving_up.after));
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      RankLayer memory(context, shared, 3);
      RankLayer kept_memory(context, shared, 4);
      const Plan kept = co_await exchange.start_plan(kept_memory.routing());
      const Plan lost = co_await exchange.start_plan(memory.routing());
      std::optional<Failure> failure;
      co_await use_until_it_fails(context, exchange, lost, memory, giving_up, failure);
      require_given_up(failure);
      for (int use = 0; use < 2; ++use) {
        co_await use_plan(context, exchange, kept, kept_memory, {.y = OutputPlace::window});
      }
      // The handle of the failed plan still lives: a call on it ends with the first error.
      if (failure) {
        const auto again =
            co_await failure_of([&] { return exchange.start_dispatch(lost, memory.x()); });
        require(again.has_value() && again->text == failure->text, "another error the second time");
      }
      co_await run_layer(context, exchange, shared, {.check_bytes = false});
      co_await use_plan(context, exchange, kept, kept_memory, {.y = OutputPlace::dispatched_rows});
    });
    if (HasFailure()) return;
  }
}

TEST_P(Leaving, RanksCanAgreeOnHowAStepEnded) {
  // Whoever failed goes straight to an all_gather; those whose combine still runs get there too.
  const Layer shared = layer(3);
  for (const GivingUp& giving_up : cases()) {
    SCOPED_TRACE(fmt::format("rank {} after {}", giving_up.rank, giving_up.after));
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      RankLayer memory(context, shared, 3);
      const Plan plan = co_await exchange.start_plan(memory.routing());
      std::optional<Failure> failure;
      co_await use_until_it_fails(context, exchange, plan, memory, giving_up, failure);
      const std::byte mine{failure.has_value()};
      const auto all = co_await start_all_gather(context.transport(), {&mine, 1});
      const bool any =
          std::ranges::any_of(all, [](const auto& one) { return one[0] != std::byte{}; });
      require(any || !failure, "a failure was lost");
    });
    if (HasFailure()) return;
  }
}

TEST_P(Leaving, GivesWindowsBack) {
  const Layer shared = layer(4);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    RankLayer memory(context, shared, 3);
    for (int round = 0; round < 60; ++round) {
      const Plan plan = co_await exchange.start_plan(memory.routing());
      std::optional<Failure> failure;
      const GivingUp giving_up{round % context.num_ranks(), static_cast<std::uint64_t>(2 * round)};
      co_await use_until_it_fails(context, exchange, plan, memory, giving_up, failure);
      require_given_up(failure);
      co_await start_all_gather(context.transport(), {});
    }
    // A slot of the smallest size serves each of these calls; a few are in use at once.
    require(pool_bytes(context.transport()) <= 10 * 16 * 1024,
            fmt::format("the pool grew to {} bytes", pool_bytes(context.transport())));
  });
}

TEST_P(Leaving, PlansGivenUpLateHoldNothingBack) {
  // Others end such a plan well and send the rows that its metadata has allowed them to send.
  const Layer shared = layer(6);
  for (std::uint64_t after = 0; after < 60; after += 3) {
    SCOPED_TRACE(fmt::format("after {}", after));
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      RankLayer memory(context, shared, 3);
      for (int round = 0; round < 10; ++round) {
        Pending<Plan> pending = exchange.start_plan(memory.routing());
        if (context.rank() == 0) {
          co_await support::pause(after);
          pending.cancel("given up");
        }
        std::optional<Plan> plan;
        try {
          plan.emplace(co_await pending);
        } catch (const Error& error) {
          require(error.code() == ErrorCode::cancelled, error.what());
        }
        if (!plan) continue;
        require_given_up(
            co_await failure_of([&] { return exchange.start_dispatch(*plan, memory.x()); }));
      }
      co_await run_layer(context, exchange, shared, {.uses = 2, .check_bytes = false});
    });
    if (HasFailure()) return;
  }
}

TEST_P(Leaving, AnotherOrderIsFoundAgainLater) {
  const Layer shared = layer(5);
  std::vector<std::optional<Failure>> failures(static_cast<std::size_t>(num_ranks()));
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    RankLayer memory(context, shared, 3);
    {
      const Plan plan = co_await exchange.start_plan(memory.routing());
      std::optional<Failure> failure;
      co_await use_until_it_fails(context, exchange, plan, memory, {0, 0}, failure);
      require(context.rank() != 0 || failure.has_value(),
              "rank 0 gave up, but its call ended well");
    }
    // The first plan tells that all know of the failure, the second starts a new order.
    for (int i = 0; i < 2; ++i) {
      co_await run_layer(context, exchange, shared, {.check_bytes = false});
    }
    const Plan a = co_await exchange.start_plan(memory.routing());
    const Plan b = co_await exchange.start_plan(memory.routing());
    const Plan& mine = context.rank() == context.num_ranks() - 1 ? b : a;
    failures[static_cast<std::size_t>(context.rank())] =
        co_await failure_of([&] { return exchange.start_dispatch(mine, memory.x()); });
    co_await start_all_gather(context.transport(), {});
  });
  support::gather_by_rank(failures);
  for (const auto& failure : failures) {
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->code, ErrorCode::mismatch) << failure->text;
  }
}

INSTANTIATE_TEST_SUITE_P(Matrix, Leaving, ::testing::ValuesIn(few_points({"4x2", "2x4", "8x1"})),
                         name_of);

}  // namespace
}  // namespace ferry::conformance
