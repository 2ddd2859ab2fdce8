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
// Tokens 1, 2 and 9 with 1, 2 and 1 entries: the base that each case below changes.
constexpr std::string_view kWeights = "00 00 80 3f 00 00 00 3f 00 00 00 c0 00 00 80 3e";

std::string with_weights(std::string_view head) { return std::string(head).append(kWeights); }

TEST(MembershipRefusal, TheBaseIsAccepted) {
  EXPECT_EQ(refusal(with_weights("01 03 06 02 21 01 03 00 05 01"), kTen), "accepted");
  EXPECT_EQ(refusal(with_weights("01 02 03 01 00 06 21 01 03 00 05 01"), kTen), "accepted");
}

TEST(MembershipRefusal, VersionAndFlags) {
  EXPECT_EQ(refusal("", kTen), "membership: size is 0 bytes; expected at least 2");
  EXPECT_EQ(refusal(with_weights("02 03 06 02 21 01 03 00 05 01"), kTen),
            "membership: version is 2; expected 1; fix: run one version of Ferry on all ranks");
  EXPECT_EQ(refusal(with_weights("01 0b 06 02 21 01 03 00 05 01"), kTen),
            "membership: slots are sent and weights are sent; expected slots false and weights "
            "true, from the options");
  EXPECT_EQ(refusal(with_weights("01 07 06 02 21 01 03 00 00 00 05 00 01 00"), kTen),
            "membership: columns take 2 bytes; expected 1 up to 256 columns, else 2; this node has "
            "6");
  EXPECT_EQ(refusal(with_weights("01 03 06 02 21 01 03 00 05 01"), {10, 2, 257}),
            "membership: columns take 1 bytes; expected 1 up to 256 columns, else 2; this node has "
            "257");
}

TEST(MembershipRefusal, TokensOutOfRange) {
  EXPECT_EQ(refusal(with_weights("01 03 06 04 21 01 03 00 05 01"), kTen),
            "membership: the bitmask names token 10; expected below num_tokens = 10");
  EXPECT_EQ(refusal(with_weights("01 02 03 01 00 07 21 01 03 00 05 01"), kTen),
            "membership: tokens[2] is token 3 + 7; expected below num_tokens = 10");
  EXPECT_EQ(refusal("01 02 0b 00 00 00", kTen),
            "membership: 11 tokens are listed; expected at most num_tokens = 10");
  EXPECT_EQ(refusal("01 02 00", {1ULL << 32, 2, 6}),
            "membership: num_tokens is 4294967296; expected at most 4294967295");
  // A gap that would wrap around 2^64 to a small token.
  EXPECT_EQ(refusal(with_weights("01 00 02 05 ff ff ff ff ff ff ff ff ff 01 01 01 00 00"), kTen),
            "membership: tokens[1] is token 6 + 18446744073709551615; expected below num_tokens = "
            "10");
}

TEST(MembershipRefusal, VarintsThatAreNone) {
  EXPECT_EQ(refusal("01 02 80 00 00", kTen),
            "membership: the number of tokens at byte 2 is not a varint; expected at most 10 "
            "bytes, in the shortest form");
  EXPECT_EQ(refusal(with_weights("01 02 03 01 80 00 06 21 01 03 00 05 01"), kTen),
            "membership: the gap before tokens[1] at byte 4 is not a varint; expected at most 10 "
            "bytes, in the shortest form");
}

TEST(MembershipRefusal, Counts) {
  EXPECT_EQ(refusal(with_weights("01 03 06 02 20 01 03 00 05 01"), kTen),
            "membership: token 1 has 0 entries; expected 1..num_topk = 2");
  EXPECT_EQ(refusal(with_weights("01 03 06 02 31 01 03 00 05 01"), kTen),
            "membership: token 2 has 3 entries; expected 1..num_topk = 2");
  EXPECT_EQ(refusal(with_weights("01 03 06 02 21 11 03 00 05 01"), kTen),
            "membership: the 4 bits after the last count are 1; expected 0");
  EXPECT_EQ(refusal(with_weights("01 01 06 02 01 ff 01 03 00 05 01"), kTen),
            "membership: token 2 has 255 entries; expected 1..num_topk = 2");
}

TEST(MembershipRefusal, Columns) {
  EXPECT_EQ(refusal(with_weights("01 03 06 02 21 01 03 00 06 01"), kTen),
            "membership: token 2 names column 6; expected below num_columns = 6");
  EXPECT_EQ(refusal(with_weights("01 03 06 02 21 01 03 05 05 01"), kTen),
            "membership: token 2 names column 5 twice; expected once");
  // The same column in neighbouring tokens is fine.
  EXPECT_EQ(refusal(with_weights("01 03 06 02 21 01 05 05 01 01"), kTen), "accepted");
}

TEST(MembershipRefusal, NaNWeights) {
  for (const std::string nan : {"00 00 c0 7f", "01 00 80 7f", "ff ff ff ff"}) {
    EXPECT_EQ(refusal("01 03 06 02 21 01 03 00 05 01 00 00 80 3f 00 00 00 3f" + nan + "00 00 80 3e",
                      kTen),
              "membership: the weight of token 2 for column 5 is NaN; expected a number");
  }
  EXPECT_EQ(refusal("01 03 06 02 21 01 03 00 05 01 00 00 80 3f 00 00 00 3f 00 00 80 7f 00 00 80 ff",
                    kTen), "accepted");
}

TEST(MembershipRefusal, TrailingAndMissingBytes) {
  EXPECT_EQ(refusal(with_weights("01 03 06 02 21 01 03 00 05 01") + "00", kTen),
            "membership: 21 bytes are left for 4 entries; expected exactly 20");
  EXPECT_EQ(refusal("01 03 00 00 00", kTen),
            "membership: 1 bytes are left for 0 entries; expected exactly 0");
  EXPECT_EQ(refusal("01 03 06", kTen),
            "membership: 1 bytes are left; expected 2 for the bitmask of 10 tokens");
}

TEST(MembershipRefusal, AllocatesNoMoreThanTheBytesJustify) {
  // 4 billion tokens announced in 11 bytes.
  EXPECT_EQ(refusal("01 02 fe ff ff ff 0f 00 00 00 00", {4294967295, 2, 6}),
            "membership: 4 bytes are left for 4294967294 tokens; expected at least 27917287411");
  const std::vector<std::byte> full = [] {
    std::vector<std::byte> bytes(2 + 1000, std::byte{0xFF});
    bytes[0] = std::byte{1};
    bytes[1] = std::byte{3};
    return bytes;
  }();
  EXPECT_EQ(refusal(full, {8000, 2, 6}),
            "membership: 1000 bytes are left for 8000 tokens; expected at least 45000");
}

TEST(MembershipRefusal, CutAtEveryLength) {
  std::mt19937_64 rng(99);
  for (const MembershipShape& shape :
       {MembershipShape{100, 8, 32, 0.5}, MembershipShape{900, 3, 300, 0.02},
        MembershipShape{40, 40, 64, 1.0}}) {
    const auto bytes = encoded(random_membership(shape, rng), shape.num_columns);
    ASSERT_EQ(refusal(bytes, shape.limits()), "accepted");
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_NE(refusal(std::span(bytes).first(size), shape.limits()), "accepted") << size;
    }
  }
}

TEST(MembershipRefusal, LimitsOfNothing) {
  EXPECT_EQ(refusal("01 03", {0, 0, 0}), "accepted");
  EXPECT_EQ(refusal("01 03 01 01 00 00 00 00 00", {1, 0, 1}),
            "membership: token 0 has 1 entries; expected 1..num_topk = 0");
  EXPECT_EQ(refusal("01 03 01 01 00 00 00 00 00", {1, 1, 0}),
            "membership: token 0 names column 0; expected below num_columns = 0");
}

}  // namespace
}  // namespace ferry::wire::test
