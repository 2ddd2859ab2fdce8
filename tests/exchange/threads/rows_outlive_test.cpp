// Rows and plans that are kept longer than everything they came from: their memory stays. Under
// AddressSanitizer an unmapped page would end the test, and so it does without.

#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ferry/ferry.hpp"

namespace ferry::outliving {
namespace {

constexpr std::int64_t kTokens = 5;
constexpr std::int64_t kHidden = 1000;

struct Kept {
  std::optional<Plan> plan;
  std::optional<ExpertRows> rows;
  std::optional<OutputRows> outputs;
};

void fill(Transport& transport, Kept& kept) {
  Exchange exchange(transport, Placement::contiguous(4, 2),
                    {.hidden = kHidden, .dtype = DType::f32});
  std::vector<std::int32_t> ids(kTokens * 2);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % 4);
  const std::vector<float> x(kTokens * kHidden, 7.0F);
  kept.plan = exchange.plan(Routing::of(kTokens, 2, std::span<const std::int32_t>(ids)));
  kept.rows.emplace(exchange.dispatch(*kept.plan, {x.data(), DType::f32, kTokens, kHidden}));
  kept.outputs.emplace(exchange.output(*kept.plan));
}

void expect_rows(const Kept& kept) {
  const Matrix rows = kept.rows->matrix();
  ASSERT_GT(rows.rows, 0);
  EXPECT_EQ(kept.plan->num_rows(), rows.rows);
  for (std::int64_t row = 0; row < rows.rows; ++row) {
    const auto* const values = reinterpret_cast<const float*>(rows.row(row));
    ASSERT_EQ(values[0], 7.0F);
    ASSERT_EQ(values[kHidden - 1], 7.0F);
    reinterpret_cast<float*>(kept.outputs->matrix().row(row))[kHidden - 1] = 1;
  }
}

TEST(RowsOutlive, TheirTransportAndWorld) {
  for (const int nodes : {1, 2}) {
    std::vector<Kept> kept(2);
    threads::run({.nodes = nodes, .ranks_per_node = 2 / nodes}, [&](Transport& transport) {
      fill(transport, kept[static_cast<std::size_t>(transport.rank())]);
    });
    for (const Kept& one : kept) expect_rows(one);
    // The last handle may go on any thread.
    std::thread([&] { kept.clear(); }).join();
  }
}

// What is not held goes with its slot: growing and dropping must not pile up memory.
TEST(RowsOutlive, ARetiredRegionIsGoneWhenNobodyHoldsIt) {
  threads::World world({});
  const auto transport = world.join(0);
  std::byte* const memory = transport->create_region(1, 4096);
  std::shared_ptr<const void> held = transport->hold_region(1);
  const std::weak_ptr<const void> watched = held;
  transport->retire_region(1);
  memory[4095] = std::byte{1};
  EXPECT_THROW(transport->hold_region(1), Error);
  EXPECT_FALSE(watched.expired());
  held.reset();
  EXPECT_TRUE(watched.expired());
}

}  // namespace
}  // namespace ferry::outliving
