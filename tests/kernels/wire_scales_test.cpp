// Every code there is under scales of every kind: NaN, infinite, zero, denormal, extreme, negative.
// All four kernels that read or write rows as they cross, into every dtype, on every SIMD target,
// called as they are and from a thread that flushes denormals and rounds up.

#include <cmath>
#include <limits>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "oracle.hpp"
#include "support/wire_numbers.hpp"

namespace ferry::kernels {
namespace {

/// Scales as encoders write them, to the largest there is, and those that only a forger would send;
/// but not finite ones that are larger, of which docs/wire-formats.md promises nothing.
std::vector<float> scales_of(WireFormat format) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  return {0.F,
          -0.F,
          0x1p-149F,
          -0x1.8p-140F,
          0x1p-127F,
          0x1p-126F,
          0x1.fp-120F,
          -0.3F,
          0.7F,
          0x1.8p118F,
          0x1.fffff8p127F / (format == WireFormat::int8 ? 127 : 448),
          kInfinity,
          -kInfinity,
          std::numeric_limits<float>::quiet_NaN(),
          testing::float_from_bits(0xFFC12345U),
          testing::float_from_bits(0x7FFFFFFFU)};  // rounded up, it is no NaN any more
}

constexpr std::size_t kCodes = 256;
/// Of a row: all codes under the scale, then a short block under another one.
constexpr std::size_t kColumns = kCodes + 33;
constexpr float kLastScale = 0.25F;

/// Calls a kernel as a thread does that flushes denormals and rounds up, where that can be set.
template <typename Call>
void call_flushing(const Call& call) {
#if defined(__SSE__)
  constexpr unsigned kFlushAndRoundUp = 0x1F80U | 0x8000U | 0x0040U | 0x4000U;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kFlushAndRoundUp);
  call();
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(after & ~0x3FU, kFlushAndRoundUp);
#else
  call();
#endif
}

float with_one_nan(float value) {
  return std::isnan(value) ? testing::float_from_bits(0x7FC00000U) : value;
}

/// Columns of any numbers that are not too large to be multiplied.
std::vector<float> some_values(DType dtype) {
  std::vector<float> values(kColumns);
  for (std::size_t c = 0; c < kColumns; ++c) {
    std::byte at[4];
    const float value = (c % 2 == 0 ? 0.3F : -1.7F) + static_cast<float>(c) * 0x1p-6F;
    testing::store_bits(dtype, testing::bits_of(dtype, value), at);
    values[c] = testing::value_of(dtype, at);
  }
  return values;
}

std::vector<std::byte> stored(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> row(values.size() * element_bytes(dtype));
  for (std::size_t c = 0; c < values.size(); ++c) {
    testing::store_bits(dtype, testing::bits_of(dtype, values[c]),
                        row.data() + c * element_bytes(dtype));
  }
  return row;
}

const std::byte* bytes_at(const std::vector<float>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

class WireScales : public ::testing::TestWithParam<std::string> {
 protected:
  /// For each format, block and scale, called plainly and while denormals are flushed.
  template <typename Check>
  void for_each_row(const Check& check) {
    const testing::PinnedTarget pinned(GetParam());
    for (const WireFormat format : {WireFormat::fp8_e4m3fn, WireFormat::int8}) {
      for (const std::int64_t block : {64, 256}) {
        for (const float scale : scales_of(format)) {
          SCOPED_TRACE(fmt::format("{}, blocks of {}, scale {}", to_string(format), block, scale));
          make_row({format, block}, scale);
          check([](const auto& call) { call(); });
          check([](const auto& call) { call_flushing(call); });
          if (HasFatalFailure()) return;
        }
      }
    }
  }

  /// Row of `dtype` against numbers, of which NaNs are equal.
  void expect_row(DType dtype, const std::byte* row, const std::vector<float>& expected) {
    for (std::size_t c = 0; c < kColumns; ++c) {
      const std::byte* const at = row + c * element_bytes(dtype);
      if (std::isnan(expected[c]) && std::isnan(testing::value_of(dtype, at))) continue;
      ASSERT_EQ(testing::load_bits(dtype, at), testing::bits_of(dtype, expected[c]))
          << to_string(dtype) << ", column " << c << " of code " << c % kCodes;
    }
  }

  RowFormat wire_;
  std::vector<std::byte> row_;
  std::vector<float> values_;  ///< that it decodes to

 private:
  void make_row(const RowFormat& wire, float scale) {
    wire_ = wire;
    row_.assign(wire.row_bytes(kColumns), std::byte{0});
    const std::size_t num_blocks = (kColumns + wire.block_columns - 1) / wire.block_columns;
    for (std::size_t b = 0; b < num_blocks; ++b) {
      const float of_block = b * wire.block_columns < kCodes ? scale : kLastScale;
      std::memcpy(&row_[b * 4], &of_block, 4);
    }
    for (std::size_t c = 0; c < kColumns; ++c) row_[num_blocks * 4 + c] = std::byte(c % kCodes);
    values_.resize(kColumns);
    support::decode_row({wire.format, wire.block_columns}, row_, values_);
  }
};

TEST_P(WireScales, PushedRowsAreWhatTheyDecodeTo) {
  for_each_row([this](const auto& called) {
    for (const DType dtype : testing::kDTypes) {
      std::vector<std::byte> out(kColumns * element_bytes(dtype));
      std::byte* const target = out.data();
      const PushRow row{row_.data(), 0, 1};
      called([&] { push_rows({wire_, dtype, kColumns, {&row, 1}, {&target, 1}}); });
      ASSERT_NO_FATAL_FAILURE(expect_row(dtype, out.data(), values_));
    }
  });
}

TEST_P(WireScales, PackedRowsAreTheOracles) {
  for_each_row([this](const auto& called) {
    std::vector<std::byte> out(wire_.row_bytes(kColumns));
    const std::byte* const from = bytes_at(values_);
    called([&] { pack_rows({DType::f32, wire_, kColumns, {&from, 1}, out.data()}); });
    ASSERT_EQ(out, support::encode_row({wire_.format, wire_.block_columns}, values_));
  });
}

TEST_P(WireScales, SumsAreThoseOfWhatRowsDecodeTo) {
  const std::vector<float> plain = some_values(DType::f32);
  for_each_row([&](const auto& called) {
    for (const bool weighted : {false, true}) {
      // The row alone, and with a row of the home node.
      for (const std::size_t count : {1U, 2U}) {
        std::vector<SumTerm> terms{{row_.data(), -0.6F, wire_.format, weighted, true, true},
                                   {bytes_at(plain), 0.3F, WireFormat::f32, weighted, true, true}};
        terms.resize(count);
        std::vector<SumTerm> decoded = terms;
        decoded[0].row = bytes_at(values_);
        decoded[0].format = WireFormat::f32;
        std::vector<float> sums(kColumns);
        for (std::size_t c = 0; c < kColumns; ++c) {
          sums[c] = with_one_nan(testing::sum_column(decoded, c));
        }
        const auto sum_to = [&](const RowFormat& format) {
          std::vector<std::byte> out(format.row_bytes(kColumns));
          const SumRow row{out.data(), 0, static_cast<std::uint32_t>(count)};
          called([&] { sum_rows({format, kColumns, {&row, 1}, terms, wire_.block_columns}); });
          return out;
        };
        for (const DType dtype : testing::kDTypes) {
          ASSERT_NO_FATAL_FAILURE(expect_row(dtype, sum_to(dtype).data(), sums));
        }
        ASSERT_EQ(sum_to(wire_), support::encode_row({wire_.format, wire_.block_columns}, sums));
      }
    }
  });
}

/// The dot product as scale_rows defines it.
float dot_product(const std::vector<float>& a, const std::vector<float>& b) {
  float lanes[16] = {};
  for (std::size_t c = 0; c < a.size(); ++c) {
    const float product = a[c] * b[c];
    lanes[c % 16] += product;
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return with_one_nan(lanes[0]);
}

TEST_P(WireScales, ScaledRowsAreThoseOfWhatRowsDecodeTo) {
  for_each_row([this](const auto& called) {
    for (const DType dtype : testing::kDTypes) {
      const std::vector<float> y = some_values(dtype);
      const std::vector<std::byte> y_row = stored(dtype, y);
      std::vector<std::byte> out(kColumns * element_bytes(dtype));
      float dot = 0;
      const ScaleTarget target{out.data(), 0.7F, y_row.data(), &dot};
      const PushRow row{row_.data(), 0, 1};
      called([&] { scale_rows({wire_, dtype, kColumns, {&row, 1}, {&target, 1}}); });
      std::vector<float> scaled = values_;
      for (float& value : scaled) value *= 0.7F;
      ASSERT_NO_FATAL_FAILURE(expect_row(dtype, out.data(), scaled));
      ASSERT_EQ(testing::float_bits(dot), testing::float_bits(dot_product(values_, y)))
          << to_string(dtype);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Targets, WireScales, ::testing::ValuesIn(simd_targets()),
                         [](const auto& target) { return target.param; });

}  // namespace
}  // namespace ferry::kernels
