// The choice of encodings: what is learnt from the tokens that are looked at, and what the choice
// is measured by.

#include "wire/membership_choice.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "samples.hpp"

namespace ferry::wire::test {
namespace {

constexpr std::uint64_t kChoiceSeed = 4711;

double regret(const plan::Membership& membership, const MembershipForm& form,
              MembershipHistory history) {
  return static_cast<double>(
             index_bytes(membership, form, choose_encoding(membership, form, history))) /
         static_cast<double>(index_bytes(membership, form, best_encoding(membership, form)));
}

IndexEncoding first_choice(const plan::Membership& membership, const MembershipForm& form) {
  MembershipHistory history;
  return choose_encoding(membership, form, history);
}

/// Tokens that come in stretches of `length` and stay away for as many.
plan::Membership stretches(std::uint32_t num_tokens, std::uint32_t length, std::mt19937_64& rng) {
  plan::Membership membership = empty_membership(num_tokens);
  for (std::uint32_t token = 0; token < num_tokens; ++token) {
    if (token / length % 2 != 0) continue;
    membership.tokens.push_back(token);
    membership.columns.push_back(static_cast<std::uint16_t>(rng() % 16));
    membership.weights.push_back(1.0F);
    membership.entry_begin.push_back(static_cast<std::uint32_t>(membership.columns.size()));
  }
  return membership;
}

TEST(MembershipChoice, BestIsTheSmallestOfAll) {
  std::mt19937_64 rng(kChoiceSeed);
  for (int i = 0; i < 300; ++i) {
    const MembershipShape shape{.num_tokens = rng() % 400,
                                .num_topk = 1 + static_cast<int>(rng() % 8),
                                .num_columns = 1 + static_cast<int>(rng() % 64),
                                .density = static_cast<double>(rng() % 11) / 10,
                                .weights = i % 5 != 0,
                                .ordered = i % 2 == 0,
                                .repeats = static_cast<double>(i % 4) / 3};
    const plan::Membership membership = random_membership(shape, rng);
    const std::uint64_t best =
        index_bytes(membership, shape.form(), best_encoding(membership, shape.form()));
    for (const IndexEncoding encoding :
         {best_encoding(membership, shape.form()), first_choice(membership, shape.form())}) {
      ASSERT_TRUE(can_hold(encoding.experts, membership, shape.form()));
    }
    for (const IndexEncoding encoding : all_encodings()) {
      if (!can_hold(encoding.experts, membership, shape.form())) continue;
      ASSERT_LE(best, index_bytes(membership, shape.form(), encoding)) << to_text(encoding);
    }
  }
}

TEST(MembershipChoice, RoutingAtRandomIsWithinATenthOfTheBest) {
  std::mt19937_64 rng(kChoiceSeed);
  for (const std::uint64_t num_tokens : {16U, 64U, 1000U, 5000U}) {
    for (const double density : {0.0, 0.002, 0.05, 0.2, 0.5, 0.9, 0.998, 1.0}) {
      for (const bool ordered : {false, true}) {
        for (const int num_columns : {1, 2, 4, 8, 64}) {
          const MembershipShape shape{.num_tokens = num_tokens,
                                      .num_topk = 4,
                                      .num_columns = num_columns,
                                      .density = density,
                                      .ordered = ordered};
          const plan::Membership membership = random_membership(shape, rng);
          const auto bytes = [&](IndexEncoding encoding) {
            return static_cast<double>(index_bytes(membership, shape.form(), encoding));
          };
          // A byte more is a tenth of the smallest.
          EXPECT_LE(bytes(first_choice(membership, shape.form())),
                    1.1 * bytes(best_encoding(membership, shape.form())) + 1)
              << num_tokens << " tokens, density " << density << ", " << num_columns << " columns";
        }
      }
    }
  }
}

TEST(MembershipChoice, HowTokensLieIsLearnt) {
  std::mt19937_64 rng(kChoiceSeed);
  const MembershipForm form{.num_columns = 16};
  const MembershipShape random{.num_tokens = 4096, .num_topk = 1, .num_columns = 16};
  MembershipHistory history;
  for (int i = 0; i < 3; ++i) {
    const plan::Membership in_runs = stretches(4096, 64, rng);
    EXPECT_LE(regret(in_runs, form, history), 1.05);
    EXPECT_EQ(choose_encoding(in_runs, form, history).tokens, ListEncoding::runs);
    const plan::Membership at_random = random_membership(random, rng);
    EXPECT_LE(regret(at_random, form, history), 1.05);
    EXPECT_EQ(choose_encoding(at_random, form, history).tokens, ListEncoding::bitmask);
  }
  // Earlier plans count, and are forgotten.
  const double after_runs = [&] {
    history.learn(stretches(4096, 64, rng));
    history.learn(random_membership(random, rng));
    return history.token_runs();
  }();
  EXPECT_LT(after_runs, 0.95);
  for (int i = 0; i < 20; ++i) history.learn(random_membership(random, rng));
  EXPECT_NEAR(history.token_runs(), 1, 0.1);
  EXPECT_GT(history.token_runs(), after_runs);
}

TEST(MembershipChoice, RepeatedExpertsAreLearnt) {
  std::mt19937_64 rng(kChoiceSeed);
  const MembershipShape repeats{
      .num_tokens = 1000, .num_topk = 4, .num_columns = 64, .repeats = 0.95};
  const MembershipShape random{.num_tokens = 1000, .num_topk = 4, .num_columns = 64};
  MembershipHistory history;
  for (int i = 0; i < 3; ++i) {
    const plan::Membership in_runs = random_membership(repeats, rng);
    EXPECT_LE(regret(in_runs, repeats.form(), history), 1.1);
    EXPECT_EQ(choose_encoding(in_runs, repeats.form(), history).experts, ListEncoding::runs);
    EXPECT_EQ(choose_encoding(random_membership(random, rng), random.form(), history).experts,
              ListEncoding::packed);
  }
}

// Short memberships are counted, of long ones stretches from the first token to the last.
TEST(MembershipChoice, TokensAreLookedAtEverywhere) {
  std::mt19937_64 rng(kChoiceSeed);
  for (const std::uint64_t half : {100U, 5000U, 50'000U}) {
    for (const bool repeats_first : {false, true}) {
      MembershipShape shape{.num_tokens = half, .num_topk = 4, .num_columns = 64, .density = 1};
      plan::Membership both;
      both.entry_begin = {0};
      for (const bool repeats : {repeats_first, !repeats_first}) {
        shape.repeats = repeats ? 1 : 0;
        const plan::Membership part = random_membership(shape, rng);
        const auto entries = static_cast<std::uint32_t>(both.columns.size());
        for (std::size_t i = 0; i < part.tokens.size(); ++i) {
          both.tokens.push_back(static_cast<std::uint32_t>(both.num_tokens) + part.tokens[i]);
          both.entry_begin.push_back(entries + part.entry_begin[i + 1]);
        }
        both.columns.insert(both.columns.end(), part.columns.begin(), part.columns.end());
        both.num_tokens += half;
      }
      MembershipHistory history;
      history.learn(both);
      EXPECT_NEAR(history.new_experts(), 0.5, 0.05) << half;
    }
  }
}

TEST(MembershipChoice, LongRunsAreFoundInShortStretches) {
  std::mt19937_64 rng(kChoiceSeed);
  const MembershipForm form{.num_columns = 16};
  for (const std::uint32_t length : {16U, 100U, 5000U}) {
    EXPECT_LE(regret(stretches(200'000, length, rng), form, {}), 1.1) << length;
  }
}

// Whatever was learnt from plans of other sizes, also of none, is no more than a ratio.
TEST(MembershipChoice, PlansOfOtherSizesTeachTheSame) {
  std::mt19937_64 rng(kChoiceSeed);
  const MembershipForm form{.num_columns = 16};
  MembershipHistory history;
  for (int i = 0; i < 40; ++i) {
    history.learn(stretches(256, 64, rng));
    history.learn(empty_membership(0));
    history.learn(empty_membership(1000));
  }
  EXPECT_EQ(choose_encoding(stretches(8192, 64, rng), form, history).tokens, ListEncoding::runs);
  EXPECT_EQ(regret(empty_membership(0), form, history), 1);
}

TEST(MembershipChoice, ABitmaskOfExpertsNeedsTheirOrder) {
  std::mt19937_64 rng(kChoiceSeed);
  MembershipShape shape{
      .num_tokens = 500, .num_topk = 4, .num_columns = 4, .density = 1, .ordered = true};
  EXPECT_EQ(first_choice(random_membership(shape, rng), shape.form()).experts,
            ListEncoding::bitmask);
  shape.ordered = false;
  EXPECT_EQ(first_choice(random_membership(shape, rng), shape.form()).experts,
            ListEncoding::packed);
}

TEST(MembershipChoice, EntropyOfListsThatCanBeCounted) {
  const MembershipForm form{.num_columns = 4};
  EXPECT_EQ(index_entropy_bits(empty_membership(0), form), 0);
  EXPECT_EQ(index_entropy_bits(empty_membership(50), form), 0);
  // 3 of 6 tokens, 20 ways; which of them has two entries, 3 ways; columns, 4 x 4 x 6 ways.
  plan::Membership membership = empty_membership(6);
  membership.tokens = {0, 2, 3};
  membership.entry_begin = {0, 1, 2, 4};
  membership.columns = {0, 1, 2, 3};
  membership.weights = {1.0F, 1.0F, 0.5F, 0.25F};
  const double ways = 20.0 * 3 * 4 * 4 * 6;
  EXPECT_NEAR(index_entropy_bits(membership, form), std::log2(ways), 1e-9);
  // The order of two entries, which their weights no longer tell.
  membership.weights = {1.0F, 1.0F, 0.25F, 0.5F};
  EXPECT_NEAR(index_entropy_bits(membership, form), std::log2(2 * ways), 1e-9);
}

TEST(MembershipChoice, EntropyOfSkewedExpertsIsLess) {
  plan::Membership membership = empty_membership(4096);
  for (std::uint32_t token = 0; token < 4096; ++token) {
    membership.tokens.push_back(token);
    membership.columns.push_back(token % 16 == 0 ? 1 : 0);
    membership.weights.push_back(1.0F);
    membership.entry_begin.push_back(token + 1);
  }
  // Two columns of 16, one with a sixteenth: twice what tells them apart, as columns are counted
  // one by one, and half of log2 4097 for each of the 16.
  const double share = 1.0 / 16;
  const double each = -share * std::log2(share) - (1 - share) * std::log2(1 - share);
  EXPECT_NEAR(index_entropy_bits(membership, {.num_columns = 16}), 2 * 4096 * each + 8 * 12, 20);
}

}  // namespace
}  // namespace ferry::wire::test
