// Row summaries: varints that end where they end, and nothing else.

#include <gtest/gtest.h>

#include <limits>

#include "samples.hpp"
#include "wire/bytes.hpp"

namespace ferry::wire::test {
namespace {

constexpr std::uint64_t kSummarySeed = 4242;

TEST(RowSummary, ComesBackAndLeavesTheRest) {
  SCOPED_TRACE(::testing::Message() << "seed " << kSummarySeed);
  std::mt19937_64 rng(kSummarySeed);
  for (const std::size_t num_nodes : {0, 1, 2, 7, 512}) {
    RowSummary summary;
    summary.rows_to_node.resize(num_nodes);
    for (auto& rows : summary.rows_to_node) {
      for (auto& value : rows) value = rng() >> (rng() % 64);
    }
    std::vector<std::byte> bytes;
    encode_row_summary(summary, bytes);
    const std::size_t own = bytes.size();
    bytes.insert(bytes.end(), 5, std::byte{0xFF});
    const ExactBytes exact(bytes);
    Bytes rest = exact.span();
    RowSummary decoded;
    const auto error = decode_row_summary(rest, num_nodes, decoded);
    ASSERT_FALSE(error) << *error;
    EXPECT_EQ(decoded, summary);
    EXPECT_EQ(rest.data(), exact.span().data() + own);
    EXPECT_EQ(rest.size(), 5U);

    for (std::size_t size = 0; size < own; ++size) {
      const ExactBytes cut(Bytes(bytes).first(size));
      Bytes short_rest = cut.span();
      EXPECT_TRUE(decode_row_summary(short_rest, num_nodes, decoded)) << size;
      EXPECT_EQ(short_rest.size(), size);
      EXPECT_TRUE(decoded.rows_to_node.empty());
    }
  }
}

std::string summary_refusal(std::string_view hex, std::size_t num_nodes) {
  const ExactBytes exact(from_hex(hex));
  Bytes rest = exact.span();
  RowSummary decoded;
  return decode_row_summary(rest, num_nodes, decoded).value_or("accepted");
}

TEST(RowSummary, RefusesWhatIsNoVarint) {
  const std::string tail = " is not a varint; expected at most 10 bytes, in the shortest form, "
                           "below 2^64";
  EXPECT_EQ(summary_refusal("00 00 ff ff ff ff ff ff ff ff ff 01", 1), "accepted");
  EXPECT_EQ(summary_refusal("00 00 ff ff ff ff ff ff ff ff ff 02", 1),
            "row summary: rows_to_node[0,2] at byte 2" + tail);
  EXPECT_EQ(summary_refusal("00 80 00 01", 1), "row summary: rows_to_node[0,1] at byte 1" + tail);
  EXPECT_EQ(summary_refusal("ff ff ff ff ff ff ff ff ff ff 01 00 00", 1),
            "row summary: rows_to_node[0,0] at byte 0" + tail);
}

TEST(RowSummary, AllocatesNoMoreThanTheBytesJustify) {
  EXPECT_EQ(summary_refusal("00 00 00", std::numeric_limits<std::size_t>::max()),
            "row summary: 3 bytes are left; expected at least 3 for each of 18446744073709551615 "
            "nodes");
}

TEST(Varint, SizesAreExact) {
  for (int bits = 0; bits <= 64; ++bits) {
    for (const std::uint64_t below : {0, 1}) {
      const std::uint64_t value = (bits == 64 ? 0 : 1ULL << bits) - below;
      std::byte buffer[kMaxVarintBytes];
      const auto size = static_cast<std::size_t>(store_varint(buffer, value) - buffer);
      EXPECT_EQ(size, varint_bytes(value)) << value;
      Bytes bytes(buffer, size);
      std::uint64_t decoded = ~value;
      EXPECT_TRUE(take_varint(bytes, decoded));
      EXPECT_EQ(decoded, value);
      EXPECT_TRUE(bytes.empty());
    }
  }
}

}  // namespace
}  // namespace ferry::wire::test
