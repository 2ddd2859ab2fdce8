// sum_rows against the definition of the tree: the same bits for any shape of tree, any mix of
// dtypes and every SIMD target.

#include <cmath>
#include <deque>
#include <random>

#include <gtest/gtest.h>

#include "oracle.hpp"

namespace ferry::kernels {
namespace {

struct Shape {
  DType out = DType::f32;
  std::size_t hidden = 1;
  std::size_t misplaced = 0;  ///< bytes by which result rows miss a cache line
};

/// A job with rows of random trees, and the memory of its terms.
class RandomSums {
 public:
  RandomSums(const Shape& shape, std::uint64_t seed) : shape_(shape), random_(seed) {
    for (const std::uint32_t count : {1U, 8U, 0U, 2U, 3U, 17U, 64U}) add_row(count);
    out_bytes_ = shape.hidden * element_bytes(shape.out);
    stride_ = (out_bytes_ + 63) / 64 * 64 + 64;
    out_.assign(rows_.size() * stride_ + 192, testing::kUntouched);
    const auto start = reinterpret_cast<std::uintptr_t>(out_.data());
    first_ = 64 + (64 - start % 64) % 64 + shape.misplaced;
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      rows_[r].out = out_.data() + first_ + r * stride_;
    }
  }

  std::vector<std::byte> run() {
    std::fill(out_.begin(), out_.end(), testing::kUntouched);
    sum_rows({shape_.out, static_cast<std::int64_t>(shape_.hidden), rows_, terms_});
    return out_;
  }

  std::vector<std::byte> expected() const {
    std::vector<std::byte> image(out_.size(), testing::kUntouched);
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      const auto terms = std::span(terms_).subspan(rows_[r].first, rows_[r].count);
      for (std::size_t c = 0; c < shape_.hidden; ++c) {
        const float sum = testing::sum_column(terms, c);
        const float one_nan = testing::float_from_bits(0x7FC00000U);
        const std::uint32_t bits = testing::bits_of(shape_.out, std::isnan(sum) ? one_nan : sum);
        testing::store_bits(shape_.out, bits,
                            image.data() + first_ + r * stride_ + c * element_bytes(shape_.out));
      }
    }
    return image;
  }

 private:
  void add_row(std::uint32_t count) {
    rows_.push_back({nullptr, static_cast<std::uint32_t>(terms_.size()), count});
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint64_t bits = random_();
      SumTerm term;
      const DType dtype = testing::kDTypes[bits % 3];
      term.format = wire_format_of(dtype);
      term.weighted = (bits >> 8 & 3) != 0;
      term.weight = static_cast<float>(bits >> 40) * 0x1p-24F - 0.25F;
      term.ends_node = i + 1 == count || (bits >> 16 & 7) < 2;
      term.ends_rank = term.ends_node || (bits >> 20 & 7) < 3;
      memory_.emplace_back(shape_.hidden * element_bytes(dtype) + 1);
      testing::fill_row(dtype, bits, shape_.hidden, memory_.back().data() + 1);
      term.row = memory_.back().data() + 1;  // odd address
      terms_.push_back(term);
    }
  }

  Shape shape_;
  std::mt19937_64 random_;
  std::deque<std::vector<std::byte>> memory_;
  std::vector<SumTerm> terms_;
  std::vector<SumRow> rows_;
  std::vector<std::byte> out_;
  std::size_t out_bytes_ = 0;
  std::size_t stride_ = 0;
  std::size_t first_ = 0;
};

TEST(SumRows, BitsOfTheTreeOnEverySimdTarget) {
  std::uint64_t seed = 1;
  for (const DType out : testing::kDTypes) {
    for (const std::size_t hidden : {1U, 7U, 16U, 33U, 1000U, 2047U, 2048U, 2049U, 4133U}) {
      for (const std::size_t misplaced : {0U, 2U, 36U}) {
        RandomSums sums({out, hidden, misplaced}, ++seed);
        const auto expected = sums.expected();
        for (const std::string& name : simd_targets()) {
          const testing::PinnedTarget pinned(name);
          ASSERT_TRUE(sums.run() == expected) << name << " to " << to_string(out) << ", hidden "
                                              << hidden << ", misplaced " << misplaced
                                              << ", seed " << seed;
        }
      }
    }
  }
}

// Rows end where a page begins that faults; a read or write past an end kills the test.
TEST(SumRows, StaysInsideItsRows) {
  for (const std::string& name : simd_targets()) {
    SCOPED_TRACE(name);
    const testing::PinnedTarget pinned(name);
    for (const DType dtype : testing::kDTypes) {
      for (std::size_t hidden = 1; hidden < 100; ++hidden) {
        const std::size_t row_bytes = hidden * element_bytes(dtype);
        testing::GuardedMemory one(row_bytes);
        testing::GuardedMemory two(row_bytes);
        testing::GuardedMemory result(row_bytes);
        testing::fill_row(dtype, 1, hidden, one.last(row_bytes));
        testing::fill_row(dtype, 2, hidden, two.begin());
        const WireFormat format = wire_format_of(dtype);
        const SumTerm terms[] = {{one.last(row_bytes), 0.5F, format, true, false, false},
                                 {two.begin(), 0.25F, format, true, true, true}};
        const SumRow rows[] = {{result.last(row_bytes), 0, 2}};
        sum_rows({dtype, static_cast<std::int64_t>(hidden), rows, terms});
        for (std::size_t c = 0; c < hidden; ++c) {
          ASSERT_EQ(testing::load_bits(dtype, rows[0].out + c * element_bytes(dtype)),
                    testing::bits_of(dtype, testing::sum_column(terms, c)))
              << to_string(dtype) << ", hidden " << hidden << ", column " << c;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ferry::kernels
