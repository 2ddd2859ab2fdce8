// Routings that are refused, with their whole text, and how a routing is split by node.

#include "plan/membership.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace ferry::plan {
namespace {

using Ids = std::vector<std::int64_t>;
using Ids32 = std::vector<std::int32_t>;
using Weights = std::vector<float>;

std::string error_of(const Routing& routing, int num_experts = 64, int rank = 2) {
  return find_routing_error(routing, num_experts, rank).value_or("");
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(RoutingError, an_id_outside_is_named_with_row_column_value_and_range) {
  Ids ids(500 * 8, 5);
  ids[412 * 8 + 3] = 64;
  ids[413 * 8] = -7;  // the first one is named
  EXPECT_EQ(error_of(Routing::of(500, 8, ids)),
            "plan: topk_idx[412,3] = 64 on rank 2 is not an expert; allowed: -1 (none) or 0..63, "
            "because num_experts = 64; fix: write -1 into slots without an expert, or make the "
            "placement with all experts of the router");
}

TEST(RoutingError, every_bad_id_of_both_widths_is_found) {
  for (const std::int64_t bad :
       {std::int64_t{-2}, std::int64_t{64}, std::int64_t{2147483647}, std::int64_t{-2147483648LL},
        std::int64_t{1} << 32, std::numeric_limits<std::int64_t>::max(),
        std::numeric_limits<std::int64_t>::min()}) {
    const Ids ids{0, -1, 63, bad};
    EXPECT_TRUE(has(error_of(Routing::of(2, 2, ids)), "topk_idx[1,1] = " + std::to_string(bad)));
    if (bad != static_cast<std::int32_t>(bad)) continue;
    const Ids32 ids32{0, -1, 63, static_cast<std::int32_t>(bad)};
    EXPECT_TRUE(has(error_of(Routing::of(2, 2, ids32)), "topk_idx[1,1] = " + std::to_string(bad)));
  }
  EXPECT_EQ(error_of(Routing::of(2, 2, Ids{0, -1, 63, 62})), "");
  EXPECT_TRUE(has(error_of(Routing::of(1, 1, Ids{1}), 1), "0..0, because num_experts = 1"));
}

TEST(RoutingError, nan_is_refused_and_infinity_is_not) {
  const Ids32 ids{0, 1, 2, -1};
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(error_of(Routing::of(2, 2, ids, Weights{0, -inf, inf, 1e-42F})), "");
  EXPECT_TRUE(has(error_of(Routing::of(2, 2, ids, Weights{0, 1, NAN, 1})),
                  "plan: topk_weights[1,0] = nan on rank 2; allowed: any number but NaN"));
  EXPECT_TRUE(has(error_of(Routing::of(2, 2, ids, Weights{0, 1, 1, NAN})), "topk_weights[1,1]"));
}

TEST(RoutingError, infinities_of_both_signs_for_one_expert_are_refused) {
  const std::vector<std::int32_t> ids{0, 3, 0, -1, 2, 2};
  const auto refused = [&](const Weights& weights) {
    return has(error_of(Routing::of(2, 3, ids, weights)), "the weights of token");
  };
  EXPECT_TRUE(refused({INFINITY, 1, -INFINITY, 0, 1, 1}));
  EXPECT_TRUE(refused({0, 0, 0, INFINITY, INFINITY, -INFINITY}));
  EXPECT_FALSE(refused({INFINITY, -INFINITY, INFINITY, 0, 1, 1}));  // one sign for each expert
  // Finite weights whose sum overflows, then the other infinity: the third slot makes the NaN.
  const std::vector<std::int32_t> same{1, 1, 1};
  EXPECT_TRUE(has(error_of(Routing::of(1, 3, same, Weights{3e38F, 3e38F, -INFINITY})), "expert 1"));
  EXPECT_FALSE(has(error_of(Routing::of(1, 3, same, Weights{3e38F, 3e38F, INFINITY})), "expert"));
}

TEST(RoutingError, shapes) {
  const Ids32 ids(6, 0);
  const Ids ids64(6, 0);
  EXPECT_TRUE(has(error_of({.num_tokens = 3, .num_topk = 2}), "none of topk_idx32"));
  EXPECT_TRUE(has(
      error_of({.num_tokens = 3, .num_topk = 2, .topk_idx32 = ids, .topk_idx64 = ids64}), "both"));
  EXPECT_TRUE(has(error_of(Routing::of(4, 2, ids)),
                  "topk_idx has 6 values on rank 2; allowed: at "
                  "least 8 (num_tokens 4 x num_topk 2)"));
  EXPECT_TRUE(has(error_of(Routing::of(3, 2, ids, Weights(5))), "topk_weights has 5 values"));
  for (const int num_topk : {-1, 0, 65}) {
    EXPECT_TRUE(has(error_of(Routing::of(0, num_topk, ids)), "allowed: 1..64"));
  }
  EXPECT_EQ(error_of(Routing::of(1, 64, Ids(64, 3))), "");
  EXPECT_TRUE(has(error_of(Routing::of(-1, 2, ids)), "num_tokens = -1"));
}

TEST(RoutingError, token_numbers_stay_below_32_bits) {
  const std::int64_t limit = (std::int64_t{1} << 32) / 8;
  EXPECT_TRUE(has(error_of(Routing::of(limit, 8, Ids(8))), "allowed: below 536870912"));
  EXPECT_TRUE(has(error_of(Routing::of(limit - 1, 8, Ids(8))), "topk_idx has 8 values"));
  EXPECT_TRUE(has(error_of(Routing::of(std::numeric_limits<std::int64_t>::max(), 64, Ids(8))),
                  "allowed: below 67108864"));
}

TEST(RoutingError, no_tokens_need_no_arrays_and_rows_beyond_num_tokens_are_not_read) {
  EXPECT_EQ(error_of({.num_tokens = 0, .num_topk = 8}), "");
  EXPECT_EQ(error_of(Routing::of(1, 2, Ids{0, 1, 999, 999}, Weights{1, 1, NAN, NAN})), "");
  EXPECT_EQ(error_of(Routing::of(0, 2, Ids{999, 999})), "");
}

TEST(SplitByNode, repeats_are_one_entry_with_weights_summed_in_slot_order) {
  const Topology topology = Topology::uniform(2, 1);
  const ExpertIndex experts(topology, Placement::from_map({0, 0, 1, 1}));
  // 1e8 + 1 - 1e8 is 0 in slot order and 1 in any order that adds 1 last.
  const Ids32 ids{3, 0, 3, 2, 3, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1};
  const Weights weights{1e8F, 0.5F, 1, 2, -1e8F, 9, 9, 9, 9, 9, 1, 1, 1, 1, 1};
  const auto split = split_by_node(Routing::of(3, 5, ids, weights), experts, topology);
  ASSERT_EQ(split.size(), 2U);
  EXPECT_EQ(split[0], (Membership{.num_tokens = 3,
                                  .tokens = {0, 2},
                                  .entry_begin = {0, 1, 2},
                                  .columns = {0, 1},
                                  .weights = {0.5F, 5}}));
  EXPECT_EQ(split[1], (Membership{.num_tokens = 3,
                                  .tokens = {0},
                                  .entry_begin = {0, 2},
                                  .columns = {1, 0},
                                  .weights = {0, 2}}));
  EXPECT_EQ(count_columns(split[1], 2), (std::vector<std::uint32_t>{1, 1}));
  EXPECT_EQ(count_columns(split[0], 3), (std::vector<std::uint32_t>{1, 1, 0}));
}

TEST(SplitByNode, zero_weight_is_still_a_member_and_absent_weights_are_equal) {
  const Topology topology = Topology::single_node(1);
  const ExpertIndex experts(topology, Placement::contiguous(4, 1));
  const Ids ids{2, 1};
  const auto zero = split_by_node(Routing::of(1, 2, ids, Weights{0, 1e-42F}), experts, topology);
  EXPECT_EQ(zero[0].columns, (std::vector<std::uint16_t>{2, 1}));
  EXPECT_EQ(zero[0].weights, (Weights{0, 1e-42F}));
  EXPECT_EQ(split_by_node(Routing::of(1, 2, ids), experts, topology)[0].weights,
            (Weights{0.5F, 0.5F}));
}

TEST(SplitByNode, widths_of_ids_give_the_same) {
  const Topology topology = Topology::from_sizes({1, 2});
  const ExpertIndex experts(topology, Placement::contiguous(5, 3));
  const Ids ids{4, -1, 2, 2, 0, 3};
  const Ids32 ids32(ids.begin(), ids.end());
  EXPECT_EQ(split_by_node(Routing::of(2, 3, ids), experts, topology),
            split_by_node(Routing::of(2, 3, ids32), experts, topology));
}

TEST(SplitByNode, no_tokens_give_an_empty_membership_per_node) {
  const Topology topology = Topology::uniform(3, 1);
  const ExpertIndex experts(topology, Placement::contiguous(2, 3));
  const auto split = split_by_node({.num_tokens = 0, .num_topk = 8}, experts, topology);
  EXPECT_EQ(split, std::vector<Membership>(3));
}

}  // namespace
}  // namespace ferry::plan
