// Conversions between dtypes, element by element against the oracle, on every SIMD target. The
// 16-bit formats are tested in full; FP32 at every border between two 16-bit values and at random.

#include <vector>

#include <gtest/gtest.h>

#include "ferry/error.hpp"
#include "oracle.hpp"

namespace ferry::kernels {
namespace {

using testing::PinnedTarget;

/// The bits of a row.
struct Row {
  DType dtype;
  std::vector<std::byte> bytes;
  std::size_t hidden() const { return bytes.size() / element_bytes(dtype); }
};

Row row_of(DType dtype, const std::vector<std::uint32_t>& bits) {
  Row row{dtype, std::vector<std::byte>(bits.size() * element_bytes(dtype))};
  for (std::size_t i = 0; i < bits.size(); ++i) {
    testing::store_bits(dtype, bits[i], row.bytes.data() + i * element_bytes(dtype));
  }
  return row;
}

/// Every value of a 16-bit dtype; for FP32 what lies around every border of both of them.
std::vector<std::uint32_t> interesting_bits(DType dtype) {
  std::vector<std::uint32_t> bits;
  if (dtype != DType::f32) {
    for (std::uint32_t i = 0; i < 65536; ++i) bits.push_back(i);
    return bits;
  }
  for (std::uint32_t i = 0; i < 65536; ++i) {
    for (const std::uint32_t low : {0U, 1U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      bits.push_back(i << 16 | low);  // around the halves of bf16
    }
    bits.push_back(i << 16 | static_cast<std::uint32_t>(base::mix64(i) & 0xFFFF));
  }
  for (std::uint32_t half = 0; half < 32768; ++half) {
    std::byte at[2];
    testing::store_bits(DType::f16, half, at);
    const std::uint32_t exact = testing::float_bits(testing::value_of(DType::f16, at));
    for (const int step : {-0x1001, -0x1000, -0xFFF, -1, 0, 1, 0xFFF, 0x1000, 0x1001}) {
      bits.push_back(exact + static_cast<std::uint32_t>(step));  // around the halves of f16
      bits.push_back((exact + static_cast<std::uint32_t>(step)) ^ 0x80000000U);
    }
  }
  // Borders between f16 denormals: odd multiples of 2^-25, and their neighbours.
  for (std::uint32_t i = 0; i < 2048; ++i) {
    const std::uint32_t border = testing::float_bits(static_cast<float>(i) * 0x1p-25F);
    for (const int step : {-1, 0, 1}) bits.push_back(border + static_cast<std::uint32_t>(step));
  }
  return bits;
}

void expect_converted(const Row& source, const Row& got) {
  ASSERT_EQ(source.hidden(), got.hidden());
  const bool copied = source.dtype == got.dtype;
  int failures = 0;
  for (std::size_t i = 0; i < source.hidden() && failures < 5; ++i) {
    const std::byte* from = source.bytes.data() + i * element_bytes(source.dtype);
    const std::uint32_t before = testing::load_bits(source.dtype, from);
    std::uint32_t expected = before;
    if (!copied) {
      expected = testing::bits_of(got.dtype, testing::value_of(source.dtype, from));
      // f16 hardware quiets a NaN on the way up; bf16 to f32 is a shift and keeps every bit.
      const bool is_nan = (expected & 0x7FFFFFFFU) > 0x7F800000U && got.dtype == DType::f32;
      if (is_nan && source.dtype == DType::f16) expected |= 0x00400000U;
    }
    const std::uint32_t result =
        testing::load_bits(got.dtype, got.bytes.data() + i * element_bytes(got.dtype));
    EXPECT_EQ(result, expected) << to_string(source.dtype) << " to " << to_string(got.dtype)
                                << std::hex << ", bits 0x" << before;
    failures += result != expected ? 1 : 0;
  }
}

TEST(Convert, EveryValueOnEverySimdTarget) {
  for (const DType from : testing::kDTypes) {
    const Row source = row_of(from, interesting_bits(from));
    for (const DType to : testing::kDTypes) {
      for (const std::string& name : simd_targets()) {
        SCOPED_TRACE(name);
        const PinnedTarget pinned(name);
        Row pushed{to, std::vector<std::byte>(source.hidden() * element_bytes(to))};
        const PushRow row{source.bytes.data(), 0, 1};
        std::byte* target = pushed.bytes.data();
        push_rows({from, to, static_cast<std::int64_t>(source.hidden()), {&row, 1}, {&target, 1}});
        expect_converted(source, pushed);
        Row packed{to, std::vector<std::byte>(pushed.bytes.size())};
        const std::byte* one = source.bytes.data();
        pack_rows({from, to, static_cast<std::int64_t>(source.hidden()), {&one, 1},
                   packed.bytes.data()});
        EXPECT_EQ(pushed.bytes, packed.bytes);
      }
    }
  }
}

TEST(Convert, PackWritesRowsOneAfterTheOtherAndNothingBehind) {
  for (const std::size_t hidden : {1U, 7U, 33U, 2048U, 2049U, 4100U}) {
    for (const DType from : testing::kDTypes) {
      for (const DType to : testing::kDTypes) {
        testing::GuardedMemory memory(3 * hidden * 4);
        std::vector<std::vector<std::byte>> rows(3);
        std::vector<const std::byte*> sources;
        for (std::size_t r = 0; r < rows.size(); ++r) {
          rows[r].resize(hidden * element_bytes(from));
          testing::fill_row(from, r + hidden, hidden, rows[r].data());
          sources.push_back(rows[r].data());
        }
        std::byte* out = memory.last(3 * hidden * element_bytes(to));
        pack_rows({from, to, static_cast<std::int64_t>(hidden), sources, out});
        for (std::size_t r = 0; r < rows.size(); ++r) {
          const std::byte* begin = out + r * hidden * element_bytes(to);
          expect_converted({from, rows[r]}, {to, {begin, begin + hidden * element_bytes(to)}});
        }
      }
    }
  }
}

TEST(SimdTargets, RefusesAnUnknownName) {
  EXPECT_FALSE(simd_targets().empty());
  try {
    pin_simd_target("SSE17");
    FAIL() << "the name was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find(simd_targets().front()), std::string::npos);
  }
}

TEST(SimdTargets, APinDoesNotShortenTheList) {
  const auto all = simd_targets();
  const PinnedTarget pinned(all.back());
  EXPECT_EQ(simd_targets(), all);
}

}  // namespace
}  // namespace ferry::kernels
