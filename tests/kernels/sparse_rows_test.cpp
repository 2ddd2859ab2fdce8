// Sparse rows: what comes back is what went in, byte by byte against an oracle that writes the
// format out, on every SIMD target; and payloads that are no rows are refused without a look past
// their end.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "kernels/sparse_rows.hpp"
#include "oracle.hpp"

namespace ferry::kernels {
namespace {

using Bytes = std::vector<std::byte>;
using testing::PinnedTarget;

constexpr Positions kPositions[] = {Positions::coo, Positions::bitmask, Positions::run_length};
constexpr std::int64_t kHidden[] = {1, 7, 8, 63, 64, 65, 128, 1000, 2048, 65535, 65536, 70001};
constexpr double kDensities[] = {0, 0.001, 0.05, 0.3, 1};

std::uint32_t element(const SparseShape& shape, const Bytes& rows, std::size_t at) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &rows[at * shape.element_bytes], shape.element_bytes);
  return bits;
}

/// Rows with values in runs of about `run` columns, and such a share of them.
Bytes make_rows(const SparseShape& shape, std::uint32_t num_rows, double density, double run,
                std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> chance;
  Bytes rows(num_rows * static_cast<std::size_t>(shape.hidden) * shape.element_bytes);
  bool inside = chance(random) < density;
  for (std::size_t at = 0; at < rows.size() / shape.element_bytes; ++at) {
    if (chance(random) < 1 / run) inside = chance(random) < density;
    if (!inside) continue;
    const auto bits = static_cast<std::uint32_t>(random() | 1U);
    std::memcpy(&rows[at * shape.element_bytes], &bits, shape.element_bytes);
  }
  return rows;
}

void append(Bytes& out, std::uint64_t number, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) out.push_back(std::byte(number >> 8 * i & 0xFF));
}

void append_varint(Bytes& out, std::uint64_t number) {
  for (; number > 127; number /= 128) out.push_back(std::byte(number % 128 + 128));
  out.push_back(std::byte(number));
}

/// The format of docs/wire-formats.md, one column at a time.
Bytes compressed(const SparseShape& shape, Positions positions, const Bytes& rows) {
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  const std::size_t number_bytes = hidden < 65536 ? 2 : 4;
  Bytes out;
  for (std::size_t first = 0; first < rows.size() / shape.element_bytes; first += hidden) {
    std::vector<std::size_t> columns;
    for (std::size_t c = 0; c < hidden; ++c) {
      if (element(shape, rows, first + c) != 0) columns.push_back(c);
    }
    if (positions == Positions::coo) {
      append(out, columns.size(), number_bytes);
      for (const std::size_t c : columns) append(out, c, number_bytes);
    } else if (positions == Positions::bitmask) {
      Bytes mask((hidden + 7) / 8);
      for (const std::size_t c : columns) mask[c / 8] |= std::byte(1 << c % 8);
      out.insert(out.end(), mask.begin(), mask.end());
    } else {
      std::vector<std::pair<std::size_t, std::size_t>> runs;  // first column, one behind the last
      for (const std::size_t c : columns) {
        if (runs.empty() || runs.back().second != c) runs.push_back({c, c});
        ++runs.back().second;
      }
      append_varint(out, runs.size());
      std::size_t before = 0;
      for (const auto& [begin, end] : runs) {
        append_varint(out, begin - before);
        append_varint(out, end - begin - 1);
        before = end;
      }
    }
    for (const std::size_t c : columns) {
      append(out, element(shape, rows, first + c), shape.element_bytes);
    }
  }
  return out;
}

TEST(SparseRows, ComeBackAndAreTheOraclesBytes) {
  for (const std::string& target : simd_targets()) {
    const PinnedTarget pinned(target);
    std::uint64_t seed = 1;
    for (const std::int64_t hidden : kHidden) {
      for (const std::uint32_t size : {2U, 4U}) {
        for (const double density : kDensities) {
          const SparseShape shape{hidden, size};
          const std::uint32_t num_rows = hidden > 3000 ? 1 : 3;
          const Bytes rows = make_rows(shape, num_rows, density, seed % 2 != 0 ? 1 : 20, seed);
          ++seed;
          for (const Positions positions : kPositions) {
            SCOPED_TRACE(fmt::format("{}, hidden {}, {} bytes, density {}, positions {}", target,
                                     hidden, size, density, static_cast<int>(positions)));
            const Bytes expected = compressed(shape, positions, rows);
            testing::GuardedMemory source(rows.size());
            std::byte* const from = source.last(rows.size());
            std::memcpy(from, rows.data(), rows.size());
            testing::GuardedMemory payload(expected.size());
            const std::span<std::byte> out(payload.last(expected.size()), expected.size());
            ASSERT_EQ(compress_rows({shape, positions, num_rows, from, out}), expected.size());
            ASSERT_TRUE(std::equal(out.begin(), out.end(), expected.begin()));
            Bytes back(rows.size(), std::byte{0xA5});
            ASSERT_TRUE(expand_rows({shape, positions, num_rows, out, back.data()}));
            ASSERT_EQ(back, rows);
          }
        }
      }
    }
  }
}

TEST(SparseRows, AreNotWrittenWhereThereIsTooLittleRoom) {
  const SparseShape shape{100, 2};
  const Bytes rows = make_rows(shape, 2, 0.5, 3, 5);
  for (const Positions positions : kPositions) {
    const std::size_t needed = compressed(shape, positions, rows).size();
    for (std::size_t room = 0; room < needed; ++room) {
      testing::GuardedMemory memory(needed);
      const std::span<std::byte> out(memory.last(room), room);
      ASSERT_EQ(compress_rows({shape, positions, 2, rows.data(), out}), 0U) << room;
    }
  }
}

TEST(SparseRows, TheirBytesAreForeseen) {
  const SparseShape shape{2048, 2};
  for (const double density : {0.01, 0.2}) {
    for (const double run : {1.0, 30.0}) {
      const std::uint32_t num_rows = 64;
      Bytes rows = make_rows(shape, num_rows, density, run, 17);
      Bytes out(rows.size() * 3);
      const SparseCounts counts = keep_largest({shape, 1, 128, num_rows, rows.data()});
      for (const Positions positions : kPositions) {
        const auto made =
            static_cast<double>(compress_rows({shape, positions, num_rows, rows.data(), out}));
        const auto foreseen =
            static_cast<double>(compressed_bytes(positions, shape, num_rows, counts));
        const double off = positions == Positions::run_length ? 0.05 : 1e-9;
        EXPECT_NEAR(foreseen / made, 1, off)
            << density << " " << run << " " << static_cast<int>(positions);
      }
    }
  }
}

/// Whatever stands in a payload: refused, or rows that would be written as just these bytes.
void expect_sound(const SparseShape& shape, Positions positions, std::uint32_t num_rows,
                  const Bytes& payload) {
  testing::GuardedMemory memory(payload.size() + 1);
  std::byte* const at = memory.last(payload.size());
  std::memcpy(at, payload.data(), payload.size());
  const std::size_t dense = num_rows * static_cast<std::size_t>(shape.hidden) * shape.element_bytes;
  testing::GuardedMemory out(dense);
  if (!expand_rows({shape, positions, num_rows, {at, payload.size()}, out.last(dense)})) return;
  Bytes rows(out.last(dense), out.last(dense) + dense);
  // A value may be a 0 that a writer would have left out; then the bytes differ.
  const Bytes again = compressed(shape, positions, rows);
  EXPECT_LE(again.size(), payload.size());
  if (again.size() == payload.size()) {
    EXPECT_EQ(again, payload);
  }
}

TEST(SparseRows, PayloadsThatAreNoneAreRefused) {
  std::mt19937_64 random(3);
  for (const Positions positions : kPositions) {
    for (const std::int64_t hidden : {60, 70001}) {
      const SparseShape shape{hidden, 2};
      const Bytes good = compressed(shape, positions, make_rows(shape, 2, 0.01, 3, 9));
      for (std::size_t bytes = 0; bytes < std::min<std::size_t>(good.size(), 200); ++bytes) {
        Bytes cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(bytes));
        Bytes back(2 * static_cast<std::size_t>(hidden) * 2);
        EXPECT_FALSE(expand_rows({shape, positions, 2, cut, back.data()})) << bytes;
      }
      Bytes longer = good;
      longer.push_back(std::byte{0});
      Bytes back(2 * static_cast<std::size_t>(hidden) * 2);
      EXPECT_FALSE(expand_rows({shape, positions, 2, longer, back.data()}));
      for (int i = 0; i < (hidden < 100 ? 3000 : 200); ++i) {
        Bytes bad = good;
        for (int change = 0; change < 1 + i % 3; ++change) {
          bad[random() % bad.size()] ^= std::byte(1U << random() % 8);
        }
        expect_sound(shape, positions, 2, bad);
      }
    }
  }
}

TEST(KeepLargest, KeepsTheLargestOfEachBlock) {
  // Magnitudes of bf16 have the order of their bits; 0x7FC0 is a NaN.
  const std::vector<std::uint16_t> row = {0x3F80, 0xBF80, 0x3F80, 0x4000, 0x0001,
                                          0x8000, 0x7FC0, 0x0000, 0xC000, 0x3F81};
  const auto kept = [&](float ratio, std::uint32_t block) {
    std::vector<std::uint16_t> made = row;
    keep_largest({{static_cast<std::int64_t>(made.size()), 2},
                  ratio,
                  block,
                  1,
                  reinterpret_cast<std::byte*>(made.data())});
    return made;
  };
  using Elements = std::vector<std::uint16_t>;
  EXPECT_EQ(kept(1, 4),
            (Elements{0x3F80, 0xBF80, 0x3F80, 0x4000, 1, 0, 0x7FC0, 0, 0xC000, 0x3F81}));
  EXPECT_EQ(kept(0.5F, 4), (Elements{0x3F80, 0, 0, 0x4000, 1, 0, 0x7FC0, 0, 0xC000, 0}));
  EXPECT_EQ(kept(0.3F, 10), (Elements{0, 0, 0, 0x4000, 0, 0, 0x7FC0, 0, 0xC000, 0}));
  EXPECT_EQ(kept(0.01F, 10), (Elements{0, 0, 0, 0, 0, 0, 0x7FC0, 0, 0, 0}));
}

/// One element at a time: what is kept, and how many values and runs that makes.
SparseCounts keep_by_sorting(const SparseShape& shape, float ratio, std::size_t block,
                             Bytes& rows) {
  const std::uint32_t sign = shape.element_bytes == 2 ? 0x8000U : 0x80000000U;
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  SparseCounts counts;
  for (std::size_t row = 0; row < rows.size() / shape.element_bytes; row += hidden) {
    bool inside = false;
    for (std::size_t begin = 0; begin < hidden; begin += block) {
      const std::size_t count = std::min(block, hidden - begin);
      std::vector<std::size_t> order(count);
      for (std::size_t i = 0; i < count; ++i) order[i] = row + begin + i;
      std::ranges::stable_sort(order, std::greater<>(),
                               [&](std::size_t at) { return element(shape, rows, at) & ~sign; });
      const auto keep = static_cast<std::size_t>(std::ceil(ratio * static_cast<float>(count)));
      for (std::size_t i = 0; i < count; ++i) {
        const bool zero = (element(shape, rows, order[i]) & ~sign) == 0;
        if (i < std::max<std::size_t>(keep, 1) && !zero) continue;
        std::memset(&rows[order[i] * shape.element_bytes], 0, shape.element_bytes);
      }
    }
    for (std::size_t at = row; at < row + hidden; ++at) {
      const bool value = element(shape, rows, at) != 0;
      counts.values += value ? 1 : 0;
      counts.runs += value && !inside ? 1 : 0;
      inside = value;
    }
  }
  return counts;
}

TEST(KeepLargest, IsWhatSortingGivesOnEveryTarget) {
  for (const std::string& target : simd_targets()) {
    const PinnedTarget pinned(target);
    std::mt19937_64 random(5);
    for (const std::uint32_t size : {2U, 4U}) {
      for (const std::int64_t hidden : {1, 5, 63, 64, 127, 300, 2048, 5000}) {
        for (const float ratio : {0.001F, 0.1F, 0.3F, 0.5F, 0.99F, 1.0F}) {
          for (const std::uint32_t block : {64U, 128U, 2048U}) {
            const SparseShape shape{hidden, size};
            Bytes rows(2 * static_cast<std::size_t>(hidden) * size);
            // Few different numbers, so that many are equal; and any bits.
            const bool any = random() % 2 == 0;
            for (std::size_t at = 0; at < rows.size(); at += size) {
              const std::uint64_t bits = any ? random() : (random() % 3) << (size * 8 - 3);
              std::memcpy(&rows[at], &bits, size);
            }
            SCOPED_TRACE(fmt::format("{}, hidden {}, {} bytes, ratio {}, block {}, any {}", target,
                                     hidden, size, ratio, block, any));
            Bytes expected = rows;
            const SparseCounts left = keep_by_sorting(shape, ratio, block, expected);
            const SparseCounts made = keep_largest({shape, ratio, block, 2, rows.data()});
            ASSERT_EQ(rows, expected);
            ASSERT_EQ(made.values, left.values);
            ASSERT_EQ(made.runs, left.runs);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ferry::kernels
