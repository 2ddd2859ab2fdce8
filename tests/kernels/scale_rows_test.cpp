// scale_rows against its definition: the same bits for every pair of dtypes, every row length and
// every SIMD target.

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "oracle.hpp"

namespace ferry::kernels {
namespace {

using testing::GuardedMemory;

struct ScaleShape {
  DType source = DType::f32;
  DType target = DType::f32;
  std::size_t hidden = 1;
  std::size_t misplaced = 0;  ///< bytes by which target rows miss a cache line
};

float one_nan(float value) {
  return std::isnan(value) ? testing::float_from_bits(0x7FC00000U) : value;
}

/// The dot product as it is defined, one column after the other.
float dot_of(const ScaleShape& shape, const std::byte* row, const std::byte* y) {
  float lanes[16] = {};
  for (std::size_t c = 0; c < shape.hidden; ++c) {
    const float product = testing::value_of(shape.source, row + c * element_bytes(shape.source)) *
                          testing::value_of(shape.target, y + c * element_bytes(shape.target));
    lanes[c % 16] = lanes[c % 16] + product;
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
  }
  return one_nan(lanes[0]);
}

/// Three source rows with two, no and nine targets; every other target wants a dot product.
class Scales {
 public:
  explicit Scales(const ScaleShape& shape) : shape_(shape) {
    const std::size_t source_bytes = shape.hidden * element_bytes(shape.source);
    const std::size_t target_bytes = shape.hidden * element_bytes(shape.target);
    for (const std::uint32_t count : {2U, 0U, 9U}) {
      const auto first = static_cast<std::uint32_t>(targets_.size());
      sources_.push_back(std::make_unique<GuardedMemory>(source_bytes));
      testing::fill_row(shape.source, rows_.size(), shape.hidden,
                        sources_.back()->last(source_bytes));
      rows_.push_back({sources_.back()->last(source_bytes), first, count});
      for (std::uint32_t k = 0; k < count; ++k) add_target(target_bytes);
    }
    for (std::size_t i = 0; i < targets_.size(); ++i) {
      if (i % 2 == 0) targets_[i].dot = &dots_[i];
    }
  }

  void check() {
    scale_rows(
        {shape_.source, shape_.target, static_cast<std::int64_t>(shape_.hidden), rows_, targets_});
    for (const PushRow& row : rows_) {
      for (std::uint32_t k = row.first; k < row.first + row.count; ++k) check_target(row, k);
    }
  }

 private:
  void add_target(std::size_t bytes) {
    const std::size_t index = targets_.size();
    outs_.push_back(std::make_unique<GuardedMemory>(bytes + 192));
    // The row's last byte is the last one that may be touched, or it starts where it is told to.
    std::byte* out = outs_.back()->last(bytes);
    if (index % 3 == 0) out = outs_.back()->begin() + 64 + shape_.misplaced;
    std::fill(outs_.back()->begin(), outs_.back()->last(0), testing::kUntouched);
    ScaleTarget target{.out = out, .weight = 0.37F * static_cast<float>(index) - 1.3F};
    if (index % 2 == 0) {
      ys_.push_back(std::make_unique<GuardedMemory>(bytes));
      testing::fill_row(shape_.target, 100 + index, shape_.hidden, ys_.back()->last(bytes));
      target.y = ys_.back()->last(bytes);
    }
    targets_.push_back(target);
    dots_.push_back(12345.0F);
  }

  void check_target(const PushRow& row, std::uint32_t index) {
    const ScaleTarget& target = targets_[index];
    for (std::size_t c = 0; c < shape_.hidden; ++c) {
      const float value =
          testing::value_of(shape_.source, row.source + c * element_bytes(shape_.source));
      const std::uint32_t expected =
          testing::bits_of(shape_.target, one_nan(target.weight * value));
      const std::uint32_t actual =
          testing::load_bits(shape_.target, target.out + c * element_bytes(shape_.target));
      ASSERT_EQ(actual, expected) << "target " << index << ", column " << c;
    }
    GuardedMemory& memory = *outs_[index];
    const std::size_t bytes = shape_.hidden * element_bytes(shape_.target);
    for (const std::byte* at = memory.begin(); at < memory.last(0); ++at) {
      if (at >= target.out && at < target.out + bytes) continue;
      ASSERT_EQ(*at, testing::kUntouched) << "outside of target " << index;
    }
    if (target.y == nullptr) {
      EXPECT_EQ(dots_[index], 12345.0F);
      return;
    }
    EXPECT_EQ(testing::float_bits(dots_[index]),
              testing::float_bits(dot_of(shape_, row.source, target.y)))
        << "dot of target " << index;
  }

  const ScaleShape shape_;
  std::vector<std::unique_ptr<GuardedMemory>> sources_;
  std::vector<std::unique_ptr<GuardedMemory>> outs_;
  std::vector<std::unique_ptr<GuardedMemory>> ys_;
  std::vector<PushRow> rows_;
  std::vector<ScaleTarget> targets_;
  std::vector<float> dots_;
};

TEST(ScaleRows, GivesTheBitsOfItsDefinitionOnEveryTarget) {
  for (const std::string& target : simd_targets()) {
    const testing::PinnedTarget pinned(target);
    for (const DType source : testing::kDTypes) {
      for (const DType to : testing::kDTypes) {
        for (const std::size_t hidden : {1, 7, 16, 31, 33, 64, 100, 1024, 2880, 4101}) {
          for (const std::size_t misplaced : {0, 12}) {
            SCOPED_TRACE(target + ", " + std::string(to_string(source)) + " to " +
                         std::string(to_string(to)) + ", hidden " + std::to_string(hidden));
            Scales({source, to, hidden, misplaced}).check();
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// Inf x 0 is a NaN whose sign differs between machines.
TEST(ScaleRows, HasOneNaN) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> row{infinity, 1, -2};
  const std::vector<float> y{0, 1, 1};
  std::vector<float> out(3);
  float dot = 0;
  const PushRow rows[] = {{reinterpret_cast<const std::byte*>(row.data()), 0, 1}};
  const ScaleTarget targets[] = {{.out = reinterpret_cast<std::byte*>(out.data()),
                                  .weight = 0,
                                  .y = reinterpret_cast<const std::byte*>(y.data()),
                                  .dot = &dot}};
  scale_rows({.hidden = 3, .rows = rows, .targets = targets});
  EXPECT_EQ(testing::float_bits(out[0]), 0x7FC00000U);
  EXPECT_EQ(out[1], 0.0F);
  EXPECT_EQ(testing::float_bits(out[2]), 0x80000000U);
  EXPECT_EQ(testing::float_bits(dot), 0x7FC00000U);
}

}  // namespace
}  // namespace ferry::kernels
