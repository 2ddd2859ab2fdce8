// One small example of each header and each form of a membership, byte by byte. The bytes follow
// from docs/wire-formats.md, not from the code; if one changes, kVersion must change.

#include <gtest/gtest.h>

#include <limits>
#include <string>

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

using enum ListEncoding;

/// Tokens 1, 2 and 9 of 10; the example of docs/wire-formats.md.
plan::Membership three_tokens() {
  return {.num_tokens = 10,
          .tokens = {1, 2, 9},
          .entry_begin = {0, 1, 3, 4},
          .columns = {3, 0, 5, 6},
          .weights = {1.0F, 0.5F, -2.0F, 0.25F}};
}

TEST(Golden, MembershipTokensAsBitmaskAndPackedExperts) {
  EXPECT_EQ(encoded(three_tokens(), 8, {bitmask, packed}),
            from_hex(with_weights("02 09"      // version; bitmask, packed
                                  "06 02"      // tokens 1, 2 and 9
                                  "01 02"      // counts in 1 bit: 1, 2, 1
                                  "43 0d")));  // columns in 3 bits: 3, 0, 5, 6
}

TEST(Golden, MembershipRawLists) {
  EXPECT_EQ(encoded(three_tokens(), 8, {raw, raw}),
            from_hex(with_weights("02 00"                 // version; raw, raw
                                  "03 01 00 02 00 09 00"  // 3 tokens
                                  "00 01 00"              // 1, 2 and 1 entries
                                  "03 00 05 06")));       // columns
}

TEST(Golden, MembershipRawListsOfWideNumbers) {
  plan::Membership membership = three_tokens();
  membership.num_tokens = 70'000;
  membership.tokens = {1, 2, 65'538};
  membership.columns = {299, 0, 256, 7};
  EXPECT_EQ(encoded(membership, 300, {raw, raw}),
            from_hex(with_weights("02 00"
                                  "03 01 00 00 00 02 00 00 00 02 00 01 00"
                                  "00 01 00"
                                  "2b 01 00 00 00 01 07 00")));
}

TEST(Golden, MembershipPackedTokens) {
  plan::Membership membership = three_tokens();
  membership.num_tokens = 1000;
  membership.tokens = {5, 300, 301};
  // 1000 / 3 is at least 2^8: 8 lower bits 05, 2c, 2d; upper parts 0, 1, 1 at bits 0, 2, 3 of
  // 3 + 999 / 2^8 = 6.
  EXPECT_EQ(encoded(membership, 8, {packed, packed}), from_hex(with_weights("02 0a"
                                                                            "03 05 2c 2d 0d"
                                                                            "01 02 43 0d")));
}

TEST(Golden, MembershipRunsOfTokens) {
  // Token 0 does not come; runs 1, 2, 6 and 1: 0 | 1 | 0 1 0 | 0 0 1 0 1 | 1
  EXPECT_EQ(encoded(three_tokens(), 8, {runs, packed}), from_hex(with_weights("02 0b"
                                                                              "8a 06"
                                                                              "01 02 43 0d")));
}

TEST(Golden, MembershipBitmasksOfExperts) {
  // Token 2 names columns 0 and 5, whose weights descend. Weights are sent by column.
  EXPECT_EQ(encoded(three_tokens(), 8, {bitmask, bitmask}), from_hex(with_weights("02 05"
                                                                                  "06 02"
                                                                                  "08 21 40")));
  plan::Membership swapped = three_tokens();
  swapped.columns = {3, 5, 0, 6};
  EXPECT_EQ(encoded(swapped, 8, {bitmask, bitmask}),
            from_hex("02 05 06 02 08 21 40"
                     "00 00 80 3f 00 00 00 c0 00 00 00 3f 00 00 80 3e"));
}

TEST(Golden, MembershipRunsOfExperts) {
  plan::Membership membership = three_tokens();
  membership.entry_begin = {0, 1, 2, 4};
  membership.columns = {3, 3, 0, 5};
  EXPECT_EQ(encoded(membership, 8, {bitmask, runs}),
            from_hex(with_weights("02 0d"
                                  "06 02"
                                  "0a"         // runs of 2 tokens and of 1: 0 1 0 | 1
                                  "01 02"      // counts in 1 bit: 1, 2
                                  "43 01")));  // columns in 3 bits: 3, 0, 5
}

TEST(Golden, MembershipWithEndMarks) {
  // Most tokens have one entry: a mark for each entry takes less than 2 bits for each token.
  plan::Membership membership = empty_membership(5);
  membership.tokens = {0, 1, 2, 3, 4};
  membership.entry_begin = {0, 1, 2, 3, 4, 7};
  membership.columns = {0, 1, 2, 3, 3, 2, 1};
  membership.weights.assign(7, 1.0F);
  const MembershipForm form{.num_columns = 4, .weights = false};
  EXPECT_EQ(encoded(membership, form, {bitmask, packed}),
            from_hex("02 29"     // version; bitmask, packed, no weights
                     "1f"        // all tokens
                     "ff 4f"     // end marks: 1 1 1 1 0 0 1
                     "e4 1b"));  // columns in 2 bits
}

TEST(Golden, MembershipWithSlots) {
  plan::Membership membership = three_tokens();
  membership.slots = {1, 0, 7, 2};
  const MembershipForm form{.num_columns = 8, .slots = true};
  EXPECT_EQ(encoded(membership, form, {bitmask, packed}),
            from_hex(with_weights("02 19 06 02 01 02 43 0d"
                                  "01 00 07 02")));  // slots
}

TEST(Golden, EmptyMembership) {
  EXPECT_EQ(encoded(empty_membership(0), 4, {bitmask, packed}), from_hex("02 09"));
  EXPECT_EQ(encoded(empty_membership(100), 4, {packed, packed}), from_hex("02 0a 00"));
  EXPECT_EQ(encoded(empty_membership(0), 4, {runs, runs}), from_hex("02 0f"));
  // 0 | 100 = 0 0 0 0 0 0 1 0 0 1 0 0 1
  EXPECT_EQ(encoded(empty_membership(100), 4, {runs, raw}), from_hex("02 03 80 24"));
}

}  // namespace
}  // namespace ferry::wire::test
