#pragma once
// The oracle's own conversions between FP32 and the dtypes of rows, one number at a time.

#include <cstdint>
#include <span>

#include "ferry/dtype.hpp"

namespace ferry::support {

/// Bits of a value in a dtype, rounded to nearest even; a NaN stays a NaN.
std::uint32_t to_bits(DType dtype, float value);
/// The value of those bits, exact.
float from_bits(DType dtype, std::uint32_t bits);
/// Rounds every value to what the dtype can hold.
void round_values(DType dtype, std::span<float> values);

}  // namespace ferry::support
