// Scalar conversions of the oracle: IEEE rules written out, sharing nothing with the kernels.

#include "support/numbers.hpp"

#include <bit>
#include <cmath>

namespace ferry::support {
namespace {

std::uint32_t f16_bits(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const float size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7E00U | ((bits >> 13) & 0x3FFU);
  if (size >= 65520.0F) return sign | 0x7C00U;  // half way to 2^16 and above
  if (size < 0x1p-14F) return sign | static_cast<std::uint32_t>(std::nearbyint(size * 0x1p24F));
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  return sign | (((magnitude + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13) - (112U << 10));
}

float f16_value(std::uint32_t bits) {
  const std::uint32_t exponent = (bits >> 10) & 31U;
  const std::uint32_t fraction = bits & 0x3FFU;
  const float sign = (bits & 0x8000U) != 0 ? -1.0F : 1.0F;
  if (exponent == 0) return sign * static_cast<float>(fraction) * 0x1p-24F;
  const std::uint32_t wide = exponent == 31 ? 255U : exponent + 112U;
  return std::bit_cast<float>((bits & 0x8000U) << 16 | wide << 23 | fraction << 13);
}

// The top half, rounded to nearest even; a NaN stays one instead of being carried into infinity.
std::uint32_t bf16_bits(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return (bits & 0x7FFFFFFFU) > 0x7F800000U ? (bits >> 16) | 0x40U : rounded;
}

}  // namespace

std::uint32_t to_bits(DType dtype, float value) {
  switch (dtype) {
    case DType::f32: return std::bit_cast<std::uint32_t>(value);
    case DType::bf16: return bf16_bits(value);
    case DType::f16: return f16_bits(value);
  }
  return 0;
}

float from_bits(DType dtype, std::uint32_t bits) {
  switch (dtype) {
    case DType::f32: return std::bit_cast<float>(bits);
    case DType::bf16: return std::bit_cast<float>(bits << 16);
    case DType::f16: return f16_value(bits);
  }
  return 0;
}

void round_values(DType dtype, std::span<float> values) {
  switch (dtype) {
    case DType::f32: return;
    case DType::bf16:
      for (float& value : values) value = std::bit_cast<float>(bf16_bits(value) << 16);
      return;
    case DType::f16:
      for (float& value : values) value = f16_value(f16_bits(value));
      return;
  }
}

}  // namespace ferry::support
