// What a rank may use again after a call that it gave up: nothing that another rank may still read
// or write. And what becomes of the calls that began beside the one given up.

#include <cstdint>
#include <future>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "exchange/state.hpp"
#include "exchange/stepped_ranks.hpp"
#include "wire/headers.hpp"

namespace ferry::testing {
namespace {

Topology one_node() { return Topology::uniform(1, 2); }

TEST(GivenUp, ADroppedPendingEndsItsCallOnEveryRank) {
  SteppedRanks ranks(nodes(2));
  const std::vector<Plan> plans = ranks.plan_all();
  ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
  auto other = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return other.done(); }));
  expect_error(error_of(other), ErrorCode::cancelled, "its Pending was dropped");
}

TEST(GivenUp, AWindowIsNotUsedAgainWhileItsWritersMayWrite) {
  SteppedRanks ranks(one_node());
  const std::vector<Plan> plans = ranks.plan_all();
  auto writing = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
  auto given_up = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
  given_up.cancel("given up");
  ASSERT_TRUE(given_up.done());
  const std::uint64_t before = pool_bytes(ranks.transport(0));
  const OutputRows output = ranks.exchange(0).output(plans[0]);
  EXPECT_GT(pool_bytes(ranks.transport(0)), before);  // the window of the dispatch is not free
  ranks.work(ranks.all(), 50);
  const std::uint64_t after = pool_bytes(ranks.transport(0));
  const OutputRows another = ranks.exchange(0).output(plans[0]);
  EXPECT_EQ(pool_bytes(ranks.transport(0)), after);  // now it is
  EXPECT_TRUE(error_of(writing).has_value());
}

TEST(GivenUp, ARankThatHasGoneHoldsNoWindow) {
  SteppedRanks ranks(one_node());
  const std::vector<Plan> plans = ranks.plan_all();
  auto given_up = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
  given_up.cancel("given up");
  ranks.drop_exchange(1);
  ranks.work(ranks.all(), 50);
  const std::uint64_t before = pool_bytes(ranks.transport(0));
  const OutputRows output = ranks.exchange(0).output(plans[0]);
  EXPECT_EQ(pool_bytes(ranks.transport(0)), before);
}

TEST(GivenUp, OutputsAreTheirReadersUntilTheyKnow) {
  SteppedRanks ranks(one_node());
  const std::vector<Plan> plans = ranks.plan_all();
  const std::vector<float> outputs(kTokens * kHidden, 3.0F);
  const ConstMatrix y{outputs.data(), DType::f32, kTokens, kHidden, 0};
  auto given_up = ranks.exchange(0).start_combine(plans[0], y, ranks.out(0));
  auto reading = ranks.exchange(1).start_combine(plans[1], y, ranks.out(1));
  given_up.cancel("given up");
  ranks.work({0}, 50);
  EXPECT_FALSE(given_up.done());  // rank 1 has not heard of it and may read
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return given_up.done() && reading.done(); }));
  expect_error(error_of(given_up), ErrorCode::cancelled, "given up");
  expect_error(error_of(reading), ErrorCode::cancelled, "given up");
}

TEST(GivenUp, AfterATimeoutOutputsStayWhereTheirReadersMayCome) {
  std::promise<void> checked;
  std::shared_future<void> is_checked = checked.get_future().share();
  threads::run({.nodes = 1, .ranks_per_node = 2}, [&](Transport& transport) {
    set_limits(transport, {.deadline_s = 0.05});
    Exchange exchange(transport, Placement::contiguous(2, 2),
                      {.hidden = kHidden, .dtype = DType::f32});
    const std::vector<std::int32_t> ids(kTokens, 1 - transport.rank());
    const Plan plan = exchange.plan(Routing::of(kTokens, 1, std::span(ids)));
    barrier(transport);
    if (transport.rank() == 1) {
      is_checked.wait();  // inside no call: rank 0 waits in vain
      return;
    }
    const std::vector<float> outputs(kTokens * kHidden, 3.0F);
    std::vector<float> out(outputs.size());
    try {
      exchange.combine(plan, {outputs.data(), DType::f32, kTokens, kHidden, 0},
                       {out.data(), DType::f32, kTokens, kHidden, 0});
      ADD_FAILURE() << "the other rank gave nothing";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
    }
    const std::uint64_t before = pool_bytes(transport);
    const OutputRows output = exchange.output(plan);
    EXPECT_GT(pool_bytes(transport), before);
    checked.set_value();
  });
}

TEST(GivenUp, CountsOfAPlanAreKeptWhileTheyMayBeRead) {
  SteppedRanks ranks(one_node());
  ranks.exchange(0).start_plan(ranks.routing(0));  // shows its counts and is dropped
  const std::uint64_t before = pool_bytes(ranks.transport(0));
  auto next = ranks.exchange(0).start_plan(ranks.routing(0));
  EXPECT_GT(pool_bytes(ranks.transport(0)), before);
  auto reading = ranks.exchange(1).start_plan(ranks.routing(1));
  auto other = ranks.exchange(1).start_plan(ranks.routing(1));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return next.done() && other.done(); }));
  expect_error(error_of(reading), ErrorCode::cancelled, "its Pending was dropped");
  EXPECT_FALSE(error_of(next).has_value());
  EXPECT_FALSE(error_of(other).has_value());
}

TEST(GivenUp, AnotherOrderIsFoundOnceTheFailedPlanHasGone) {
  SteppedRanks ranks(one_node());
  {
    const std::vector<Plan> lost = ranks.plan_all();
    auto given_up = ranks.exchange(0).start_dispatch(lost[0], ranks.x(0));
    given_up.cancel("given up");
    auto other = ranks.exchange(1).start_dispatch(lost[1], ranks.x(1));
    ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return other.done(); }));
    ranks.work(ranks.all(), 50);
  }
  // The first plan tells that all know of the failure, the second starts a new order.
  ranks.plan_all();
  ranks.plan_all();
  const std::vector<Plan> a = ranks.plan_all();
  const std::vector<Plan> b = ranks.plan_all();
  auto first = ranks.exchange(0).start_dispatch(a[0], ranks.x(0));
  auto second = ranks.exchange(1).start_dispatch(b[1], ranks.x(1));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return first.done() && second.done(); }));
  expect_error(error_of(first), ErrorCode::mismatch, "same order");
  expect_error(error_of(second), ErrorCode::mismatch, "same order");
}

TEST(GivenUp, CallsLeftOutOnAPlanThatFailedAreNoOtherOrder) {
  // Rank 0 holds a failed plan and makes one more call on it, rank 1 does not: also long after all
  // know of the failure, what both do next must not count as another order.
  SteppedRanks ranks(one_node());
  const std::vector<Plan> lost = ranks.plan_all();
  auto given_up = ranks.exchange(0).start_dispatch(lost[0], ranks.x(0));
  given_up.cancel("given up");
  ranks.work(ranks.all(), 50);
  for (int plan = 0; plan < 3; ++plan) {
    const std::vector<Plan> plans = ranks.plan_all();
    auto late = ranks.exchange(0).start_dispatch(lost[0], ranks.x(0));
    ranks.use(plans);
    expect_error(error_of(late), ErrorCode::cancelled, "given up");
  }
}

/// A call of the exchange at the first place after so many plans were opened.
wire::CallId call_on(std::uint32_t plan, std::uint32_t plans_before, wire::OpKind kind) {
  wire::CallId call;
  call.generation = 1;
  call.exchange = 1;
  call.place = static_cast<std::uint64_t>(plans_before) << 32U;
  call.plan = plan;
  call.kind = kind;
  return call;
}

TEST(GivenUp, ACallMadeInIgnoranceIsNoOtherOrder) {
  // Rank 0 gives plan 0 up. Rank 1, which has not heard of it, has planned twice more and combines
  // on plan 0, which rank 0 leaves out: a fragment of that comes late.
  SteppedRanks ranks(nodes(2));
  std::vector<Plan> lost = ranks.plan_all();
  auto ignorant = ranks.exchange(1).start_plan(ranks.routing(1));
  {
    const Plan plan = std::move(lost[0]);
    ranks.exchange(0).start_dispatch(plan, ranks.x(0));
  }
  auto knowing = ranks.exchange(0).start_plan(ranks.routing(0));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return ignorant.done() && knowing.done(); }));
  const std::vector<Plan> plans = ranks.plan_all();
  auto dispatching = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
  std::vector<std::byte> message(kFragmentBytes);
  wire::encode(wire::FragmentHeader{.call = call_on(0, 3, wire::OpKind::combine),
                                    .num_rows = kRowsPerFragment,
                                    .payload_bytes = static_cast<std::uint32_t>(kPayloadBytes)},
               std::span(message).first<wire::kFragmentHeaderBytes>());
  ranks.forge(1, 0, MessageKind::payload, message);
  ranks.work({0}, 50);
  auto other = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return dispatching.done() && other.done(); }));
  EXPECT_FALSE(error_of(dispatching).has_value());
  EXPECT_FALSE(error_of(other).has_value());
}

TEST(GivenUp, AnotherOrderOfOthersLeavesCallsAfterAFailureAlone) {
  // Ranks that know of no failure find two calls at one place. What this rank, which knows of one,
  // does at that place is neither of them.
  SteppedRanks ranks(nodes(2));
  const std::vector<Plan> lost = ranks.plan_all();
  ranks.exchange(0).start_dispatch(lost[0], ranks.x(0));
  ranks.work(ranks.all(), 50);
  const std::vector<Plan> plans = ranks.plan_all();
  auto going_on = ranks.exchange(0).start_dispatch(plans[0], ranks.x(0));
  ranks.forge(1, 0, MessageKind::control,
              wire::encode(wire::PoisonMessage{.call = call_on(0, 2, wire::OpKind::combine),
                                               .code = ErrorCode::mismatch,
                                               .text = "two calls at one place"}));
  ranks.work({0}, 50);
  auto other = ranks.exchange(1).start_dispatch(plans[1], ranks.x(1));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return going_on.done() && other.done(); }));
  EXPECT_FALSE(error_of(going_on).has_value());
  EXPECT_FALSE(error_of(other).has_value());
}

TEST(GivenUp, ARefusalThatIsKnownEndsNothingMore) {
  // A rank for which places still say something has told which plan a refusal without one ends.
  // The refusal itself comes later.
  SteppedRanks ranks(nodes(2));
  const std::vector<Plan> lost = ranks.plan_all();
  const std::vector<Plan> plans = ranks.plan_all();
  for (const int rank : ranks.all()) {
    for (const std::uint32_t plan : {0U, ferry::detail::kNoPlan}) {
      ranks.forge(1 - rank, rank, MessageKind::control,
                  wire::encode(wire::PoisonMessage{.call = call_on(plan, 2, wire::OpKind::dispatch),
                                                   .code = ErrorCode::stale_plan,
                                                   .text = "no such plan"}));
      ranks.work(ranks.all(), 20);
    }
  }
  ranks.use(plans);
  auto on_lost = ranks.exchange(0).start_dispatch(lost[0], ranks.x(0));
  expect_error(error_of(on_lost), ErrorCode::stale_plan, "no such plan");
}

}  // namespace
}  // namespace ferry::testing
