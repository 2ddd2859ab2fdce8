#pragma once
// Which columns of a row hold a value: what all ways to write positions are made from.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.hpp"
#include "kernels/sparse_rows.hpp"

namespace ferry::kernels {

inline void check_shape(const char* what, const SparseShape& shape) {
  FERRY_ASSERT(shape.hidden >= 1 && (shape.element_bytes == 2 || shape.element_bytes == 4),
               "{}: hidden = {}, elements of {} bytes", what, shape.hidden, shape.element_bytes);
}

/// The columns of one row that hold a value, 64 to a word.
class SparseMask {
 public:
  static constexpr std::size_t kWordColumns = 64;

  explicit SparseMask(const SparseShape& shape)
      : shape_(shape), words_((shape.columns() + kWordColumns - 1) / kWordColumns) {}

  /// Sets it to what a dense row holds.
  void read(const std::byte* row);
  std::span<std::uint64_t> words() { return words_; }
  std::span<const std::uint64_t> words() const { return words_; }
  std::size_t num_bytes() const { return (shape_.columns() + 7) / 8; }

  std::uint64_t num_values() const {
    std::uint64_t values = 0;
    for (const std::uint64_t word : words_) {
      values += static_cast<std::uint64_t>(std::popcount(word));
    }
    return values;
  }
  /// Runs of neighbouring columns: a column that holds a value, behind one that does not.
  std::uint64_t num_runs() const {
    std::uint64_t runs = 0;
    std::uint64_t before = 0;
    for (const std::uint64_t word : words_) {
      runs += static_cast<std::uint64_t>(std::popcount(word & ~((word << 1U) | before)));
      before = word >> (kWordColumns - 1);
    }
    return runs;
  }
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (std::size_t at = 0; at < words_.size(); ++at) {
      for (std::uint64_t word = words_[at]; word != 0; word &= word - 1) {
        visit(at * kWordColumns + static_cast<std::size_t>(std::countr_zero(word)));
      }
    }
  }
  /// visit(first column, columns)
  template <typename Visit>
  void for_each_run(const Visit& visit) const {
    std::size_t begin = 0;
    std::size_t end = 0;
    for_each([&](std::size_t column) {
      if (column != end || end == begin) {
        if (end > begin) visit(begin, end - begin);
        begin = column;
      }
      end = column + 1;
    });
    if (end > begin) visit(begin, end - begin);
  }
  void set(std::size_t begin, std::size_t count) {
    for (std::size_t column = begin; column < begin + count; ++column) {
      words_[column / kWordColumns] |= std::uint64_t{1} << column % kWordColumns;
    }
  }
  void clear() { std::ranges::fill(words_, 0); }

 private:
  SparseShape shape_;
  std::vector<std::uint64_t> words_;
};

}  // namespace ferry::kernels
