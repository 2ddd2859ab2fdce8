// Numbers of any width come back, from buffers of exactly the bytes that they need.

#include "wire/bits.hpp"

#include <gtest/gtest.h>

#include <random>

#include "samples.hpp"

namespace ferry::wire::test {
namespace {

TEST(Bits, PackedNumbersComeBackInEveryWidthAndLength) {
  std::mt19937_64 rng(5);
  for (int width = 0; width <= 16; ++width) {
    for (std::size_t count = 0; count <= 70; ++count) {
      std::vector<std::uint16_t> values(count);
      for (std::uint16_t& value : values)
        value = static_cast<std::uint16_t>(rng() & low_bits(width));
      const std::size_t size = (count * static_cast<std::size_t>(width) + 7) / 8;
      const ExactBytes exact(std::vector<std::byte>(size, std::byte{0xAA}));
      auto* const begin = const_cast<std::byte*>(exact.span().data());
      ASSERT_EQ(store_packed(begin, values, width), begin + size);
      for (std::size_t bit = 0; bit < size * 8; ++bit) {
        const std::size_t i = width == 0 ? 0 : bit / static_cast<std::size_t>(width);
        const int expected =
            i < count ? values[i] >> (bit % static_cast<std::size_t>(width)) & 1 : 0;
        ASSERT_EQ(std::to_integer<int>(begin[bit / 8]) >> (bit % 8) & 1, expected)
            << width << " bits, " << count << " numbers, bit " << bit;
      }
      std::vector<std::uint16_t> loaded(count, 0xFFFF);
      load_packed(exact.span(), width, loaded);
      ASSERT_EQ(loaded, values) << width << " bits";
    }
  }
}

TEST(Bits, BitmapsComeBack) {
  std::mt19937_64 rng(6);
  for (std::size_t bits = 0; bits <= 200; ++bits) {
    std::vector<std::uint64_t> positions;
    for (std::uint64_t bit = 0; bit < bits; ++bit) {
      if (rng() % 3 == 0) positions.push_back(bit);
    }
    const ExactBytes exact(std::vector<std::byte>((bits + 7) / 8, std::byte{0xAA}));
    store_bitmap(const_cast<std::byte*>(exact.span().data()), exact.span().size(), positions.size(),
                 [&](std::uint64_t i) { return positions[i]; });
    ASSERT_EQ(count_set_bits(exact.span()), positions.size());
    std::vector<std::uint64_t> found;
    for_each_set_bit(exact.span(), [&](std::uint64_t bit) { found.push_back(bit); });
    ASSERT_EQ(found, positions);
  }
}

TEST(Bits, GammaCodesComeBackAndEndWithTheirBytes) {
  std::vector<std::uint64_t> values;
  for (int n = 0; n < 32; ++n) {
    for (const unsigned long long offset : {0ULL, 1ULL, (1ULL << n) - 1}) {
      values.push_back((1ULL << n) + std::min(offset, (1ULL << n) - 1));
    }
  }
  std::uint64_t bits = 0;
  for (const std::uint64_t value : values) bits += gamma_bits(value);
  const ExactBytes exact(std::vector<std::byte>((bits + 7) / 8));
  auto* const begin = const_cast<std::byte*>(exact.span().data());
  BitWriter writer(begin);
  for (const std::uint64_t value : values) writer.put_gamma(value);
  ASSERT_EQ(writer.end(), begin + exact.span().size());
  BitReader reader(exact.span());
  for (const std::uint64_t value : values) {
    std::uint64_t taken = 0;
    ASSERT_TRUE(reader.take_gamma(taken));
    ASSERT_EQ(taken, value);
  }
  EXPECT_EQ(reader.bytes_taken(), exact.span().size());
  EXPECT_TRUE(reader.rest_of_byte_is_zero());
  std::uint64_t none = 0;
  EXPECT_FALSE(reader.take_gamma(none));  // what is left are zeros

  // One byte fewer: the last value is refused, and nothing behind it is read.
  const ExactBytes cut(exact.span().first(exact.span().size() - 1));
  BitReader short_reader(cut.span());
  std::size_t taken = 0;
  while (short_reader.take_gamma(none)) ++taken;
  EXPECT_EQ(taken, values.size() - 1);
}

}  // namespace
}  // namespace ferry::wire::test
