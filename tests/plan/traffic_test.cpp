// Framing, fragments and traffic on lanes written by hand.

#include "plan/traffic.hpp"

#include <gtest/gtest.h>

#include <limits>

namespace ferry::plan {
namespace {

TEST(Framing, a_fragment_holds_at_least_one_row) {
  EXPECT_EQ(make_framing(100, 96, 1096).rows_per_fragment, 10U);
  EXPECT_EQ(make_framing(100, 96, 1095).rows_per_fragment, 9U);
  EXPECT_EQ(make_framing(100, 96, 195).rows_per_fragment, 1U);
  EXPECT_EQ(make_framing(5000, 96, 1096).rows_per_fragment, 1U);
  EXPECT_EQ(make_framing(100, 96, 0).rows_per_fragment, 1U);
  EXPECT_EQ(make_framing(1, 0, std::uint64_t{1} << 40).rows_per_fragment,
            std::numeric_limits<std::uint32_t>::max());
}

TEST(Framing, a_range_fills_eight_fragments_of_the_longer_rows_forward) {
  const Framing quantised = make_framing(516, 72, 61440);
  const Framing plain = make_framing(1024, 72, 61440);
  EXPECT_EQ(default_range_tokens(quantised, quantised), 8 * 118U);
  EXPECT_EQ(default_range_tokens(quantised, plain), 8 * 59U);
  EXPECT_EQ(default_range_tokens(plain, quantised), 8 * 59U);
}

Lane lane_of(std::vector<std::uint32_t> range_begin) {
  Lane lane;
  lane.tokens.resize(range_begin.back());
  lane.range_begin = std::move(range_begin);
  return lane;
}

TEST(Fragments, are_cut_at_ranges_and_skip_empty_ones) {
  const Lane lane = lane_of({0, 0, 5, 5, 6, 6});
  std::vector<std::vector<std::uint64_t>> seen;
  for (FragmentCursor at(lane, 2); !at.at_end(); at.advance()) {
    const Fragment& now = at.current();
    seen.push_back({now.index, now.range, now.first, now.count});
  }
  EXPECT_EQ(seen, (std::vector<std::vector<std::uint64_t>>{
                      {0, 1, 0, 2}, {1, 1, 2, 2}, {2, 1, 4, 1}, {3, 3, 5, 1}}));
  EXPECT_EQ(num_fragments(lane, 2), 4U);
  EXPECT_EQ(fragments_through(lane, 2, 0), 0U);
  EXPECT_EQ(fragments_through(lane, 2, 1), 3U);
  EXPECT_EQ(fragments_through(lane, 2, 2), 3U);
  EXPECT_EQ(fragments_through(lane, 2, 99), 4U);
  EXPECT_EQ(lane_bytes(lane, {.row_bytes = 10, .header_bytes = 3, .rows_per_fragment = 2}), 72U);
}

TEST(Fragments, a_lane_without_items_has_none) {
  for (const Lane& lane : {Lane{}, lane_of({0, 0, 0})}) {
    EXPECT_TRUE(FragmentCursor(lane, 4).at_end());
    EXPECT_EQ(num_fragments(lane, 4), 0U);
    EXPECT_EQ(lane_bytes(lane, {.row_bytes = 10, .header_bytes = 3, .rows_per_fragment = 4}), 0U);
  }
}

TEST(Fragments, bytes_beyond_32_bits) {
  const Lane lane = lane_of({0, 3, 8});
  const Framing framing{.row_bytes = 3'000'000'000, .header_bytes = 96, .rows_per_fragment = 1};
  EXPECT_EQ(lane_bytes(lane, framing), 24'000'000'768U);
}

TEST(Traffic, counts_what_the_rank_itself_sends) {
  const Topology topology = Topology::from_map({0, 0, 0, 1}, {0, 0, 1, 0});
  RankPlan plan;
  plan.rank = 0;
  plan.rows_to = {5, 6, 7};
  plan.outgoing.push_back({lane_of({0, 3}), {}, {}});
  // 9 arrived, 2 go back, with 5 numbers.
  plan.landing.push_back({lane_of({0, 9}), {lane_of({0, 2})}, lane_of({0, 5})});
  const RankTraffic total =
      traffic(plan, topology,
              {.out = {.row_bytes = 10, .header_bytes = 1},
               .back = {.row_bytes = 20, .header_bytes = 1, .rows_per_fragment = 8},
               .grad_out = {.row_bytes = 11, .header_bytes = 1, .rows_per_fragment = 2},
               .grad_back = {.row_bytes = 30, .header_bytes = 1, .rows_per_fragment = 1},
               .values = {.row_bytes = 4, .header_bytes = 1, .rows_per_fragment = 4}});
  EXPECT_EQ(total.rows_out, 3U);
  EXPECT_EQ(total.bytes_out, 33U);
  EXPECT_EQ(total.rows_back, 2U);
  EXPECT_EQ(total.bytes_back, 41U);
  EXPECT_EQ(total.bytes_grad_out, 35U);
  EXPECT_EQ(total.bytes_grad_back, 62U);
  EXPECT_EQ(total.bytes_values, 22U);
  EXPECT_EQ(total.inter_socket_rows, 7U);
}

TEST(Traffic, bound_counts_tokens_of_other_nodes) {
  std::vector<Membership> own(3);
  own[0].tokens = {0, 1};
  own[1].tokens = {1, 2, 3};
  own[2].tokens = {3};
  EXPECT_EQ(bound_rows(own, 1), 3U);
  EXPECT_EQ(bound_rows(own, 0), 4U);
}

}  // namespace
}  // namespace ferry::plan
