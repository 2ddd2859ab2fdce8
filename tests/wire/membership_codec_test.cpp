// Memberships come back bit by bit, in the size that was announced, in the smaller form.

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "samples.hpp"

namespace ferry::wire::test {
namespace {

constexpr std::uint64_t kCodecSeed = 31337;

void expect_round_trip(const plan::Membership& membership, const MembershipLimits& limits) {
  std::vector<std::byte> bytes(3, std::byte{0x55});  // appended to, not replaced
  encode_membership(membership, limits.form, bytes);
  ASSERT_EQ(bytes.size(), 3 + encoded_membership_bytes(membership, limits.form));
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

void expect_random_round_trip(const MembershipShape& shape, std::mt19937_64& rng) {
  SCOPED_TRACE(::testing::Message() << "seed " << kCodecSeed << " num_tokens " << shape.num_tokens
                                    << " num_topk " << shape.num_topk << " num_columns "
                                    << shape.num_columns << " density " << shape.density);
  expect_round_trip(random_membership(shape, rng), shape.limits());
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
    expect_round_trip(membership, {4294967295, 1, 3});
  }
}

TEST(MembershipCodec, WeightsKeepTheirBits) {
  using Limits = std::numeric_limits<float>;
  const plan::Membership membership{
      .num_tokens = 1, .tokens = {0}, .entry_begin = {0, 6}, .columns = {5, 4, 3, 2, 1, 0},
      .weights = {0.0F, -0.0F, 0.1F, Limits::denorm_min(), Limits::infinity(),
                  -Limits::infinity()}};
  expect_round_trip(membership, {1, 6, 6});
}

// All ways to write the token list side by side: the encoder's is the smallest.
TEST(MembershipCodec, TokenListTakesTheSmallerForm) {
  for (const std::uint32_t num_tokens : {1U, 64U, 800U, 4096U, 40000U}) {
    for (const std::uint32_t step : {1U, 2U, 7U, 8U, 9U, 20U, 128U, 129U, 1000U}) {
      plan::Membership membership = empty_membership(num_tokens);
      std::uint64_t gap_bytes = 0;
      for (std::uint32_t token = step - 1; token < num_tokens; token += step) {
        membership.tokens.push_back(token);
        membership.columns.push_back(0);
        membership.weights.push_back(1.0F);
        membership.entry_begin.push_back(static_cast<std::uint32_t>(membership.tokens.size()));
        gap_bytes += step - 1 < 128 ? 1 : 2;
      }
      const std::uint64_t n = membership.tokens.size();
      gap_bytes += n < 128 ? 1 : n < 16384 ? 2 : 3;
      const std::uint64_t token_bytes = std::min<std::uint64_t>((num_tokens + 7) / 8, gap_bytes);
      EXPECT_EQ(encoded_membership_bytes(membership, {.num_columns = 1}),
                2 + token_bytes + (n + 1) / 2 + 5 * n)
          << num_tokens << " tokens, every " << step;
      expect_round_trip(membership, {num_tokens, 1, 1});
    }
  }
}

TEST(MembershipCodec, CountsTakeFourBitsUpToFifteen) {
  for (const std::uint32_t most : {1U, 8U, 9U, 15U, 16U, 64U}) {
    plan::Membership membership = empty_membership(10);  // nine tokens with 1 entry, one with most
    for (std::uint32_t token = 0; token < 10; ++token) {
      membership.tokens.push_back(token);
      for (std::uint32_t i = 0; i < (token == 4 ? most : 1); ++i) {
        membership.columns.push_back(static_cast<std::uint16_t>(i));
      }
      membership.entry_begin.push_back(static_cast<std::uint32_t>(membership.columns.size()));
    }
    membership.weights.assign(membership.columns.size(), 1.0F);
    EXPECT_EQ(encoded_membership_bytes(membership, {.num_columns = 64}),
              2 + 2 + (most < 16 ? 5U : 10U) + 5 * (9 + most)) << most;
    expect_round_trip(membership, {10, 64, 64});
  }
}

TEST(MembershipCodec, SmallBatchStaysSmall) {
  // 8 tokens with 8 experts each: 5 bytes per entry and 7 for all the rest.
  plan::Membership membership = empty_membership(8);
  for (std::uint32_t token = 0; token < 8; ++token) {
    membership.tokens.push_back(token);
    for (std::uint16_t column = 0; column < 8; ++column) membership.columns.push_back(column);
    membership.entry_begin.push_back(8 * (token + 1));
  }
  membership.weights.assign(64, 0.125F);
  EXPECT_EQ(encoded_membership_bytes(membership, {.num_columns = 128}), 2U + 1U + 4U + 64U * 5U);
}

}  // namespace
}  // namespace ferry::wire::test
