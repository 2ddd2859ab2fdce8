// The oracle, the rows, the generators and the runner by themselves: against numbers worked out by
// hand, properties of IEEE formats, and programs that must fail.

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "constant_model.hpp"
#include "support/numbers.hpp"
#include "support/rank_program.hpp"
#include "support/reference.hpp"
#include "support/routing.hpp"
#include "support/rows.hpp"

namespace ferry::support {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Numbers, EveryHalfAndBrainNumberSurvivesARoundTrip) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float value = from_bits(dtype, bits);
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(from_bits(dtype, to_bits(dtype, value)))) << bits;
      } else {
        ASSERT_EQ(to_bits(dtype, value), bits) << to_string(dtype);
      }
    }
  }
}

TEST(Numbers, RoundToNearestAndTiesToEven) {
  // Between two neighbours: the middle goes to the even one, anything past it to the nearer one.
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const std::uint32_t largest = dtype == DType::bf16 ? 0x7F7F : 0x7BFF;
    for (std::uint32_t low = 0; low < largest; ++low) {
      const float middle = static_cast<float>(
          (static_cast<double>(from_bits(dtype, low)) + from_bits(dtype, low + 1)) / 2);
      if (middle == from_bits(dtype, low) || middle == from_bits(dtype, low + 1)) continue;
      const std::uint32_t even = low % 2 == 0 ? low : low + 1;
      ASSERT_EQ(to_bits(dtype, middle), even) << to_string(dtype) << " " << low;
      ASSERT_EQ(to_bits(dtype, std::nextafter(middle, kInfinity)), low + 1);
      ASSERT_EQ(to_bits(dtype, std::nextafter(middle, 0.0F)), low);
      ASSERT_EQ(to_bits(dtype, -middle), even | 0x8000U);
    }
  }
  EXPECT_EQ(to_bits(DType::f16, 65519.0F), 0x7BFFU);
  EXPECT_EQ(to_bits(DType::f16, 65520.0F), 0x7C00U);
  EXPECT_EQ(to_bits(DType::f16, -kInfinity), 0xFC00U);
  EXPECT_EQ(to_bits(DType::f16, 1.0F), 0x3C00U);
  EXPECT_EQ(to_bits(DType::bf16, std::numeric_limits<float>::max()), 0x7F80U);
  EXPECT_EQ(to_bits(DType::bf16, 1.0F), 0x3F80U);
}

float out_of(const Group& group, const std::vector<float>& y, const Routing& routing, int home) {
  std::vector<Routing> all(static_cast<std::size_t>(group.topology.num_ranks()));
  all[static_cast<std::size_t>(home)] = routing;
  float value = -1;
  Reference(group, constant_model(y), all).out(home, 0, std::span(&value, 1));
  return value;
}

TEST(Oracle, SumsInTheOrderOfTheTree) {
  // Node 0: ranks 0, 1 with experts 0, 1; node 1: ranks 2, 3 with experts 2, 3. In FP32 the order
  // shows: 2^24 + 1 + 1 is 2^24, 1 + 1 + 2^24 is 2^24 + 2.
  Group group{.topology = Topology::uniform(2, 2), .placement = Placement::contiguous(4, 4),
              .hidden = 1};
  const float big = 16777216.0F;
  const std::vector<float> ones(4, 1.0F);
  const auto run = [&](std::vector<std::int32_t> ids, std::vector<float> y, int home) {
    return out_of(group, y, Routing::of(1, 4, std::span<const std::int32_t>(ids), ones), home);
  };
  // Home node 0, slots in order 1, 0: (y1 + y0), then (y2 + y3) whatever the slots are.
  EXPECT_EQ(run({3, 1, 0, 2}, {1, big, 1, 1}, 0), (big + 1.0F) + (1.0F + 1.0F));
  // On home's own node slots count: experts 0, 1 of slots 1, 0 with -1 between.
  EXPECT_EQ(run({1, -1, 0, 3}, {-big, big, 7, 1}, 1), (big - big) + 1.0F);
  // The partial of the lower node comes first, home or not.
  EXPECT_EQ(run({2, -1, 0, 1}, {big, 1, 1, 0}, 2), (big + 1.0F) + 1.0F);
  EXPECT_EQ(run({2, -1, -1, 1}, {0, 1, big, 0}, 3), 1.0F + big);
  // Nobody: exactly zero.
  const float nothing = run({-1, -1, -1, -1}, ones, 0);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(nothing), 0U);
}

TEST(Oracle, RemoteRanksComeBeforeSlots) {
  // Both ranks of node 1 hold two experts: rank 2 has 2, 3 and rank 3 has 4, 5.
  Group group{.topology = Topology::from_sizes({2, 2}),
              .placement = Placement::from_map({0, 1, 2, 2, 3, 3}), .hidden = 1};
  const float big = 16777216.0F;
  const std::vector<std::int32_t> ids{4, 2, 5, 3};
  const std::vector<float> ones(4, 1.0F);
  const Routing routing = Routing::of(1, 4, std::span<const std::int32_t>(ids), ones);
  const std::vector<float> y{0, 0, 1, 1, 1, big};
  const float of_rank_2 = 1.0F + 1.0F;
  const float of_rank_3 = 1.0F + big;
  EXPECT_EQ(out_of(group, y, routing, 0), of_rank_2 + of_rank_3);
  // Seen from node 1 itself it is home: slots only.
  EXPECT_EQ(out_of(group, y, routing, 2), ((1.0F + 1.0F) + big) + 1.0F);
}

TEST(Oracle, RoundsWhatCrossesOnceAndNothingElse) {
  Group group{.topology = Topology::from_sizes({1, 2}),
              .placement = Placement::from_map({0, 1, 2, 2}), .hidden = 1};
  group.wire_combine = WireFormat::bf16;
  const std::vector<float> fine{1.001F, 1.002F, 1.003F, 1.0041F};
  const std::vector<std::int32_t> ids{0, 1, 2, 3};
  const std::vector<float> w{0.3F, 0.7F, 0.9F, 1.1F};
  const Routing routing = Routing::of(1, 4, std::span<const std::int32_t>(ids), w);
  const auto rounded = [](float value) {
    return from_bits(DType::bf16, to_bits(DType::bf16, value));
  };
  const float home = w[0] * fine[0];
  const float rank_1 = w[1] * fine[1];
  const float rank_2 = w[2] * fine[2] + w[3] * fine[3];
  group.strategy = Strategy::node_dedup;
  EXPECT_EQ(out_of(group, fine, routing, 0), home + rounded(rank_1 + rank_2));
  group.strategy = Strategy::node_gather;
  EXPECT_EQ(out_of(group, fine, routing, 0), home + rounded(rank_1 + rank_2));
  group.strategy = Strategy::rank_dedup;
  EXPECT_EQ(out_of(group, fine, routing, 0), home + (rounded(rank_1) + rounded(rank_2)));
  group.strategy = Strategy::flat;
  EXPECT_EQ(out_of(group, fine, routing, 0),
            home + (w[1] * rounded(fine[1]) + (w[2] * rounded(fine[2]) + w[3] * rounded(fine[3]))));
  group.wire_combine = WireFormat::f32;
  group.dtype = DType::bf16;
  EXPECT_EQ(out_of(group, fine, routing, 0), rounded(home + (rank_1 + rank_2)));
}

TEST(Oracle, SumsInF16SaturateOnTheirWayHomeUnlessTheyAreGradients) {
  // Two experts on node 0, two on node 1; two terms of 40000 are more than f16 can hold.
  Group group{.topology = Topology::uniform(2, 1), .placement = Placement::contiguous(4, 2),
              .hidden = 1, .wire_combine = WireFormat::f16};
  const std::vector<float> large(4, 40000.0F);
  const std::vector<float> ones(2, 1.0F);
  const auto run = [&](std::vector<std::int32_t> ids) {
    return out_of(group, large, Routing::of(1, 2, std::span<const std::int32_t>(ids), ones), 0);
  };
  EXPECT_EQ(run({0, 1}), 80000.0F);
  EXPECT_EQ(run({2, 3}), 65504.0F);
  group.gradients = true;
  EXPECT_EQ(run({0, 1}), 80000.0F);
  EXPECT_EQ(run({2, 3}), std::numeric_limits<float>::infinity());
  EXPECT_EQ(run({2, -1}), 40000.0F);
}

TEST(Oracle, RepeatedExpertsAreOneTermWithTheSumOfTheirWeights) {
  Group group{.topology = Topology::single_node(1), .placement = Placement::contiguous(2, 1),
              .hidden = 1};
  const std::vector<std::int32_t> ids{1, 0, 1};
  const std::vector<float> w{0.1F, 0.2F, 0.7F};
  const Routing routing = Routing::of(1, 3, std::span<const std::int32_t>(ids), w);
  EXPECT_EQ(out_of(group, {3.0F, 1.7F}, routing, 0), (0.1F + 0.7F) * 1.7F + 0.2F * 3.0F);
  const std::vector<RowOrigin> expected{{0, 0, 0}, {1, 0, 0}};
  EXPECT_EQ(Reference(group, constant_model({1, 1}), {routing}).rows_of(0), expected);
}

TEST(Oracle, RowsAreOrderedAndRoundedOnTheWay) {
  Group group{.topology = Topology::uniform(2, 1), .placement = Placement::from_map({1, 0, 1}),
              .hidden = 1};
  group.wire_dispatch = WireFormat::bf16;
  const std::vector<std::int32_t> ids_0{2, 0, 1, 2};
  const std::vector<std::int32_t> ids_1{-1, 0};
  Model model = constant_model({1, 1, 1});
  model.token = [](int, std::int64_t, std::span<float> row) { row[0] = 1.001F; };
  const Reference reference(group, model,
                            {Routing::of(2, 2, std::span<const std::int32_t>(ids_0)),
                             Routing::of(1, 2, std::span<const std::int32_t>(ids_1))});
  const std::vector<RowOrigin> expected{{0, 0, 0}, {0, 1, 0}, {2, 0, 0}, {2, 0, 1}};
  EXPECT_EQ(reference.rows_of(1), expected);
  float value = 0;
  reference.row(1, {0, 0, 0}, std::span(&value, 1));
  EXPECT_EQ(value, 1.0F) << "crossed";
  reference.row(1, {0, 1, 0}, std::span(&value, 1));
  EXPECT_EQ(value, 1.001F) << "stayed on its node";
}

TEST(Rows, AreFiniteDifferentAndTheSameAsNumbers) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    std::vector<std::byte> bytes(4 * 200 * element_bytes(dtype));
    const Matrix x{bytes.data(), dtype, 4, 200};
    fill_rows(9, 2, x);
    std::set<std::uint32_t> seen;
    std::vector<float> values(200);
    for (std::int64_t token = 0; token < 4; ++token) {
      row_values({9, 2, token}, dtype, values);
      EXPECT_FALSE(find_difference(x, token, values).has_value());
      for (const float value : values) {
        EXPECT_TRUE(std::isfinite(value) && std::fabs(value) < 1024.0F && value != 0);
        seen.insert(to_bits(dtype, value));
      }
    }
    EXPECT_GT(seen.size(), 600U) << to_string(dtype);
    row_values({10, 2, 0}, dtype, values);
    EXPECT_TRUE(find_difference(x, 0, values).has_value()) << "another seed, the same row";
    row_values({9, 3, 0}, dtype, values);
    EXPECT_TRUE(find_difference(x, 0, values).has_value()) << "another rank, the same row";
  }
}

TEST(Rows, DifferencesNameThePlaceAndBothValues) {
  std::vector<float> memory{1, 2, 3, 4, 5, 6};
  const ConstMatrix actual{memory.data(), DType::f32, 2, 3};
  EXPECT_FALSE(find_difference(actual, 1, std::vector<float>{4, 5, 6}).has_value());
  const auto difference = find_difference(actual, 1, std::vector<float>{4, 5.5F, 7});
  ASSERT_TRUE(difference.has_value());
  EXPECT_EQ(to_string(*difference),
            "row 1, column 1: got 5 (0x40a00000), expected 5.5 (0x40b00000)");
  memory[3] = -0.0F;
  EXPECT_TRUE(find_difference(actual, 1, std::vector<float>{0, 5, 6}).has_value());
}

TEST(Rows, ExpertsDifferAndMayWorkInPlace) {
  std::vector<float> row(50);
  row_values({1, 0, 0}, DType::bf16, row);
  std::vector<float> a(50);
  std::vector<float> b(50);
  expert_values(3, DType::bf16, row, a);
  expert_values(4, DType::bf16, row, b);
  EXPECT_NE(a, b);
  std::vector<std::byte> bytes(100);
  const Matrix x{bytes.data(), DType::bf16, 1, 50};
  fill_row({1, 0, 0}, x);
  apply_expert(3, x, x, 0);
  EXPECT_FALSE(find_difference(x, 0, a).has_value());
}

TEST(Routings, AreWhatTheirSpecSays) {
  const RoutingSpec plain{.num_experts = 16, .num_topk = 4};
  const RoutingData data = make_routing(plain, 400, 1, 0);
  for (std::int64_t token = 0; token < 400; ++token) {
    std::set<std::int64_t> ids;
    float sum = 0;
    for (int slot = 0; slot < 4; ++slot) {
      ids.insert(data.view().expert(token, slot));
      sum += data.view().weight(token, slot);
    }
    EXPECT_EQ(ids.size(), 4U) << "an expert came twice";
    EXPECT_NEAR(sum, 1.0F, 1e-5F);
  }
  EXPECT_EQ(data.topk_idx, make_routing(plain, 400, 1, 0).topk_idx);
  EXPECT_NE(data.topk_idx, make_routing(plain, 400, 1, 1).topk_idx);
  EXPECT_NE(data.topk_idx, make_routing(plain, 400, 2, 0).topk_idx);

  std::map<std::int32_t, int> load;
  const RoutingSpec skewed{.num_experts = 16, .num_topk = 1, .zipf = 1.0};
  for (const std::int32_t id : make_routing(skewed, 20000, 1, 0).topk_idx) ++load[id];
  std::multiset<int> loads;
  for (const auto& [id, count] : load) loads.insert(count);
  // Harmonic number of 16 is 3.38: the most popular expert gets 29.6 %, the least 1.85 %.
  EXPECT_NEAR(*loads.rbegin(), 5916, 300);
  EXPECT_NEAR(*loads.begin(), 370, 100);

  const RoutingSpec wild{.num_experts = 16, .num_topk = 4, .none_share = 0.5, .repeat_share = 0.5,
                         .weights = WeightKind::odd};
  const RoutingData spoiled = make_routing(wild, 400, 1, 0);
  const auto count_of = [&](auto&& is) {
    return std::count_if(spoiled.topk_weights.begin(), spoiled.topk_weights.end(), is);
  };
  EXPECT_NEAR(std::count(spoiled.topk_idx.begin(), spoiled.topk_idx.end(), -1), 800, 100);
  EXPECT_GT(count_of([](float w) { return w == 0; }), 50);
  EXPECT_GT(count_of([](float w) { return w != 0 && std::fabs(w) < 1e-38F; }), 50);
  EXPECT_GT(count_of([](float w) { return w > 1; }), 50);
}

TEST(Programs, CollectTheErrorsOfAllRanksAndNeverHang) {
  for (const TransportKind kind : {TransportKind::threads, TransportKind::stepped}) {
    ProgramOptions options{.transport = kind, .topology = Topology::uniform(2, 2)};
    options.step_limit = 20000;
    const ProgramResult mixed = run_program(options, [](RankContext& context) -> Task {
      co_await meet();
      co_await pause(10);
      if (context.rank() == 2) throw std::runtime_error("two is wrong");
      co_await meet();  // rank 2 is not waited for
    });
    EXPECT_FALSE(mixed.ok());
    EXPECT_TRUE(mixed.hang.empty()) << mixed.hang;
    EXPECT_EQ(mixed.describe(), "rank 2 ended with: two is wrong\n");
  }
  ProgramOptions options{.transport = TransportKind::stepped,
                         .topology = Topology::uniform(1, 2)};
  options.step_limit = 1000;
  const ProgramResult endless = run_program(options, [](RankContext& context) -> Task {
    context.at("the endless part");
    if (context.rank() == 1) co_await pause(1'000'000);
  });
  EXPECT_FALSE(endless.ok());
  EXPECT_NE(endless.hang.find("rank 1: is suspended, 0 calls ended, the endless part"),
            std::string::npos)
      << endless.hang;
}

}  // namespace
}  // namespace ferry::support
