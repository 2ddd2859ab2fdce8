// The oracle of layouts and weight modes by itself, against numbers worked out by hand, and the
// support code that stands in for the caller's experts against the oracle's.

#include <algorithm>
#include <limits>

#include <gtest/gtest.h>

#include "constant_model.hpp"
#include "support/numbers.hpp"
#include "support/reference.hpp"
#include "support/rows.hpp"

namespace ferry::support {
namespace {

constexpr float kBig = 16777216.0F;  // 2^24: adding 1 to it twice gives less than adding 2

/// Nodes {0, 1} and {2, 3}; rank 0 holds experts 0, 1, rank 1 holds 2, rank 2 holds 3, 4, rank 3
/// holds 5.
Group group_of(Layout layout, WeightMode weights) {
  return {.topology = Topology::uniform(2, 2),
          .placement = Placement::from_map({0, 0, 1, 2, 2, 3}),
          .hidden = 1,
          .layout = layout,
          .weights = weights};
}

/// One token on rank `home`, none elsewhere.
struct Token {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  int home = 0;

  std::vector<Routing> routing() const {
    const auto num_topk = static_cast<int>(ids.size());
    std::vector<Routing> all(4);
    all[static_cast<std::size_t>(home)] =
        Routing::of(1, num_topk, std::span<const std::int32_t>(ids), weights);
    return all;
  }
};

float out_of(const Group& group, const std::vector<float>& y, const Token& token) {
  float value = -1;
  Reference(group, constant_model(y), token.routing()).out(token.home, 0, std::span(&value, 1));
  return value;
}

float rounded(float value) { return from_bits(DType::bf16, to_bits(DType::bf16, value)); }

TEST(OracleModes, TokenMajorSumsRanksInOrderOnTheHomeNodeToo) {
  const Group group = group_of(Layout::token_major, WeightMode::none);
  // Slots name rank 1 first; rank 0 stands first all the same, and what it hands over is one term.
  const Token token{{2, 0, 5, 1}, {9, 9, 9, 9}, 1};
  EXPECT_EQ(out_of(group, {1, 1, kBig, 0, 0, 1}, token), ((1.0F + 1.0F) + kBig) + 1.0F);
  EXPECT_NE(((1.0F + 1.0F) + kBig) + 1.0F, ((kBig + 1.0F) + 1.0F) + 1.0F);
  // The same in expert_major: on the home node slots count.
  const Group by_expert = group_of(Layout::expert_major, WeightMode::none);
  EXPECT_EQ(out_of(by_expert, {1, 1, kBig, 0, 0, 1}, token), ((kBig + 1.0F) + 1.0F) + 1.0F);
}

TEST(OracleModes, WeightsAtTheExpertAreRoundedToTheDTypeBeforeTheSum) {
  Group group = group_of(Layout::expert_major, WeightMode::at_expert);
  group.dtype = DType::bf16;
  const Token token{{0, 1, 3, 4}, {0.3F, 0.7F, 0.9F, 1.1F}, 0};
  const std::vector<float> y{1.5F, 1.25F, 0, 1.75F, 1.125F};
  const float home = rounded(0.3F * 1.5F) + rounded(0.7F * 1.25F);
  const float away = rounded(0.9F * 1.75F) + rounded(1.1F * 1.125F);
  EXPECT_EQ(out_of(group, y, token), rounded(home + away));
  // token_major: the sum of a rank's experts is rounded, not each of them.
  group.layout = Layout::token_major;
  const float rank_0 = rounded(0.3F * 1.5F + 0.7F * 1.25F);
  const float rank_2 = rounded(0.9F * 1.75F + 1.1F * 1.125F);
  EXPECT_EQ(out_of(group, y, token), rounded(rank_0 + rank_2));
}

TEST(OracleModes, ARepeatedExpertCountsOnceUnlessWeightsAdd) {
  const std::vector<float> y{3, 5, 0, 7, 0, 0};
  const Token token{{3, 0, 3, 3}, {0.5F, 0.25F, 2, 4}, 0};
  for (const Layout layout : {Layout::expert_major, Layout::token_major}) {
    EXPECT_EQ(out_of(group_of(layout, WeightMode::none), y, token), 3.0F + 7.0F);
    EXPECT_EQ(out_of(group_of(layout, WeightMode::at_expert), y, token), 0.75F + 6.5F * 7.0F);
  }
  const Reference reference(group_of(Layout::expert_major, WeightMode::at_expert),
                            constant_model(y), token.routing());
  const std::vector<Term> terms = reference.terms(0, 0, 2);
  ASSERT_EQ(terms.size(), 1U);
  EXPECT_EQ(terms[0].slot, 0);
  EXPECT_EQ(terms[0].weight, 6.5F);
}

TEST(OracleModes, WhatCrossesIsRoundedOnce) {
  const std::vector<float> y{1.001F, 0, 0, 1.003F, 1.0041F, 1.0052F};
  const Token token{{0, 3, 4, 5}, {1, 1, 1, 1}, 0};
  Group group = group_of(Layout::token_major, WeightMode::none);
  group.wire_combine = WireFormat::bf16;
  const float rank_2 = y[3] + y[4];
  group.strategy = Strategy::rank_dedup;
  EXPECT_EQ(out_of(group, y, token), y[0] + (rounded(rank_2) + rounded(y[5])));
  for (const Strategy strategy : {Strategy::node_gather, Strategy::node_dedup}) {
    group.strategy = strategy;
    EXPECT_EQ(out_of(group, y, token), y[0] + rounded(rank_2 + y[5]));
  }
  group.layout = Layout::expert_major;
  EXPECT_EQ(out_of(group, y, token), y[0] + rounded((y[3] + y[4]) + y[5]));
  group.strategy = Strategy::flat;
  EXPECT_EQ(out_of(group, y, token), y[0] + ((rounded(y[3]) + rounded(y[4])) + rounded(y[5])));
  group.weights = WeightMode::at_expert;
  const Token weighted{{0, 3, -1, 5}, {0.3F, 0.7F, 0, 0.9F}, 0};
  EXPECT_EQ(out_of(group, y, weighted),
            0.3F * y[0] + (rounded(0.7F * y[3]) + rounded(0.9F * y[5])));
}

TEST(OracleModes, ASumOfOneMinusZeroIsMinusZero) {
  const std::vector<float> y{-0.0F, 0, 0, 0, 0, 0};
  const Token token{{0, -1, -1, -1}, {1, 1, 1, 1}, 3};
  for (const Layout layout : {Layout::expert_major, Layout::token_major}) {
    const float out = out_of(group_of(layout, WeightMode::none), y, token);
    EXPECT_EQ(to_bits(DType::f32, out), 0x80000000U);
  }
}

TEST(OracleModes, RowsOfATokenComeOnceOrAlignedByExpert) {
  const std::vector<std::int32_t> ids_0{1, 0, -1, 3, 1, 1};
  const std::vector<std::int32_t> ids_2{-1, 1};
  std::vector<Routing> routing(4);
  routing[0] = Routing::of(3, 2, std::span<const std::int32_t>(ids_0));
  routing[2] = Routing::of(1, 2, std::span<const std::int32_t>(ids_2));
  Group group = group_of(Layout::token_major, WeightMode::none);
  const std::vector<RowOrigin> once{{-1, 0, 0}, {-1, 0, 2}, {-1, 2, 0}};
  EXPECT_EQ(Reference(group, constant_model({}), routing).rows_of(0), once);

  group.layout = Layout::expert_major;
  group.row_alignment = 4;
  const RowOrigin none;
  const std::vector<RowOrigin> aligned{{0, 0, 0}, none,      none,      none,
                                       {1, 0, 0}, {1, 0, 2}, {1, 2, 0}, none};
  const Reference reference(group, constant_model({}), routing);
  EXPECT_EQ(reference.rows_of(0), aligned);
  EXPECT_EQ(reference.rows_of(1), std::vector<RowOrigin>{}) << "an expert without rows takes none";
  float value = 7;
  reference.row(0, none, std::span(&value, 1));
  EXPECT_EQ(to_bits(DType::f32, value), 0U);
}

TEST(SupportModes, ExpertsOfARowAreSummedAsTheOracleDoes) {
  // What a caller makes with apply_experts is what the oracle expects of a rank.
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Group group = group_of(Layout::token_major, WeightMode::at_expert);
    group.hidden = 40;
    group.dtype = dtype;
    const Token token{{4, -1, 3, 4}, {0.3F, 9, -0.7F, 0.4F}, 2};
    std::vector<float> expected(40);
    Reference(group, hashed_model(5, dtype), token.routing()).out(2, 0, expected);
    std::vector<std::byte> bytes(40 * element_bytes(dtype));
    const Matrix row{bytes.data(), dtype, 1, 40};
    fill_rows(5, 2, row);
    apply_experts({{4, 3}, {0.3F + 0.4F, -0.7F}}, row, row, 0);
    EXPECT_FALSE(find_difference(row, 0, expected).has_value()) << to_string(dtype);
  }
}

TEST(SupportModes, ExtraBytesDifferByEverything) {
  std::vector<std::byte> extra(5 * 12);
  fill_extra(9, 3, extra, 12);
  EXPECT_EQ(extra[2 * 12 + 7], extra_byte({9, 3, 2}, 7));
  const auto first = extra.begin();
  for (int token = 1; token < 5; ++token) {
    EXPECT_FALSE(std::equal(first, first + 12, first + 12 * token)) << "token " << token;
  }
  std::vector<std::byte> other(extra.size());
  fill_extra(10, 3, other, 12);
  EXPECT_NE(extra, other) << "another seed";
  fill_extra(9, 2, other, 12);
  EXPECT_NE(extra, other) << "another rank";
}

}  // namespace
}  // namespace ferry::support
