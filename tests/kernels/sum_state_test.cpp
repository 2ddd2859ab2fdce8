// The corners of a sum: no fused multiply-add, signed zero, denormals, NaN and Inf, and the
// floating-point state of the caller.

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "oracle.hpp"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace ferry::kernels {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Term {
  std::vector<float> row;
  float weight = 1.0F;
  bool weighted = true;
};

/// The sum of FP32 rows that all belong to one rank.
std::vector<float> sum_of(const std::vector<Term>& rows) {
  std::vector<SumTerm> terms;
  for (const Term& term : rows) {
    terms.push_back({reinterpret_cast<const std::byte*>(term.row.data()), term.weight,
                     WireFormat::f32, term.weighted, false, false});
  }
  terms.back().ends_rank = terms.back().ends_node = true;
  std::vector<float> out(rows.front().row.size(), 77.0F);
  const SumRow row{reinterpret_cast<std::byte*>(out.data()), 0,
                   static_cast<std::uint32_t>(terms.size())};
  sum_rows({DType::f32, static_cast<std::int64_t>(out.size()), {&row, 1}, terms});
  return out;
}

template <class Body>
void on_every_target(const Body& body) {
  for (const std::string& name : simd_targets()) {
    SCOPED_TRACE(name);
    const testing::PinnedTarget pinned(name);
    body();
  }
}

TEST(SumState, AProductIsRoundedBeforeItIsAdded) {
  // (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24; rounding the product loses the last term, fusing keeps it.
  const float x = 1.0F + 0x1p-12F;
  on_every_target([&] {
    const auto out = sum_of({{std::vector<float>(40, -1.0F)}, {std::vector<float>(40, x), x}});
    for (const float value : out) EXPECT_EQ(value, 0x1p-11F);
  });
}

TEST(SumState, ASumStartsFromItsFirstTerm) {
  on_every_target([&] {
    for (const bool weighted : {false, true}) {
      const auto one = sum_of({{std::vector<float>(40, -0.0F), 1.0F, weighted}});
      const auto two = sum_of({{std::vector<float>(40, -0.0F), 1.0F, weighted},
                               {std::vector<float>(40, -0.0F), 1.0F, weighted}});
      for (std::size_t i = 0; i < one.size(); ++i) {
        EXPECT_TRUE(std::signbit(one[i]));
        EXPECT_TRUE(std::signbit(two[i]));
      }
    }
  });
}

TEST(SumState, ARowWithoutTermsBecomesZero) {
  for (const DType dtype : testing::kDTypes) {
    std::vector<std::byte> out(37 * element_bytes(dtype), std::byte{0xFF});
    const SumRow row{out.data(), 0, 0};
    sum_rows({dtype, 37, {&row, 1}, {}});
    EXPECT_EQ(out, std::vector<std::byte>(out.size()));
  }
}

TEST(SumState, NaNHasOnePatternAndStaysInItsColumn) {
  on_every_target([&] {
    std::vector<float> a(40, 1.0F);
    std::vector<float> b(40, 2.0F);
    a[3] = testing::float_from_bits(0xFFC12345U);
    b[3] = testing::float_from_bits(0x7FC54321U);
    a[17] = kInfinity;
    b[17] = -kInfinity;
    a[39] = kInfinity;
    const auto out = sum_of({{a}, {b}});
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (i == 3 || i == 17) {
        EXPECT_EQ(testing::float_bits(out[i]), 0x7FC00000U) << i;
      } else {
        EXPECT_EQ(out[i], i == 39 ? kInfinity : 3.0F) << i;
      }
    }
    // An expert that was chosen with weight 0 counts with that weight.
    EXPECT_TRUE(std::isnan(sum_of({{{kInfinity}, 0.0F}})[0]));
    EXPECT_TRUE(std::isnan(sum_of({{{kNaN}, 0.0F}, {{1.0F}}})[0]));
  });
}

TEST(SumState, DenormalsAreKept) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  on_every_target([&] {
    EXPECT_EQ(sum_of({{{tiny}}, {{2 * tiny}}})[0], 3 * tiny);
    EXPECT_EQ(sum_of({{{0x1p-126F}, 0.5F}})[0], 0x1p-127F);
  });
}

#if defined(__SSE__)
TEST(SumState, TheStateOfTheCallerDoesNotMatterAndComesBack) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  constexpr unsigned kFlushAndRoundUp = 0x1F80U | 0x8000U | 0x0040U | 0x4000U;
  on_every_target([&] {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(kFlushAndRoundUp);
    const auto sums = sum_of({{{tiny, 1.0F}}, {{tiny, 0x1p-25F}}});
    const float denormal_half = 0x1p-24F;
    std::uint16_t half = 0;
    std::byte* target = reinterpret_cast<std::byte*>(&half);
    const PushRow row{reinterpret_cast<const std::byte*>(&denormal_half), 0, 1};
    push_rows({DType::f32, DType::f16, 1, {&row, 1}, {&target, 1}});
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after, kFlushAndRoundUp);
    EXPECT_EQ(testing::float_bits(sums[0]), 2U);
    EXPECT_EQ(sums[1], 1.0F);
    EXPECT_EQ(half, 1U);
  });
}
#endif

TEST(SumState, ATreeThatDoesNotEndIsRefused) {
  const float value = 1.0F;
  float out = 0.0F;
  const SumTerm term{
      reinterpret_cast<const std::byte*>(&value), 1.0F, WireFormat::f32, true, true, false};
  const SumRow row{reinterpret_cast<std::byte*>(&out), 0, 1};
  EXPECT_ANY_THROW(sum_rows({DType::f32, 1, {&row, 1}, {&term, 1}}));
}

}  // namespace
}  // namespace ferry::kernels
