// Quantised rows whose error has a limit: rows within it are those of pack_rows, the others cross
// in the other format, and marks say which; on every SIMD target. Payloads that are none are
// refused.

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "oracle.hpp"
#include "support/wire_numbers.hpp"

namespace ferry::kernels {
namespace {

using Bytes = std::vector<std::byte>;
using testing::PinnedTarget;

constexpr std::int64_t kBlock = 64;

/// Each row is spread more widely than the one before; the last ones are special.
std::vector<std::vector<float>> make_rows(std::size_t num_rows, std::size_t hidden) {
  std::mt19937_64 random(hidden);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> rows(num_rows, std::vector<float>(hidden));
  for (std::size_t i = 0; i < num_rows; ++i) {
    for (float& value : rows[i]) {
      value = normal(random) * std::exp(0.3F * static_cast<float>(i) * normal(random));
    }
  }
  rows[1].assign(hidden, 0.0F);
  rows[2][hidden / 2] = std::numeric_limits<float>::infinity();
  rows[3].assign(hidden, 1e-40F);
  rows[4][0] = std::numeric_limits<float>::quiet_NaN();
  for (float& value : rows[5]) value *= 1e36F;
  return rows;
}

/// Root mean square of the errors over that of the values, in double.
double relative_error(WireFormat format, std::vector<float> row) {
  const std::vector<float> values = row;
  support::cross({format, kBlock}, row);
  double errors = 0;
  double squares = 0;
  for (std::size_t i = 0; i < row.size(); ++i) {
    errors += std::pow(double{values[i]} - double{row[i]}, 2);
    squares += std::pow(double{values[i]}, 2);
  }
  return squares == 0 ? 0 : std::sqrt(errors / squares);
}

TEST(PackRowsWithin, EscalatesRowsBeyondTheLimitAndNoOthers) {
  for (const std::string& target : simd_targets()) {
    const PinnedTarget pinned(target);
    for (const WireFormat format : {WireFormat::int8, WireFormat::fp8_e4m3fn}) {
      for (const std::size_t hidden : {std::size_t{1}, std::size_t{65}, std::size_t{2048}}) {
        const auto rows = make_rows(21, hidden);
        std::vector<const std::byte*> sources;
        for (const auto& row : rows) {
          sources.push_back(reinterpret_cast<const std::byte*>(row.data()));
        }
        const float limit = format == WireFormat::int8 ? 0.01F : 0.026F;
        Bytes expected;
        Bytes marks(3);
        std::size_t escalated = 0;
        for (std::size_t i = 0; i < rows.size(); ++i) {
          // A row that is as near to the limit as rounding reaches could go either way.
          const double error = relative_error(format, rows[i]);
          ASSERT_FALSE(std::fabs(error / double{limit} - 1) < 1e-4);
          const bool within = error <= double{limit};
          const Bytes row =
              support::encode_row({within ? format : WireFormat::bf16, kBlock}, rows[i]);
          expected.insert(expected.end(), row.begin(), row.end());
          if (within) continue;
          ++escalated;
          marks[i / 8] |= std::byte(1 << i % 8);
        }
        ASSERT_GE(escalated, 2U);
        expected.insert(expected.end(), marks.begin(), marks.end());
        Bytes out(expected.size() + 64, std::byte{0x5A});
        const PackedRows packed =
            pack_rows_within({.pack = {.source_dtype = DType::f32,
                                       .wire = RowFormat(format, kBlock),
                                       .hidden = static_cast<std::int64_t>(hidden),
                                       .rows = sources,
                                       .out = out.data()},
                              .escalated = RowFormat(WireFormat::bf16, kBlock),
                              .max_relative_error = limit});
        SCOPED_TRACE(fmt::format("{}, {}, hidden {}", target, to_string(format), hidden));
        EXPECT_EQ(packed.escalated, escalated);
        ASSERT_EQ(packed.bytes, expected.size());
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), out.begin()));
        EXPECT_EQ(out[expected.size()], std::byte{0x5A});
      }
    }
  }
}

TEST(PackRowsWithin, WithoutSuchRowsWritesWhatPackRowsDoes) {
  const std::vector<float> row(130, 3.0F);
  const auto* const source = reinterpret_cast<const std::byte*>(row.data());
  const std::vector<const std::byte*> sources(5, source);
  const PackJob job{.source_dtype = DType::f32,
                    .wire = RowFormat(WireFormat::int8, kBlock),
                    .hidden = 130,
                    .rows = sources,
                    .out = nullptr};
  Bytes plain(5 * job.wire.row_bytes(130));
  Bytes within(plain.size());
  PackJob to_plain = job;
  to_plain.out = plain.data();
  pack_rows(to_plain);
  PackJob to_within = job;
  to_within.out = within.data();
  const PackedRows packed =
      pack_rows_within({to_within, RowFormat(WireFormat::bf16, kBlock), 0.01F});
  EXPECT_EQ(packed.bytes, plain.size());
  EXPECT_EQ(packed.escalated, 0U);
  EXPECT_EQ(within, plain);
}

class FindMarkedRows : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kRows = 11;
  static constexpr std::int64_t kHidden = 5;

  static bool find(const Bytes& payload, std::vector<MarkedRow>& rows) {
    return find_marked_rows(
        {RowFormat(WireFormat::int8, kBlock), RowFormat(DType::bf16), kHidden, kRows, payload},
        rows);
  }
  /// Rows 2 and 9 are longer.
  static Bytes good() {
    Bytes payload(9 * 9 + 2 * 10 + 2);
    payload[payload.size() - 2] = std::byte{0x04};
    payload[payload.size() - 1] = std::byte{0x02};
    return payload;
  }
};

TEST_F(FindMarkedRows, FindsThem) {
  const Bytes payload = good();
  std::vector<MarkedRow> rows;
  ASSERT_TRUE(find(payload, rows));
  ASSERT_EQ(rows.size(), kRows);
  const std::ptrdiff_t begins[] = {0, 9, 18, 28, 37, 46, 55, 64, 73, 82, 92};
  for (std::uint32_t i = 0; i < kRows; ++i) {
    EXPECT_EQ(rows[i].row - payload.data(), begins[i]);
    EXPECT_EQ(rows[i].escalated, i == 2 || i == 9);
  }
}

TEST_F(FindMarkedRows, RefusesWhatIsNone) {
  std::vector<MarkedRow> rows;
  const auto changed = [](const auto& change) {
    Bytes payload = good();
    change(payload);
    return payload;
  };
  EXPECT_FALSE(find({}, rows));
  EXPECT_FALSE(find(Bytes(1), rows));
  EXPECT_FALSE(find(changed([](Bytes& p) { p.insert(p.begin(), std::byte{0}); }), rows));
  EXPECT_FALSE(find(changed([](Bytes& p) { p.erase(p.begin()); }), rows));
  EXPECT_FALSE(find(changed([](Bytes& p) { p.back() |= std::byte{0x08}; }), rows)) << "row 11";
  EXPECT_FALSE(find(changed([](Bytes& p) { p.back() |= std::byte{0x01}; }), rows)) << "too short";
  EXPECT_FALSE(find(Bytes(11 * 9 + 2), rows)) << "no row is marked";
}

}  // namespace
}  // namespace ferry::kernels
