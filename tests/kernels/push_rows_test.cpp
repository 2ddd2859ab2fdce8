// push_rows: every target holds the row, and nothing beside it was read or written.

#include <vector>

#include <gtest/gtest.h>

#include "oracle.hpp"

namespace ferry::kernels {
namespace {

/// A push of `rows` rows into one window, whose rows are `stride` bytes apart from `first` on.
struct Window {
  std::vector<std::byte> bytes;
  std::size_t first = 0;
  std::size_t stride = 0;
  std::byte* row(std::size_t i) { return bytes.data() + first + i * stride; }
};

/// The row as its targets must hold it.
std::vector<std::byte> expected_row(DType from, DType to, std::span<const std::byte> source) {
  const std::size_t hidden = source.size() / element_bytes(from);
  std::vector<std::byte> row(hidden * element_bytes(to));
  for (std::size_t i = 0; i < hidden; ++i) {
    const std::byte* at = source.data() + i * element_bytes(from);
    const std::uint32_t bits = from == to ? testing::load_bits(from, at)
                                          : testing::bits_of(to, testing::value_of(from, at));
    testing::store_bits(to, bits, row.data() + i * element_bytes(to));
  }
  return row;
}

struct Case {
  DType from;
  DType to;
  std::size_t hidden;
  std::size_t misplaced;  ///< bytes by which window rows miss a cache line
  bool same_place;        ///< all window rows have the same place in their cache line
};

void run_case(const Case& test) {
  const std::size_t from_bytes = test.hidden * element_bytes(test.from);
  const std::size_t to_bytes = test.hidden * element_bytes(test.to);
  const std::vector<std::uint32_t> counts = {3, 0, 1, 8, 64};
  std::vector<std::vector<std::byte>> sources;
  std::vector<PushRow> rows;
  std::uint32_t first = 0;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    sources.emplace_back(from_bytes + 1);
    testing::fill_row(test.from, 100 * test.hidden + r, test.hidden, sources[r].data() + 1);
    rows.push_back({sources[r].data() + 1, first, counts[r]});  // odd address
    first += counts[r];
  }
  Window window;
  const std::size_t padded = (to_bytes + 63) / 64 * 64 + 64;
  window.stride = test.same_place ? padded : padded + 4;
  window.bytes.assign(first * window.stride + 192, testing::kUntouched);
  const auto start = reinterpret_cast<std::uintptr_t>(window.bytes.data());
  window.first = 64 + (64 - start % 64) % 64 + test.misplaced;
  // Targets of one row lie far apart, as they do in a window of experts.
  std::vector<std::byte*> targets;
  for (std::size_t i = 0; i < first; ++i) targets.push_back(window.row(i * 29 % first));
  push_rows({test.from, test.to, static_cast<std::int64_t>(test.hidden), rows, targets});

  std::vector<std::byte> expected(window.bytes.size(), testing::kUntouched);
  for (const PushRow& row : rows) {
    const auto image = expected_row(test.from, test.to, {row.source, from_bytes});
    for (std::uint32_t i = row.first; i < row.first + row.count; ++i) {
      std::copy(image.begin(), image.end(), expected.begin() + (targets[i] - window.bytes.data()));
    }
  }
  ASSERT_TRUE(window.bytes == expected)
      << to_string(test.from) << " to " << to_string(test.to) << ", hidden " << test.hidden
      << ", misplaced " << test.misplaced << ", same place " << test.same_place;
}

TEST(PushRows, EveryTargetHoldsTheRowAndNothingElseChanges) {
  for (const std::string& name : simd_targets()) {
    SCOPED_TRACE(name);
    const testing::PinnedTarget pinned(name);
    for (const DType from : testing::kDTypes) {
      for (const DType to : testing::kDTypes) {
        for (const std::size_t hidden : {1U, 7U, 32U, 33U, 1000U, 2048U, 2049U, 4133U}) {
          run_case({from, to, hidden, 0, true});
          run_case({from, to, hidden, 4, true});
          run_case({from, to, hidden, 2, false});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(PushRows, EqualDTypesCopyEveryBitPattern) {
  for (const DType dtype : testing::kDTypes) {
    std::vector<std::byte> source(65536 * element_bytes(dtype));
    for (std::uint32_t i = 0; i < 65536; ++i) {  // signalling NaN of each format included
      testing::store_bits(dtype, dtype == DType::f32 ? i << 16 | 1 : i,
                          source.data() + i * element_bytes(dtype));
    }
    std::vector<std::byte> target(source.size());
    std::byte* to = target.data();
    const PushRow row{source.data(), 0, 1};
    push_rows({dtype, dtype, 65536, {&row, 1}, {&to, 1}});
    EXPECT_TRUE(source == target) << to_string(dtype);
  }
}

// Rows end where a page begins that faults; a read or write past an end kills the test.
TEST(PushRows, StaysInsideItsRows) {
  for (const std::string& name : simd_targets()) {
    SCOPED_TRACE(name);
    const testing::PinnedTarget pinned(name);
    for (const DType from : testing::kDTypes) {
      for (const DType to : testing::kDTypes) {
        for (std::size_t hidden = 1; hidden < 100; ++hidden) {
          testing::GuardedMemory source(hidden * 4);
          testing::GuardedMemory ending(hidden * 4);
          testing::GuardedMemory starting(hidden * 4);
          std::byte* begin = source.last(hidden * element_bytes(from));
          testing::fill_row(from, hidden, hidden, begin);
          const PushRow rows[] = {{begin, 0, 2}, {begin, 1, 1}};
          std::byte* targets[] = {ending.last(hidden * element_bytes(to)), starting.begin()};
          push_rows({from, to, static_cast<std::int64_t>(hidden), rows, targets});
          const auto expected = expected_row(from, to, {begin, hidden * element_bytes(from)});
          ASSERT_EQ(std::memcmp(targets[0], expected.data(), expected.size()), 0) << hidden;
          ASSERT_EQ(std::memcmp(targets[1], expected.data(), expected.size()), 0) << hidden;
        }
      }
    }
  }
}

TEST(PushRows, NothingToDo) {
  push_rows({DType::bf16, DType::f32, 8, {}, {}});
  const PushRow row{nullptr, 0, 0};
  push_rows({DType::bf16, DType::f32, 8, {&row, 1}, {}});
  pack_rows({DType::bf16, DType::f32, 8, {}, nullptr});
}

}  // namespace
}  // namespace ferry::kernels
