// Rows as they cross: every kernel that writes or reads a wire format, byte by byte against the
// oracle of the formats on every SIMD target, and the error bounds of docs/wire-formats.md.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
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

using testing::PinnedTarget;

constexpr WireFormat kQuantised[] = {WireFormat::fp8_e4m3fn, WireFormat::int8};
constexpr std::int64_t kBlocks[] = {64, 128, 2048};
constexpr std::size_t kHidden[] = {1, 7, 64, 65, 128, 129, 2048, 2880, 4099};

/// What the values of a row are like.
enum class Kind { normal, log_normal, outlier, two_buckets, zeros, denormal, ties, special };
constexpr Kind kKinds[] = {Kind::normal, Kind::log_normal, Kind::outlier, Kind::two_buckets,
                           Kind::zeros,  Kind::denormal,   Kind::ties,    Kind::special};
constexpr Kind kFinite[] = {Kind::normal, Kind::log_normal, Kind::outlier, Kind::two_buckets,
                            Kind::zeros,  Kind::denormal,   Kind::ties};

float value_of_kind(Kind kind, std::mt19937_64& random, std::size_t column) {
  std::normal_distribution<float> normal;
  switch (kind) {
    case Kind::normal: return normal(random);
    case Kind::log_normal: return std::exp(3 * normal(random)) * (random() % 2 != 0 ? 1.F : -1.F);
    case Kind::outlier: return normal(random) * (column % 97 == 5 ? 1000.F : 1.F);
    case Kind::two_buckets: return random() % 2 != 0 ? 1e-6F : -1e3F;
    case Kind::zeros: return random() % 2 != 0 ? 0.F : -0.F;
    case Kind::denormal: return static_cast<float>(random() % 65536) * 0x1p-149F;
    case Kind::ties: {
      // A scale of 1 or of 448 / 127, and values half way between two codes, and beside it.
      if (column % 64 == 0) return column % 128 == 0 ? 448.F : 127.F;
      const auto steps = static_cast<float>(random() % 254) / 2.F;
      return std::ldexp(steps, -static_cast<int>(random() % 18)) * (random() % 2 != 0 ? 1.F : -1.F);
    }
    case Kind::special: {
      const float values[] = {std::numeric_limits<float>::infinity(), -0.F,
                              std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::max(), -1e-30F};
      return column % 300 == 70 ? values[random() % 5] : normal(random);
    }
  }
  return 0;
}

/// Values that the dtype can hold.
std::vector<float> values_of(Kind kind, DType dtype, std::size_t hidden, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values(hidden);
  for (std::size_t i = 0; i < hidden; ++i) {
    std::byte at[4];
    testing::store_bits(dtype, testing::bits_of(dtype, value_of_kind(kind, random, i)), at);
    values[i] = testing::value_of(dtype, at);
  }
  return values;
}

std::vector<std::byte> bytes_of(DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> row(values.size() * element_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    testing::store_bits(dtype, testing::bits_of(dtype, values[i]),
                        row.data() + i * element_bytes(dtype));
  }
  return row;
}

std::vector<std::byte> pack(DType dtype, const RowFormat& wire, const std::vector<float>& values) {
  const std::vector<std::byte> row = bytes_of(dtype, values);
  testing::GuardedMemory source(row.size());
  std::copy(row.begin(), row.end(), source.last(row.size()));
  const auto hidden = static_cast<std::int64_t>(values.size());
  testing::GuardedMemory out(wire.row_bytes(hidden));
  const std::byte* const from = source.last(row.size());
  std::byte* const to = out.last(wire.row_bytes(hidden));
  pack_rows({dtype, wire, hidden, {&from, 1}, to});
  return {to, to + wire.row_bytes(hidden)};
}

std::vector<float> decoded(const RowFormat& wire, std::size_t hidden,
                           const std::vector<std::byte>& bytes) {
  std::vector<float> values(hidden);
  support::decode_row({wire.format, wire.block_columns}, bytes, values);
  return values;
}

template <typename Body>
void wires_on_every_target(const Body& body) {
  for (const std::string& name : simd_targets()) {
    SCOPED_TRACE(name);
    const PinnedTarget pinned(name);
    body();
  }
}

template <typename Body>
void for_each_wire(const Body& body) {
  for (const WireFormat format : kQuantised) {
    for (const std::int64_t block : kBlocks) {
      for (const std::size_t hidden : kHidden) {
        SCOPED_TRACE(fmt::format("{}, blocks of {}, hidden {}", to_string(format), block, hidden));
        body(RowFormat(format, block), hidden);
      }
    }
  }
}

TEST(WireRows, PackIsTheOracles) {
  wires_on_every_target([] {
    for_each_wire([](const RowFormat& wire, std::size_t hidden) {
      for (const Kind kind : kKinds) {
        for (const DType dtype : testing::kDTypes) {
          const std::vector<float> values = values_of(kind, dtype, hidden, hidden);
          ASSERT_EQ(pack(dtype, wire, values),
                    support::encode_row({wire.format, wire.block_columns}, values))
              << to_string(dtype) << ", kind " << static_cast<int>(kind);
        }
      }
    });
  });
}

/// Rows of any codes at all under ordinary scales.
std::vector<std::byte> any_codes(const RowFormat& wire, std::size_t hidden, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto columns = static_cast<std::int64_t>(hidden);
  std::vector<std::byte> bytes(wire.row_bytes(columns));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (std::size_t at = 0; at < scale_bytes(wire.format, columns, wire.block_columns); at += 4) {
    const float scale = std::ldexp(1.F + static_cast<float>(random() % 1024) * 0x1p-10F, -3);
    std::memcpy(&bytes[at], &scale, 4);
  }
  return bytes;
}

TEST(WireRows, PushIsTheOracles) {
  wires_on_every_target([] {
    for_each_wire([](const RowFormat& wire, std::size_t hidden) {
      const std::vector<std::byte> row = any_codes(wire, hidden, hidden);
      testing::GuardedMemory source(row.size());
      std::copy(row.begin(), row.end(), source.last(row.size()));
      const std::vector<float> expected = decoded(wire, hidden, row);
      for (const DType dtype : testing::kDTypes) {
        const std::size_t bytes = hidden * element_bytes(dtype);
        testing::GuardedMemory one(bytes);
        testing::GuardedMemory two(bytes);
        std::byte* const targets[] = {one.last(bytes), two.begin()};
        const PushRow rows[] = {{source.last(row.size()), 0, 2}};
        push_rows({wire, dtype, static_cast<std::int64_t>(hidden), rows, targets});
        for (std::size_t i = 0; i < hidden; ++i) {
          const std::uint32_t got =
              testing::load_bits(dtype, targets[0] + i * element_bytes(dtype));
          ASSERT_EQ(got, testing::load_bits(dtype, targets[1] + i * element_bytes(dtype)));
          if (std::isnan(expected[i]) &&
              std::isnan(testing::value_of(dtype, targets[0] + i * element_bytes(dtype)))) {
            continue;
          }
          ASSERT_EQ(got, testing::bits_of(dtype, expected[i]))
              << to_string(dtype) << ", column " << i;
        }
      }
    });
  });
}

/// The same terms twice: as they cross, and as FP32 rows of what they decode to.
class Terms {
 public:
  Terms(const RowFormat& wire, std::size_t hidden, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::vector<float> values =
          values_of(Kind::normal, DType::f32, hidden, 100 * hidden + i);
      bytes_.push_back(support::encode_row({wire.format, wire.block_columns}, values));
      values_.push_back(decoded(wire, hidden, bytes_.back()));
    }
    for (std::size_t i = 0; i < count; ++i) {
      const bool ends_node = i + 1 == count || i % 5 == 4;
      const bool as_it_is = i % 4 == 3;
      const SumTerm term{bytes_[i].data(), 0.3F + static_cast<float>(i), wire.format,
                         !as_it_is,        ends_node || i % 3 == 1,      ends_node};
      crossing.push_back(term);
      plain.push_back(term);
      plain.back().row = reinterpret_cast<const std::byte*>(values_[i].data());
      plain.back().format = WireFormat::f32;
      if (i % 6 == 2) crossing.back() = plain.back();  // a row of the home node among them
    }
  }
  std::vector<SumTerm> crossing;
  std::vector<SumTerm> plain;

 private:
  std::vector<std::vector<std::byte>> bytes_;
  std::vector<std::vector<float>> values_;
};

TEST(WireRows, SumsReadAndWriteThem) {
  wires_on_every_target([] {
    for_each_wire([](const RowFormat& wire, std::size_t hidden) {
      for (const std::size_t count : {1U, 2U, 7U, 23U}) {
        const Terms terms(wire, hidden, count);
        std::vector<float> sums(hidden);
        for (std::size_t c = 0; c < hidden; ++c) sums[c] = testing::sum_column(terms.plain, c);
        const auto columns = static_cast<std::int64_t>(hidden);
        std::vector<float> out(hidden);
        SumRow row{reinterpret_cast<std::byte*>(out.data()), 0, static_cast<std::uint32_t>(count)};
        sum_rows({DType::f32, columns, {&row, 1}, terms.crossing, wire.block_columns});
        ASSERT_EQ(out, sums) << count << " terms";
        testing::GuardedMemory packed(wire.row_bytes(columns));
        row.out = packed.last(wire.row_bytes(columns));
        sum_rows({wire, columns, {&row, 1}, terms.crossing, wire.block_columns});
        ASSERT_EQ(std::vector<std::byte>(row.out, row.out + wire.row_bytes(columns)),
                  support::encode_row({wire.format, wire.block_columns}, sums))
            << count << " terms";
      }
    });
  });
}

TEST(WireRows, ScaledRowsAreThoseOfWhatTheyDecodeTo) {
  wires_on_every_target([] {
    for_each_wire([](const RowFormat& wire, std::size_t hidden) {
      const std::vector<std::byte> bytes =
          pack(DType::f32, wire, values_of(Kind::normal, DType::f32, hidden, 3));
      const std::vector<float> plain = decoded(wire, hidden, bytes);
      const std::vector<float> y = values_of(Kind::normal, DType::f32, hidden, 4);
      const auto scaled = [&](const RowFormat& format, const void* source) {
        std::vector<float> out(hidden + 1);
        const ScaleTarget target{reinterpret_cast<std::byte*>(out.data()), 0.7F,
                                 reinterpret_cast<const std::byte*>(y.data()), &out[hidden]};
        const PushRow row{static_cast<const std::byte*>(source), 0, 1};
        scale_rows(
            {format, DType::f32, static_cast<std::int64_t>(hidden), {&row, 1}, {&target, 1}});
        return out;
      };
      ASSERT_EQ(scaled(wire, bytes.data()), scaled(DType::f32, plain.data()));
    });
  });
}

/// The bound of docs/wire-formats.md for a value of a block with this largest magnitude.
double bound(WireFormat format, double largest, double value) {
  const double scale = std::max(largest / (format == WireFormat::int8 ? 127 : 448), 0x1p-126);
  const double half_step =
      format == WireFormat::int8 ? scale / 2 : std::max(std::fabs(value) * 0x1p-4, scale * 0x1p-10);
  return half_step * (1 + 0x1p-14) + std::fabs(value) * 0x1p-22;
}

TEST(WireRows, StayWithinTheErrorBounds) {
  for (const WireFormat format : kQuantised) {
    for (const Kind kind : kFinite) {
      const RowFormat wire(format, 128);
      const std::vector<float> values = values_of(kind, DType::f32, 2880, 77);
      const std::vector<float> back = decoded(wire, values.size(), pack(DType::f32, wire, values));
      double worst = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::size_t begin = i / 128 * 128;
        double largest = 0;
        for (std::size_t c = begin; c < std::min(begin + 128, values.size()); ++c) {
          largest = std::max(largest, std::fabs(double{values[c]}));
        }
        const double error = std::fabs(double{values[i]} - double{back[i]});
        if (largest == 0) {
          ASSERT_EQ(back[i], 0.F);
          continue;
        }
        worst = std::max(worst, error / bound(format, largest, values[i]));
      }
      EXPECT_LE(worst, 1) << to_string(format) << ", kind " << static_cast<int>(kind);
      // And no wider than it must be, where values are dense.
      if (kind == Kind::normal) {
        EXPECT_GT(worst, 0.9) << to_string(format);
      }
    }
  }
}

TEST(WireRows, WhatIsNotFiniteStaysInItsBlock) {
  for (const WireFormat format : kQuantised) {
    for (const float special :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
          -std::numeric_limits<float>::infinity()}) {
      std::vector<float> values = values_of(Kind::normal, DType::f32, 300, 1);
      values[140] = special;
      const RowFormat wire(format, 128);
      const std::vector<float> back = decoded(wire, 300, pack(DType::f32, wire, values));
      for (std::size_t i = 0; i < 300; ++i) {
        EXPECT_EQ(std::isnan(back[i]), i / 128 == 1) << to_string(format) << ", column " << i;
      }
    }
  }
}

TEST(WireRows, TheLargestNumbersStayFinite) {
  constexpr float kMost = std::numeric_limits<float>::max();
  for (const WireFormat format : {WireFormat::fp8_e4m3fn, WireFormat::int8}) {
    for (const float largest : {kMost, std::nextafter(kMost, 0.F), 0x1.fffff8p127F, 0x1p-126F,
                                0x1p-127F, 0x1p-149F, 0x1p-120F}) {
      const std::vector<float> values{largest, -largest, largest / 2, 0.F};
      const RowFormat wire(format, 64);
      for (const float value : decoded(wire, 4, pack(DType::f32, wire, values))) {
        EXPECT_TRUE(std::isfinite(value)) << to_string(format) << ", largest " << largest;
      }
    }
  }
}

/// Values at and beyond the largest number of a 16-bit dtype. Nine of them, so that some stand
/// behind the last whole vector.
struct LargeValues {
  DType to;
  std::vector<float> values;
};

const LargeValues kLargeValues[] = {
    {DType::f16,
     {65504.F, 65519.F, 65520.F, -1e30F, 1.F, -std::numeric_limits<float>::infinity(),
      std::numeric_limits<float>::quiet_NaN(), -65536.F, 65536.F}},
    {DType::bf16,
     {0x1.FEp127F, 0x1.FEFFFEp127F, 0x1.FFp127F, -std::numeric_limits<float>::max(), 1.F,
      -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(),
      -0x1.FFp127F, std::numeric_limits<float>::max()}}};

TEST(WireRows, SixteenBitsSaturateOnTheWireOnly) {
  const auto same = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  wires_on_every_target([&] {
    for (const auto& large : kLargeValues) {
      const auto to = large.to;  // clang 14 captures no structured binding
      const auto& values = large.values;
      SCOPED_TRACE(to_string(to));
      const RowFormat wire(wire_format_of(to), 0);
      std::vector<float> crossed = values;
      support::cross({wire.format}, crossed);
      const auto column = [&](const std::vector<std::byte>& row, std::size_t i) {
        return testing::value_of(to, &row[i * 2]);
      };
      // Alone, and plus a rank's sum of zeros: rounded from registers, and in a pass of its own.
      const std::vector<float> zeros(values.size());
      const auto term = [](const std::vector<float>& row, bool ends_rank, bool ends_node) {
        return SumTerm{.row = reinterpret_cast<const std::byte*>(row.data()),
                       .ends_rank = ends_rank,
                       .ends_node = ends_node};
      };
      const SumTerm terms[] = {term(values, true, true), term(values, true, false),
                               term(zeros, false, false), term(zeros, true, true)};
      const auto sums = [&](const RowFormat& out_format) {
        std::vector<std::vector<std::byte>> out(2, std::vector<std::byte>(values.size() * 2));
        const SumRow rows[] = {{out[0].data(), 0, 1}, {out[1].data(), 1, 3}};
        sum_rows({out_format, static_cast<std::int64_t>(values.size()), rows, terms});
        return out;
      };
      auto on_the_wire = sums(wire);
      on_the_wire.push_back(pack(DType::f32, wire, values));
      for (const auto& row : on_the_wire) {
        for (std::size_t i = 0; i < values.size(); ++i) {
          EXPECT_PRED2(same, column(row, i), crossed[i]) << values[i];
          EXPECT_EQ(std::isfinite(crossed[i]), std::isfinite(values[i]));
        }
      }
      auto in_a_dtype = sums(to);
      in_a_dtype.push_back(pack(DType::f32, to, values));
      for (const auto& row : in_a_dtype) {
        EXPECT_TRUE(std::isfinite(column(row, 1)));
        EXPECT_TRUE(std::isinf(column(row, 2)));
        EXPECT_TRUE(std::isinf(column(row, 8)));
      }
    }
  });
}

#if defined(__SSE__)
TEST(WireRows, TheStateOfTheCallerDoesNotMatter) {
  constexpr unsigned kFlushAndRoundUp = 0x1F80U | 0x8000U | 0x0040U | 0x4000U;
  wires_on_every_target([] {
    for (const WireFormat format : kQuantised) {
      for (const Kind kind : {Kind::denormal, Kind::ties, Kind::log_normal}) {
        const RowFormat wire(format, 64);
        const std::vector<float> values = values_of(kind, DType::f32, 300, 8);
        const std::vector<std::byte> expected = pack(DType::f32, wire, values);
        const unsigned before = _mm_getcsr();
        _mm_setcsr(kFlushAndRoundUp);
        const std::vector<std::byte> bytes = pack(DType::f32, wire, values);
        _mm_setcsr(before);
        EXPECT_EQ(bytes, expected) << to_string(format) << ", kind " << static_cast<int>(kind);
      }
    }
  });
}
#endif

TEST(WireRows, OtherBlocksAreRefused) {
  const float value = 1;
  const auto* const row = reinterpret_cast<const std::byte*>(&value);
  std::byte out[64];
  for (const std::int64_t block : {0, 1, 32, 96, 4096}) {
    EXPECT_ANY_THROW(pack_rows({DType::f32, {WireFormat::int8, block}, 1, {&row, 1}, out}));
    if (block == 0) continue;
    const SumTerm term{
        .row = row, .format = WireFormat::int8, .ends_rank = true, .ends_node = true};
    const SumRow sum{out, 0, 1};
    EXPECT_ANY_THROW(
        sum_rows({DType::f32, 1, {&sum, 1}, {&term, 1}, static_cast<std::uint32_t>(block)}));
  }
}

}  // namespace
}  // namespace ferry::kernels
