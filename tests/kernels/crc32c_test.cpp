// CRC-32C against published check values and against itself in pieces.

#include <numeric>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/row_kernels.hpp"

namespace ferry::kernels {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

TEST(Crc32c, CheckValuesOfTheStandard) {
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xE3069283U);
  EXPECT_EQ(crc32c({}), 0U);
  // RFC 3720, B.4: 32 bytes of zeros, of ones, ascending, descending.
  std::vector<std::byte> block(32);
  EXPECT_EQ(crc32c(block), 0x8A9136AAU);
  std::fill(block.begin(), block.end(), std::byte{0xFF});
  EXPECT_EQ(crc32c(block), 0x62A8AB43U);
  for (int i = 0; i < 32; ++i) block[static_cast<std::size_t>(i)] = std::byte(i);
  EXPECT_EQ(crc32c(block), 0x46DD794EU);
  for (int i = 0; i < 32; ++i) block[static_cast<std::size_t>(i)] = std::byte(31 - i);
  EXPECT_EQ(crc32c(block), 0x113FDB5CU);
}

TEST(Crc32c, ChainsOverPieces) {
  std::vector<std::byte> data(5000);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = std::byte(i * 131 >> 3 & 0xFF);
  const std::span<const std::byte> all(data);
  for (const std::size_t cut : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{4096},
                                std::size_t{4999}, std::size_t{5000}}) {
    EXPECT_EQ(crc32c(all.subspan(cut), crc32c(all.first(cut))), crc32c(all)) << "cut at " << cut;
  }
}

TEST(Crc32c, SeesOneFlippedBit) {
  std::vector<std::byte> data(1000, std::byte{0x5A});
  const std::uint32_t before = crc32c(data);
  data[517] ^= std::byte{0x10};
  EXPECT_NE(crc32c(data), before);
}

}  // namespace
}  // namespace ferry::kernels
