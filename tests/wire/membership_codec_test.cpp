// Memberships come back bit by bit in every encoding that can hold them, in the size that was
// announced.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "samples.hpp"

namespace ferry::wire::test {
namespace {

constexpr std::uint64_t kCodecSeed = 31337;

void expect_round_trip(const plan::Membership& membership, const MembershipLimits& limits,
                       IndexEncoding encoding) {
  std::vector<std::byte> bytes(3, std::byte{0x55});  // appended to, not replaced
  const std::uint64_t own = encode_membership(membership, limits.form, encoding, bytes);
  const std::uint64_t entry_bytes = (limits.form.weights ? 4 : 0) + (limits.form.slots ? 1 : 0);
  ASSERT_EQ(own, index_bytes(membership, limits.form, encoding));
  ASSERT_EQ(bytes.size(), 3 + own + membership.num_entries() * entry_bytes);
  ASSERT_EQ(bytes[2], std::byte{0x55});
  const ExactBytes exact(std::span<const std::byte>(bytes).subspan(3));
  static plan::Membership decoded;  // over the one before, whatever it was
  const auto error = decode_membership(exact.span(), limits, decoded);
  ASSERT_FALSE(error) << *error;
  EXPECT_EQ(decoded.num_tokens, membership.num_tokens);
  EXPECT_EQ(decoded.tokens, membership.tokens);
  EXPECT_EQ(decoded.entry_begin, membership.entry_begin);
  EXPECT_EQ(decoded.columns, membership.columns);
  EXPECT_EQ(decoded.slots, membership.slots);
  ASSERT_EQ(decoded.weights.size(), membership.weights.size());
  // Bits, so that -0 and 0 are not the same.
  EXPECT_TRUE(decoded.weights.empty() ||
              std::memcmp(decoded.weights.data(), membership.weights.data(),
                          decoded.weights.size() * sizeof(float)) == 0);
}

void expect_round_trips(const plan::Membership& membership, const MembershipLimits& limits) {
  for (const IndexEncoding encoding : all_encodings()) {
    SCOPED_TRACE(to_text(encoding));
    if (can_hold(encoding.experts, membership, limits.form)) {
      expect_round_trip(membership, limits, encoding);
    }
  }
}

/// Both in the order of weights, as bitmasks need it, and in another.
void expect_random_round_trip(MembershipShape shape, std::mt19937_64& rng) {
  SCOPED_TRACE(::testing::Message() << "seed " << kCodecSeed << " num_tokens " << shape.num_tokens
                                    << " num_topk " << shape.num_topk << " num_columns "
                                    << shape.num_columns << " density " << shape.density);
  for (const bool ordered : {false, true}) {
    shape.ordered = ordered;
    const plan::Membership membership = random_membership(shape, rng);
    if (ordered) {
      EXPECT_TRUE(can_hold(ListEncoding::bitmask, membership, shape.form()));
    }
    expect_round_trips(membership, shape.limits());
  }
}

TEST(MembershipCodec, EveryTopk) {
  std::mt19937_64 rng(kCodecSeed);
  for (int num_topk = 1; num_topk <= 64; ++num_topk) {
    for (const double density : {0.02, 0.5, 1.0}) {
      expect_random_round_trip({.num_tokens = 257, .num_topk = num_topk, .num_columns = 64,
                                .density = density}, rng);
    }
  }
}

TEST(MembershipCodec, SlotsAndWeightsAreThereWhenAskedFor) {
  std::mt19937_64 rng(kCodecSeed);
  for (const int num_topk : {1, 2, 8, 64}) {
    for (const bool slots : {false, true}) {
      for (const bool weights : {false, true}) {
        expect_random_round_trip({.num_tokens = 100, .num_topk = num_topk, .num_columns = 300,
                                  .slots = slots, .weights = weights}, rng);
      }
    }
  }
}

TEST(MembershipCodec, EveryTokenCount) {
  std::mt19937_64 rng(kCodecSeed);
  for (std::uint64_t num_tokens = 0; num_tokens <= 200; ++num_tokens) {
    for (const double density : {0.0, 0.01, 0.1, 0.9, 1.0}) {
      expect_random_round_trip({.num_tokens = num_tokens, .num_topk = 4, .num_columns = 9,
                                .density = density}, rng);
    }
  }
}

TEST(MembershipCodec, EveryColumnWidth) {
  std::mt19937_64 rng(kCodecSeed);
  for (const int num_columns : {0, 1, 2, 255, 256, 257, 300, 2048, 65536}) {
    expect_random_round_trip({.num_tokens = 500, .num_topk = 8, .num_columns = num_columns}, rng);
  }
}

TEST(MembershipCodec, ManyTokens) {
  std::mt19937_64 rng(kCodecSeed);
  for (const double density : {0.0001, 0.05, 0.2, 0.997, 1.0}) {
    expect_random_round_trip({.num_tokens = 65536, .num_topk = 8, .num_columns = 128,
                              .density = density}, rng);
  }
}

TEST(MembershipCodec, OneTokenAnywhere) {
  for (const std::uint32_t token : {0U, 1U, 127U, 128U, 16511U, 16512U, 4294967293U, 4294967294U}) {
    const plan::Membership membership{.num_tokens = 4294967295, .tokens = {token},
                                      .entry_begin = {0, 1}, .columns = {2}, .weights = {-0.0F}};
    for (const ListEncoding experts : kListEncodings) {
      expect_round_trip(membership, {4294967295, 1, {3}}, {ListEncoding::raw, experts});
      expect_round_trip(membership, {4294967295, 1, {3}}, {ListEncoding::packed, experts});
      expect_round_trip(membership, {4294967295, 1, {3}}, {ListEncoding::runs, experts});
    }
  }
}

TEST(MembershipCodec, WeightsKeepTheirBits) {
  using Limits = std::numeric_limits<float>;
  const plan::Membership membership{
      .num_tokens = 1, .tokens = {0}, .entry_begin = {0, 6}, .columns = {5, 4, 3, 2, 1, 0},
      .weights = {0.0F, -0.0F, 0.1F, Limits::denorm_min(), Limits::infinity(),
                  -Limits::infinity()}};
  expect_round_trips(membership, {1, 6, 6});
}

/// Every `step`-th token, from the first on, with one entry each.
plan::Membership every(std::uint32_t step, std::uint32_t num_tokens) {
  plan::Membership membership = empty_membership(num_tokens);
  for (std::uint32_t token = step - 1; token < num_tokens; token += step) {
    membership.tokens.push_back(token);
    membership.columns.push_back(0);
    membership.weights.push_back(1.0F);
    membership.entry_begin.push_back(static_cast<std::uint32_t>(membership.tokens.size()));
  }
  return membership;
}

std::uint64_t bytes_for(double bits) { return static_cast<std::uint64_t>(std::ceil(bits / 8)); }

// What docs/wire-formats.md says each takes, computed another way.
TEST(MembershipCodec, TokenListsTakeWhatIsStated) {
  for (const std::uint32_t num_tokens : {1U, 64U, 800U, 4096U, 70'000U}) {
    for (const std::uint32_t step : {1U, 2U, 7U, 8U, 9U, 20U, 128U, 129U, 1000U}) {
      const plan::Membership membership = every(step, num_tokens);
      const MembershipForm form{.num_columns = 1};
      const std::uint64_t n = membership.tokens.size();
      const std::uint64_t count_bytes = n < 128 ? 1 : n < 16384 ? 2 : 3;
      const auto lists = [&](ListEncoding tokens) {
        return index_bytes(membership, form, {tokens, ListEncoding::packed}) -
               index_bytes(membership, form, {ListEncoding::bitmask, ListEncoding::packed}) +
               (num_tokens + 7) / 8;
      };
      SCOPED_TRACE(::testing::Message() << num_tokens << " tokens, every " << step);
      EXPECT_EQ(index_bytes(membership, form, {ListEncoding::bitmask, ListEncoding::packed}),
                2 + (num_tokens + 7) / 8 + (n == 0 ? 0 : 1 + (n + 7) / 8));
      EXPECT_EQ(lists(ListEncoding::raw), count_bytes + n * (num_tokens > 65536 ? 4 : 2));
      double low = 0;
      while (n != 0 && static_cast<double>(n) * std::exp2(low + 1) <= num_tokens) ++low;
      const double upper =
          n == 0 ? 0 : static_cast<double>(n) + std::floor((num_tokens - 1) / std::exp2(low));
      EXPECT_EQ(lists(ListEncoding::packed),
                count_bytes + bytes_for(static_cast<double>(n) * low) + bytes_for(upper));
      const auto gamma = [](double value) {
        return value > 0 ? 2 * std::floor(std::log2(value)) + 1 : 0.0;
      };
      const double tail = num_tokens - static_cast<double>(n) * step;
      const double run_bits = step == 1 ? gamma(num_tokens)
                                        : static_cast<double>(n) * (gamma(step - 1) + 1) +
                                              gamma(tail);
      EXPECT_EQ(lists(ListEncoding::runs), bytes_for(1 + run_bits));
      expect_round_trips(membership, {num_tokens, 1, 1});
    }
  }
}

TEST(MembershipCodec, CountsTakeTheSmallerForm) {
  for (const std::uint32_t most : {1U, 2U, 8U, 9U, 15U, 16U, 64U}) {
    for (const std::uint32_t least : {1U, most}) {
      plan::Membership membership = empty_membership(10);  // nine tokens with least, one with most
      for (std::uint32_t token = 0; token < 10; ++token) {
        membership.tokens.push_back(token);
        for (std::uint32_t i = 0; i < (token == 4 ? most : least); ++i) {
          membership.columns.push_back(static_cast<std::uint16_t>(i));
        }
        membership.entry_begin.push_back(static_cast<std::uint32_t>(membership.columns.size()));
      }
      const std::uint64_t entries = 9 * least + most;
      membership.weights.assign(entries, 1.0F);
      const double width = std::ceil(std::log2(most));
      EXPECT_EQ(index_bytes(membership, {.num_columns = 64},
                            {ListEncoding::bitmask, ListEncoding::packed}),
                2 + 2 + 1 + bytes_for(std::min(10 * width, static_cast<double>(entries))) +
                    bytes_for(static_cast<double>(entries) * 6))
          << least << " and " << most;
      expect_round_trips(membership, {10, 64, 64});
    }
  }
}

TEST(MembershipCodec, RepeatedExpertsAreListedOnce) {
  std::mt19937_64 rng(kCodecSeed);
  for (const double repeats : {0.1, 0.9, 0.999, 1.0}) {
    for (const bool slots : {false, true}) {
      const MembershipShape shape{.num_tokens = 3000, .num_topk = 6, .num_columns = 40,
                                  .density = 0.7, .slots = slots, .repeats = repeats};
      expect_random_round_trip(shape, rng);
    }
  }
  // 1000 tokens with the same one of 64 experts: two runs of 19 bits, a byte that says that counts
  // take no bits, and 6 bits.
  const plan::Membership same = random_membership(
      {.num_tokens = 1000, .num_topk = 1, .num_columns = 64, .density = 1, .repeats = 1}, rng);
  EXPECT_EQ(index_bytes(same, {.num_columns = 64}, {ListEncoding::runs, ListEncoding::runs}),
            2U + 3U + 3U + 1U + 0U + 1U);
}

TEST(MembershipCodec, WhatCanHoldAList) {
  plan::Membership membership = empty_membership(1);
  membership.tokens = {0};
  membership.entry_begin = {0, 3};
  membership.columns = {2, 4, 3};
  membership.weights = {0.5F, 0.25F, 0.25F};
  const MembershipForm weighted{.num_columns = 6};
  const MembershipForm bare{.num_columns = 6, .weights = false};
  const MembershipForm slots{.num_columns = 6, .slots = true, .weights = false};
  const auto bitmask_holds = [&](const MembershipForm& form) {
    return can_hold(ListEncoding::bitmask, membership, form);
  };
  EXPECT_FALSE(bitmask_holds(weighted));  // equal weights, columns descend
  EXPECT_FALSE(bitmask_holds(bare));
  membership.columns = {4, 2, 3};
  EXPECT_TRUE(bitmask_holds(weighted));
  EXPECT_FALSE(bitmask_holds(bare));  // weights do not travel
  membership.columns = {2, 3, 4};
  membership.weights = {0.25F, 0.5F, 0.5F};
  EXPECT_FALSE(bitmask_holds(weighted));
  EXPECT_TRUE(bitmask_holds(bare));
  EXPECT_TRUE(can_hold(ListEncoding::runs, membership, weighted));
  EXPECT_TRUE(can_hold(ListEncoding::runs, membership, slots));
  EXPECT_FALSE(can_hold(ListEncoding::runs, membership, bare));
  for (const MembershipForm& form : {weighted, bare, slots}) {
    EXPECT_TRUE(can_hold(ListEncoding::raw, membership, form));
    EXPECT_TRUE(can_hold(ListEncoding::packed, membership, form));
  }
}

TEST(MembershipCodec, SmallBatchStaysSmall) {
  // 8 tokens with 8 experts each: 7 bits and a weight per entry, 3 bits per count, and 4 bytes.
  plan::Membership membership = empty_membership(8);
  for (std::uint32_t token = 0; token < 8; ++token) {
    membership.tokens.push_back(token);
    for (std::uint16_t column = 0; column < 8; ++column) membership.columns.push_back(column);
    membership.entry_begin.push_back(8 * (token + 1));
  }
  membership.weights.assign(64, 0.125F);
  EXPECT_EQ(encoded(membership, 128, {ListEncoding::bitmask, ListEncoding::packed}).size(),
            4U + 3U + 56U + 64U * 4U);
}

}  // namespace
}  // namespace ferry::wire::test
