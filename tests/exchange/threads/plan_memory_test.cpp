// Memory of plans is used again: plans in a row, in flight together, dropped in any order and after
// their exchange stay right, and what is kept stays bounded.

#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "exchange/engine.hpp"
#include "ferry/ferry.hpp"

namespace ferry {
namespace {

constexpr int kBatchHidden = 16;
constexpr int kTopk = 4;
constexpr int kExperts = 12;

/// A batch of one rank with its plan; expert e makes (e + 1) times the row, and weights are powers
/// of two, so that every sum is exact.
struct Batch {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<float> x;
  std::optional<Plan> plan;

  Batch(int num_tokens, std::uint32_t seed) {
    std::mt19937 draw(seed);
    for (int i = 0; i < num_tokens * kTopk; ++i) {
      ids.push_back(static_cast<std::int32_t>(draw() % (kExperts + 1)) - 1);
      weights.push_back(0.25F * static_cast<float>(1U << (draw() % 3)));
    }
    for (int i = 0; i < num_tokens * kBatchHidden; ++i)
      x.push_back(static_cast<float>(draw() % 64));
  }
  int num_tokens() const { return static_cast<int>(ids.size()) / kTopk; }
  Routing routing() const {
    return Routing::of(num_tokens(), kTopk, std::span<const std::int32_t>(ids), weights);
  }
};

void apply_experts(const Plan& plan, const Matrix& rows) {
  for (std::size_t local = 0; local < plan.local_experts().size(); ++local) {
    const auto factor = static_cast<float>(plan.local_experts()[local] + 1);
    for (std::int64_t row = plan.expert_offsets()[local]; row < plan.expert_offsets()[local + 1];
         ++row) {
      auto* const values = reinterpret_cast<float*>(rows.row(row));
      for (int i = 0; i < kBatchHidden; ++i) values[i] *= factor;
    }
  }
}

void expect_right(Exchange& exchange, Batch& batch) {
  const ExpertRows rows = exchange.dispatch(
      *batch.plan, {batch.x.data(), DType::f32, batch.num_tokens(), kBatchHidden, 0});
  apply_experts(*batch.plan, rows.matrix());
  std::vector<float> out(batch.x.size(), -1);
  exchange.combine(*batch.plan, rows.matrix(),
                   {out.data(), DType::f32, batch.num_tokens(), kBatchHidden, 0});
  for (std::size_t at = 0; at < out.size(); ++at) {
    float factor = 0;
    for (std::size_t slot = 0; slot < kTopk; ++slot) {
      const std::size_t entry = at / kBatchHidden * kTopk + slot;
      factor += batch.weights[entry] * static_cast<float>(batch.ids[entry] + 1);
    }
    ASSERT_EQ(out[at], batch.x[at] * factor) << "token " << at / kBatchHidden;
  }
}

Exchange make_exchange(Transport& transport, Strategy strategy) {
  return {transport,
          Placement::contiguous(kExperts, transport.topology().num_ranks()),
          {.hidden = kBatchHidden, .dtype = DType::f32},
          {.strategy = strategy}};
}

/// The same on all ranks, apart from the tokens of a rank.
Batch draw_batch(std::mt19937& draw, int rank) {
  const auto seed = static_cast<std::uint32_t>(draw());
  const int sizes[] = {0, 1, 7, 64, 300, 1000};
  return {sizes[(seed + static_cast<std::uint32_t>(rank)) % 6], seed + 17 * rank};
}

class PlanMemory : public ::testing::TestWithParam<Strategy> {};

TEST_P(PlanMemory, PlansOfDifferentSizesStayRightWhateverIsDroppedWhen) {
  threads::run({.nodes = 2, .ranks_per_node = 2}, [](Transport& transport) {
    Exchange exchange = make_exchange(transport, GetParam());
    std::mt19937 draw(4711);  // the same order of calls on every rank
    std::vector<std::unique_ptr<Batch>> live;
    for (int call = 0; call < 60; ++call) {
      live.push_back(std::make_unique<Batch>(draw_batch(draw, transport.rank())));
      live.back()->plan = exchange.plan(live.back()->routing());
      expect_right(exchange, *live[draw() % live.size()]);
      while (live.size() > draw() % 8) {
        const auto at = static_cast<std::ptrdiff_t>(draw() % live.size());
        expect_right(exchange, *live[static_cast<std::size_t>(at)]);
        live.erase(live.begin() + at);
      }
      if (::testing::Test::HasFailure()) break;
    }
  });
}

TEST_P(PlanMemory, PlansThatAreMadeTogetherDoNotShareMemory) {
  threads::run({.nodes = 2, .ranks_per_node = 2}, [](Transport& transport) {
    Exchange exchange = make_exchange(transport, GetParam());
    std::mt19937 draw(99);
    for (int round = 0; round < 4; ++round) {
      std::vector<std::unique_ptr<Batch>> together;
      std::vector<Pending<Plan>> pending;
      for (int i = 0; i < 6; ++i) {
        together.push_back(std::make_unique<Batch>(draw_batch(draw, transport.rank())));
        pending.push_back(exchange.start_plan(together.back()->routing()));
      }
      for (std::size_t i = 6; i-- > 0;) together[i]->plan = pending[i].wait();
      pending.clear();
      for (const auto& batch : together) expect_right(exchange, *batch);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, PlanMemory,
                         ::testing::Values(Strategy::flat, Strategy::rank_dedup,
                                           Strategy::node_gather, Strategy::node_dedup));

TEST(PlanMemory, ADroppedPlanLeavesItsMemoryToTheNextOfAnyExchange) {
  threads::run({}, [](Transport& transport) {
    Exchange first = make_exchange(transport, Strategy::node_dedup);
    Exchange second = make_exchange(transport, Strategy::node_dedup);
    const Batch large(2000, 1);
    const Batch small(100, 2);
    const plan::Target* memory = nullptr;
    {
      const Plan plan = first.plan(large.routing());
      memory = plan.state()->rows.home_targets.data();
    }
    for (int call = 0; call < 10; ++call) {
      const Plan plan = second.plan((call % 2 == 0 ? small : large).routing());
      EXPECT_EQ(plan.state()->rows.home_targets.data(), memory) << call;
    }
  });
}

TEST(PlanMemory, PlansMayOutliveTheirExchangeAndTransport) {
  std::vector<Plan> plans;
  threads::run({}, [&](Transport& transport) {
    const Batch batch(500, 3);
    Exchange exchange = make_exchange(transport, Strategy::node_dedup);
    plans.push_back(exchange.plan(batch.routing()));
  });
  EXPECT_GT(plans.front().num_rows(), 0);
  plans.clear();
}

TEST(PlanMemory, WhatIsKeptIsBounded) {
  threads::run({}, [](Transport& transport) {
    Exchange exchange = make_exchange(transport, Strategy::node_dedup);
    const auto& plans = *detail::Engine::of(transport).plan_memory().plans;
    const auto& inputs = *detail::Engine::of(transport).plan_memory().inputs;
    const Batch batch(1000, 5);
    std::vector<Plan> live;
    for (int i = 0; i < 10; ++i) live.push_back(exchange.plan(batch.routing()));
    const std::uint64_t each = memory_bytes(live.front().state()->rows);
    EXPECT_EQ(plans.kept_bytes(), 0U);
    live.clear();
    EXPECT_EQ(plans.kept_bytes(), plans.kMost * each);

    // Its targets alone are more than may be kept.
    const Batch huge(330000, 6);
    EXPECT_GT(memory_bytes(exchange.plan(huge.routing()).state()->rows), plans.kMostBytes);
    for (int i = 0; i < 6; ++i) exchange.plan(huge.routing());
    EXPECT_LE(plans.kept_bytes(), plans.kMost * each);
    EXPECT_LE(inputs.kept_bytes(), inputs.kMostBytes);
    EXPECT_GT(inputs.kept_bytes(), 0U);
  });
}

}  // namespace
}  // namespace ferry
