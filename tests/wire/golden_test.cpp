// One small example of each header and each form of a membership, byte by byte. The bytes follow
// from docs/wire-formats.md, not from the code; if one changes, kVersion must change.

#include <gtest/gtest.h>

#include <limits>

#include "samples.hpp"

namespace ferry::wire::test {
namespace {

TEST(Golden, FragmentHeader) {
  EXPECT_EQ(encoded(sample_fragment()),
            from_hex("46 52 59 31 01 00 01 00"  // magic, version, type
                     "88 77 66 55 44 33 22 11"  // place
                     "02 00 00 00 03 00 00 00"  // generation, exchange
                     "04 00 00 00 05 00 00 00"  // plan, ordinal
                     "01 01 02 11"              // kind, call flags; grant kind, flags
                     "06 00 00 00"              // index
                     "07 00 00 00 04 03 02 01"  // rows, payload bytes
                     "ef be ad de"              // payload crc
                     "09 00 00 00 0a 00 00 00"  // grant: exchange, plan
                     "0b 00 00 00 0c 00 00 00"  // ordinal, fragments
                     "2a 1c 2d f2"));           // header crc
}

TEST(Golden, MetadataHeader) {
  EXPECT_EQ(encoded(sample_metadata()), from_hex("46 52 59 31 01 00 02 00"  // magic, version, type
                                                 "88 77 66 55 44 33 22 11"  // place
                                                 "02 00 00 00 03 00 00 00"  // generation, exchange
                                                 "04 00 00 00 0e 00 00 00"  // plan, ordinal
                                                 "00 00 03 01"  // kind, call flags; flags, layout
                                                 "03 00 0e 0f"  // ranges in flight, failures
                                                 "00 10 00 00 00 00 00 00"  // num_tokens
                                                 "05 04 03 02 01 00 00 00"  // body bytes
                                                 "00 1c 00 00 00 00 00 00"  // hidden
                                                 "a8 a7 a6 a5 a4 a3 a2 a1"  // topology hash
                                                 "b8 b7 b6 b5 b4 b3 b2 b1"  // placement hash
                                                 "0d 00 00 00 00 00 00 00"  // placement version
                                                 "05 00 00 00 0d f0 fe ca"  // source, body crc
                                                 "00 01 00 00 08 00 00 00"  // experts, top-k
                                                 "00 f0 00 00 00 02 00 00"  // fragment, range
                                                 "01 02 00 03"              // dtypes, strategy
                                                 "02 00 01 02"     // weights, reserved; alignment
                                                 "0c 00 00 00"     // extra bytes
                                                 "04 03 00 01"     // gradients' wires, block
                                                 "00 00 00 3f"     // largest error
                                                 "00 00 80 3e"     // sparse ratio
                                                 "e7 fd d4 3b"));  // header crc
}

TEST(Golden, GrantMessage) {
  EXPECT_EQ(encoded(sample_grant()), from_hex("46 52 59 31 01 00 03 00"  // magic, version, type
                                              "02 00 00 00"              // generation
                                              "09 00 00 00 0a 00 00 00"  // exchange, plan
                                              "0b 00 00 00 0c 00 00 00"  // ordinal, fragments
                                              "04 00 00 00"              // kind, stream; reserved
                                              "2e 07 fc 4e"));           // crc
}

TEST(Golden, PoisonMessage) {
  EXPECT_EQ(encoded(sample_poison()), from_hex("46 52 59 31 01 00 04 00"  // magic, version, type
                                               "88 77 66 55 44 33 22 11"  // place
                                               "02 00 00 00 03 00 00 00"  // generation, exchange
                                               "04 00 00 00 05 00 00 00"  // plan, ordinal
                                               "02 01 07 00"  // kind, call flags; code, reserved
                                               "06 00 00 00"  // text bytes
                                               "6e 6f 3a 20 c3 a9"  // "no: é"
                                               "dc 33 88 52"));     // crc
}

TEST(Golden, RowSummary) {
  RowSummary summary;
  summary.rows_to_node = {{0, 1, 127}, {128, 300, std::numeric_limits<std::uint64_t>::max()}};
  std::vector<std::byte> bytes{std::byte{0xAA}};  // appended to, not replaced
  encode_row_summary(summary, bytes);
  EXPECT_EQ(bytes, from_hex("aa 00 01 7f 80 01 ac 02 ff ff ff ff ff ff ff ff ff 01"));
}

TEST(Golden, MembershipAsBitmask) {
  const plan::Membership membership{.num_tokens = 10,
                                    .tokens = {1, 2, 9},
                                    .entry_begin = {0, 1, 3, 4},
                                    .columns = {3, 0, 5, 255},
                                    .weights = {1.0F, 0.5F, -2.0F, 0.25F}};
  EXPECT_EQ(encoded(membership, 256), from_hex("01 03"        // version; bitmask, 4-bit counts
                                               "06 02"        // tokens 1, 2 and 9
                                               "21 01"        // counts 1, 2, 1
                                               "03 00 05 ff"  // columns
                                               "00 00 80 3f 00 00 00 3f"
                                               "00 00 00 c0 00 00 80 3e"));
}

TEST(Golden, MembershipAsGapsWithWideColumns) {
  const plan::Membership membership{.num_tokens = 1000,
                                    .tokens = {5, 300, 301},
                                    .entry_begin = {0, 2, 3, 4},
                                    .columns = {299, 0, 256, 7},
                                    .weights = {1.0F, 0.5F, -2.0F, 0.25F}};
  EXPECT_EQ(encoded(membership, 300), from_hex("01 06"           // version; 4-bit counts, wide
                                               "03 05 a6 02 00"  // 3 tokens; gaps 5, 294, 0
                                               "12 01"           // counts 2, 1, 1
                                               "2b 01 00 00 00 01 07 00"
                                               "00 00 80 3f 00 00 00 3f"
                                               "00 00 00 c0 00 00 80 3e"));
}

TEST(Golden, MembershipWithByteCounts) {
  plan::Membership membership = empty_membership(1);
  membership.tokens = {0};
  membership.entry_begin = {0, 16};
  auto expected = from_hex(
      "01 01"  // version; bitmask
      "01"     // token 0
      "10");   // 16 entries
  for (std::uint16_t column = 0; column < 16; ++column) {
    membership.columns.push_back(column);
    membership.weights.push_back(1.0F);
    expected.push_back(static_cast<std::byte>(column));
  }
  for (int i = 0; i < 16; ++i) {
    for (const std::byte byte : from_hex("00 00 80 3f")) expected.push_back(byte);
  }
  EXPECT_EQ(encoded(membership, 16), expected);
}

TEST(Golden, EmptyMembership) {
  EXPECT_EQ(encoded(empty_membership(0), 4), from_hex("01 03"));
  EXPECT_EQ(encoded(empty_membership(100), 4), from_hex("01 02 00"));
}

}  // namespace
}  // namespace ferry::wire::test
