// What the decoder of memberships must refuse, with the text it does it with. Bytes are written by
// hand, since the encoder makes none of these.

#include <gtest/gtest.h>

#include "samples.hpp"

namespace ferry::wire::test {
namespace {

std::string refusal(std::span<const std::byte> bytes, const MembershipLimits& limits) {
  const ExactBytes exact(bytes);
  plan::Membership out = empty_membership(9);
  const auto error = decode_membership(exact.span(), limits, out);
  if (error) {
    EXPECT_EQ(out, plan::Membership{}) << *error;
  }
  return error.value_or("accepted");
}

std::string refusal(std::string_view hex, const MembershipLimits& limits) {
  return refusal(from_hex(hex), limits);
}

const MembershipLimits kTen{.num_tokens = 10, .num_topk = 2, .form = {.num_columns = 6}};
// Tokens 1, 2 and 9 with columns 3; 0 and 5; 1: what each case below changes.
constexpr std::string_view kPacked = "01 02 43 03";  // packed experts

std::string with_experts(std::string_view head) {
  return with_weights(std::string(head).append(kPacked));
}

TEST(MembershipRefusal, TheBaseIsAccepted) {
  EXPECT_EQ(refusal(with_experts("02 09 06 02"), kTen), "accepted");
  EXPECT_EQ(refusal(with_experts("02 08 03 01 00 02 00 09 00"), kTen), "accepted");
  // 10 / 3 is at least 2^1: a lower bit each (1 0 1), upper parts 0, 1, 4 at bits 0, 2, 6.
  EXPECT_EQ(refusal(with_experts("02 0a 03 05 45"), kTen), "accepted");
  EXPECT_EQ(refusal(with_experts("02 0b 8a 06"), kTen), "accepted");
  EXPECT_EQ(refusal(with_weights("02 01 06 02 00 01 00 03 00 05 01"), kTen), "accepted");
  EXPECT_EQ(refusal(with_weights("02 05 06 02 48 28 00"), kTen), "accepted");
  EXPECT_EQ(refusal(with_weights("02 0d 06 02 07 01 02 43 03"), kTen), "accepted");
}

TEST(MembershipRefusal, VersionAndForm) {
  EXPECT_EQ(refusal("", kTen), "membership: size is 0 bytes; expected at least 2");
  EXPECT_EQ(refusal(with_experts("01 09 06 02"), kTen),
            "membership: version is 1; expected 2; fix: run one version of Ferry on all ranks");
  EXPECT_EQ(refusal(with_experts("02 19 06 02"), kTen),
            "membership: slots are sent and weights are sent; expected slots false and weights "
            "true, from the options");
  EXPECT_EQ(refusal(with_experts("02 89 06 02"), kTen),
            "membership: the form is 0x89; expected only bits of 0x3f");
  EXPECT_EQ(refusal("02 2d 06 02 07 01 02 43 03", {10, 2, {.num_columns = 6, .weights = false}}),
            "membership: experts are listed in runs; expected another encoding where neither slots "
            "nor weights are sent");
}

TEST(MembershipRefusal, TokensOutOfRange) {
  EXPECT_EQ(refusal(with_experts("02 09 06 04"), kTen),
            "membership: the bitmask names token 10; expected below num_tokens = 10");
  EXPECT_EQ(refusal(with_experts("02 08 03 01 00 02 00 0a 00"), kTen),
            "membership: tokens[2] is token 10; expected 3..9");
  EXPECT_EQ(refusal(with_experts("02 08 03 01 00 01 00 09 00"), kTen),
            "membership: tokens[1] is token 1; expected 2..9");
  EXPECT_EQ(refusal("02 08 0b 00 00 00", kTen),
            "membership: 11 tokens are listed; expected at most num_tokens = 10");
  EXPECT_EQ(refusal("02 09 00", {1ULL << 32, 2, {.num_columns = 6}}),
            "membership: num_tokens is 4294967296; expected at most 4294967295");
}

TEST(MembershipRefusal, PackedTokens) {
  EXPECT_EQ(refusal(with_experts("02 0a 03 05 05"), kTen),
            "membership: the upper parts name 2 tokens; expected 3");
  EXPECT_EQ(refusal(with_experts("02 0a 03 05 85"), kTen),
            "membership: the bits after a part of the packed tokens are not 0");
  EXPECT_EQ(refusal(with_experts("02 0a 03 0d 45"), kTen),
            "membership: the bits after a part of the packed tokens are not 0");
  // Of two tokens with one upper part the second has the smaller lower part.
  EXPECT_EQ(refusal(with_experts("02 0a 03 01 43"), kTen),
            "membership: tokens[1] is token 0; expected 2..9");
  EXPECT_EQ(refusal(with_experts("02 0a 80 00 05 45"), kTen),
            "membership: the number of tokens at byte 2 is not a varint; expected at most 10 "
            "bytes, in the shortest form");
  // 4 of 9 tokens: upper parts 0, 1, 2 and 4 with a lower bit each, so that the last may be 9.
  EXPECT_EQ(refusal("02 2a 04 0f 95 00 00 00", {9, 2, {.num_columns = 6, .weights = false}}),
            "membership: tokens[3] is token 9; expected 6..8");
}

TEST(MembershipRefusal, RunsOfTokens) {
  EXPECT_EQ(refusal("02 0b", kTen), "membership: the runs of tokens are cut off");
  EXPECT_EQ(
      refusal("02 0b 8a", kTen),
      "membership: the run from token 3 on is cut off or too long; expected at most 7 tokens");
  // 2 in place of the last 1.
  EXPECT_EQ(
      refusal(with_experts("02 0b 8a 0a"), kTen),
      "membership: the run from token 9 on is cut off or too long; expected at most 1 tokens");
  EXPECT_EQ(refusal(with_experts("02 0b 8a 0e"), kTen),
            "membership: the bits after the runs of tokens are not 0");
  // 32 zeros: a length that would not be below 2^32.
  EXPECT_EQ(refusal("02 0b 00 00 00 00 fe ff ff ff ff ff", {4294967295, 2, {.num_columns = 6}}),
            "membership: the run from token 0 on is cut off or too long; expected at most "
            "4294967295 tokens");
}

TEST(MembershipRefusal, Counts) {
  EXPECT_EQ(refusal(with_weights("02 01 06 02 00 02 00 03 00 05 01"), kTen),
            "membership: token 2 has 3 entries; expected 1..num_topk = 2");
  EXPECT_EQ(refusal(with_weights("02 01 06 02 00 ff 00 03 00 05 01"), kTen),
            "membership: token 2 has 256 entries; expected 1..num_topk = 2");
  EXPECT_EQ(refusal(with_weights("02 09 06 02 02 08 43 03"), kTen),
            "membership: token 2 has 3 entries; expected 1..num_topk = 2");
  EXPECT_EQ(refusal(with_weights("02 09 06 02 01 0a 43 03"), kTen),
            "membership: the bits after the last count are not 0");
  EXPECT_EQ(refusal(with_weights("02 09 06 02 09 02 43 03"), kTen),
            "membership: counts take 9 bits; expected at most 8, or 255 for end marks");
  // 2 bits where one is enough; end marks where counts take less.
  EXPECT_EQ(refusal(with_weights("02 09 06 02 02 04 43 03"), kTen),
            "membership: counts have the form 2; expected 1, the smallest");
  EXPECT_EQ(refusal(with_weights("02 09 06 02 ff 0d 43 03"), kTen),
            "membership: counts have the form 255; expected 1, the smallest");
}

TEST(MembershipRefusal, EndMarks) {
  const MembershipLimits five{
      .num_tokens = 5, .num_topk = 3, .form = {.num_columns = 4, .weights = false}};
  EXPECT_EQ(refusal("02 29 1f ff 4f e4 1b", five), "accepted");
  EXPECT_EQ(refusal("02 29 1f ff cf e4 1b", five),
            "membership: the bits after the last end mark are not 0");
  EXPECT_EQ(refusal("02 29 1f ff 0f 00 00", five),
            "membership: the end marks of 1 tokens are missing; expected 5 of them");
  EXPECT_EQ(refusal("02 29 1f ff 8f e4 1b", five),
            "membership: token 4 has 4 entries; expected 1..num_topk = 3");
  // 2 bits for each of two tokens take no more than four marks.
  EXPECT_EQ(refusal("02 29 03 ff 0a e4", five),
            "membership: counts have the form 255; expected 1, the smallest");
}

TEST(MembershipRefusal, Columns) {
  EXPECT_EQ(refusal(with_weights("02 09 06 02 01 02 83 03"), kTen),
            "membership: token 2 names column 6; expected below num_columns = 6");
  EXPECT_EQ(refusal(with_weights("02 09 06 02 01 02 6b 03"), kTen),
            "membership: token 2 names column 5 twice; expected once");
  EXPECT_EQ(refusal(with_weights("02 09 06 02 01 02 43 13"), kTen),
            "membership: the bits after the packed columns are not 0");
  EXPECT_EQ(refusal(with_weights("02 01 06 02 00 01 00 03 05 05 01"), kTen),
            "membership: token 2 names column 5 twice; expected once");
  EXPECT_EQ(refusal(with_weights("02 01 06 02 00 01 00 03 00 06 01"), kTen),
            "membership: token 2 names column 6; expected below num_columns = 6");
  // The same column in neighbouring tokens is fine.
  EXPECT_EQ(refusal(with_weights("02 01 06 02 00 01 00 05 05 01 01"), kTen), "accepted");
}

TEST(MembershipRefusal, BitmasksOfExperts) {
  EXPECT_EQ(refusal(with_weights("02 05 06 02 48 28 08"), kTen),
            "membership: the bits after the bitmasks of columns are not 0");
  // Columns 3; 0, 4 and 5; none.
  EXPECT_EQ(refusal(with_weights("02 05 06 02 48 0c 00"), kTen),
            "membership: token 2 has 3 entries; expected 1..num_topk = 2");
  EXPECT_EQ(refusal(with_weights("02 05 06 02 40 2c 00"), kTen),
            "membership: token 1 has 0 entries; expected 1..num_topk = 2");
}

TEST(MembershipRefusal, RunsOfExperts) {
  EXPECT_EQ(refusal(with_weights("02 0d 06 02 08 01 02 43 03"), kTen),
            "membership: the run of equal experts from tokens[0] on is cut off or too long; "
            "expected at most 3 tokens");
  EXPECT_EQ(refusal(with_weights("02 0d 06 02 0f 01 02 43 03"), kTen),
            "membership: the bits after the runs of equal experts are not 0");
  // Columns 3; 3; 1, each a run of its own.
  EXPECT_EQ(refusal("02 0d 06 02 07 00 5b 00 00 00 80 3f 00 00 80 3f 00 00 80 3f", kTen),
            "membership: token 2 begins a run with the experts of the one before");
  // A run of two, then one of one.
  EXPECT_EQ(refusal("02 0d 06 02 0a 00 0b 00 00 80 3f 00 00 80 3f 00 00 80 3f", kTen), "accepted");
  EXPECT_EQ(refusal("02 0d 06 02 0a 00 0e 00 00 80 3f 00 00 80 3f 00 00 80 3f", kTen),
            "membership: token 1 names column 6; expected below num_columns = 6");
  EXPECT_EQ(refusal("02 0d 06 02 0a 00 33 00 00 80 3f 00 00 80 3f 00 00 80 3f", kTen),
            "membership: token 9 names column 6; expected below num_columns = 6");
}

TEST(MembershipRefusal, NaNWeights) {
  for (const std::string nan : {"00 00 c0 7f", "01 00 80 7f", "ff ff ff ff"}) {
    EXPECT_EQ(
        refusal("02 09 06 02 01 02 43 03 00 00 80 3f 00 00 00 3f" + nan + "00 00 80 3e", kTen),
        "membership: the weight of token 2 for column 5 is NaN; expected a number");
  }
  EXPECT_EQ(
      refusal("02 09 06 02 01 02 43 03 00 00 80 3f 00 00 00 3f 00 00 80 7f 00 00 80 ff", kTen),
      "accepted");
}

TEST(MembershipRefusal, TrailingAndMissingBytes) {
  EXPECT_EQ(refusal(with_experts("02 09 06 02") + "00", kTen),
            "membership: 19 bytes are left for 4 entries; expected exactly 18");
  EXPECT_EQ(refusal(with_weights("02 01 06 02 00 01 00 03 00 05 01") + "00", kTen),
            "membership: 24 bytes are left for 4 entries; expected exactly 23");
  EXPECT_EQ(refusal(with_weights("02 05 06 02 48 28 00") + "00", kTen),
            "membership: 20 bytes are left for 4 entries; expected exactly 19");
  EXPECT_EQ(refusal(with_weights("02 0d 06 02 07 01 02 43 03") + "00", kTen),
            "membership: 17 bytes are left for 4 entries; expected exactly 16");
  EXPECT_EQ(refusal("02 09 00 00 00", kTen),
            "membership: 1 bytes are left for 0 entries; expected exactly 0");
  EXPECT_EQ(refusal("02 09 06", kTen),
            "membership: 1 bytes are left; expected 2 for the bitmask of 10 tokens");
}

TEST(MembershipRefusal, AllocatesNoMoreThanTheBytesJustify) {
  const MembershipForm bare{.num_columns = 6, .weights = false};
  // 4 billion tokens announced in a few bytes, in each encoding that can.
  EXPECT_EQ(refusal("02 0a fe ff ff ff 0f 00 00 00 00", {4294967295, 2, {.num_columns = 6}}),
            "membership: 4 bytes are left for 4294967294 tokens; expected at least 19864223736");
  EXPECT_EQ(refusal("02 08 fe ff ff ff 0f 00 00 00 00", {4294967295, 2, {.num_columns = 6}}),
            "membership: 4 bytes are left for 4294967294 tokens; expected at least 35970351088");
  EXPECT_EQ(refusal("02 2b 01 00 00 00 ff ff ff ff 00 00", {4294967295, 2, bare}),
            "membership: 10 bytes are left for 4294967295 tokens; expected at least 1610612744");
  // The same, where runs of experts would take them at no cost but that of weights.
  EXPECT_EQ(refusal("02 0f 01 00 00 00 ff ff ff ff 00 00", {4294967295, 2, {.num_columns = 6}}),
            "membership: 10 bytes are left for 4294967295 tokens; expected at least 17179869188");
  const std::vector<std::byte> full = [] {
    std::vector<std::byte> bytes(2 + 1000, std::byte{0xFF});
    bytes[0] = std::byte{2};
    bytes[1] = std::byte{9};
    return bytes;
  }();
  EXPECT_EQ(refusal(full, {8000, 2, {.num_columns = 6}}),
            "membership: 1000 bytes are left for 8000 tokens; expected at least 36000");
  // A node of one expert: still a bit for each token, so that 3 bytes are for 8 tokens at most.
  EXPECT_EQ(refusal("02 2b 21 01 00 ff", {20, 1, {.num_columns = 1, .weights = false}}),
            "membership: 4 bytes are left for 20 tokens; expected at least 5");
}

TEST(MembershipRefusal, CutAtEveryLengthAndOneByteMore) {
  std::mt19937_64 rng(99);
  for (const bool ordered : {false, true}) {
    for (MembershipShape shape :
         {MembershipShape{100, 8, 32, 0.5}, MembershipShape{900, 3, 300, 0.02},
          MembershipShape{40, 40, 64, 1.0}}) {
      shape.ordered = ordered;
      const plan::Membership membership = random_membership(shape, rng);
      for (const IndexEncoding encoding : all_encodings()) {
        if (!can_hold(encoding.experts, membership, shape.form())) continue;
        SCOPED_TRACE(to_text(encoding));
        auto bytes = encoded(membership, shape.form(), encoding);
        ASSERT_EQ(refusal(bytes, shape.limits()), "accepted");
        for (std::size_t size = 0; size < bytes.size(); ++size) {
          EXPECT_NE(refusal(std::span(bytes).first(size), shape.limits()), "accepted") << size;
        }
        bytes.push_back(std::byte{0});
        EXPECT_NE(refusal(bytes, shape.limits()), "accepted");
      }
    }
  }
}

TEST(MembershipRefusal, LimitsOfNothing) {
  EXPECT_EQ(refusal("02 09", {0, 0, {}}), "accepted");
  EXPECT_EQ(refusal("02 09 01 00 00 00 00 00 00", {1, 0, {.num_columns = 1}}),
            "membership: token 0 has 1 entries; expected 1..num_topk = 0");
  EXPECT_EQ(refusal("02 09 01 00 00 00 00 00 00", {1, 1, {}}),
            "membership: token 0 names column 0; expected below num_columns = 0");
  EXPECT_EQ(refusal("02 05 01 00 00 00 00 00", {1, 1, {}}),
            "membership: 5 bytes are left for 0 entries; expected exactly 0");
}

}  // namespace
}  // namespace ferry::wire::test
