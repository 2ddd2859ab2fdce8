#pragma once
// What the kernels must produce, one element at a time and without sharing code with them, and
// memory whose pages around a row cannot be touched.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/hash.hpp"
#include "ferry/dtype.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::testing {

/// FP32 value of the element at `at`; a NaN comes out quiet, with sign and payload.
float value_of(DType dtype, const std::byte* at);
/// Bits of `value` in `dtype`, rounded to nearest even by arithmetic on doubles.
std::uint32_t bits_of(DType dtype, float value);

std::uint32_t float_bits(float value);
float float_from_bits(std::uint32_t bits);

/// Rows of readable memory that end where a page begins that nobody may touch.
class GuardedMemory {
 public:
  explicit GuardedMemory(std::size_t bytes);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  /// The last `bytes` bytes; one more is a fault.
  std::byte* last(std::size_t bytes) { return end_ - bytes; }
  std::byte* begin() { return begin_; }

 private:
  std::byte* begin_ = nullptr;
  std::byte* end_ = nullptr;
  std::size_t mapped_bytes_ = 0;
};

/// Element `column` of row `row`: any finite bit pattern of the dtype, denormals included.
std::uint32_t test_element(DType dtype, std::uint64_t row, std::uint64_t column);
void fill_row(DType dtype, std::uint64_t row, std::size_t hidden, std::byte* out);
void store_bits(DType dtype, std::uint32_t bits, std::byte* out);
std::uint32_t load_bits(DType dtype, const std::byte* at);

/// What memory holds where no kernel may write.
inline constexpr std::byte kUntouched{0xA5};

inline constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

/// Pins one SIMD target for a scope.
class PinnedTarget {
 public:
  explicit PinnedTarget(const std::string& name) { kernels::pin_simd_target(name); }
  ~PinnedTarget() { kernels::pin_simd_target(""); }
  PinnedTarget(const PinnedTarget&) = delete;
  PinnedTarget& operator=(const PinnedTarget&) = delete;
};

/// The sum of one column of one row, straight from the definition of the tree.
float sum_column(std::span<const kernels::SumTerm> terms, std::size_t column);

}  // namespace ferry::testing
