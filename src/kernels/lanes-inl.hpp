// Vectors of row elements as FP32 lanes and back, once per SIMD target (hence no #pragma once).
// Conversions are exact going up and round to nearest even going down. A NaN stays a NaN, becomes
// quiet, and keeps its sign and the upper bits of its payload. Every target gives the same bits:
// where the machine has no conversion instruction, integer code follows what F16C does.
#if defined(FERRY_KERNELS_LANES_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_KERNELS_LANES_INL_HPP_
#undef FERRY_KERNELS_LANES_INL_HPP_
#else
#define FERRY_KERNELS_LANES_INL_HPP_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ferry/dtype.hpp"
#include "hwy/highway.h"

// Highway's own f16 conversions lose denormals and NaN where F16C is missing.
#undef FERRY_NATIVE_F16
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
#define FERRY_NATIVE_F16 1
#else
#define FERRY_NATIVE_F16 0
#endif

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// As many as the widest fixed vectors have. Where vectors may be longer (SVE, RVV) this bounds
/// buffers, blocks and the lanes of a dot product at compile time, too.
inline constexpr std::size_t kMostLanes = std::min<std::size_t>(HWY_MAX_BYTES / sizeof(float), 16);
/// Bytes of a vector, at most.
inline constexpr std::size_t kMostVectorBytes = kMostLanes * sizeof(float);

// Vectors of a scalable machine have no size: they are locals, never members or array elements.
using FloatTag = hn::CappedTag<float, kMostLanes>;
using WordTag = hn::RebindToUnsigned<FloatTag>;
using HalfTag = hn::Rebind<std::uint16_t, FloatTag>;
using FloatVec = hn::Vec<FloatTag>;
using WordVec = hn::Vec<WordTag>;

/// FP32 value of f16 bits that stand in 32-bit lanes, without any f16 instruction.
HWY_INLINE FloatVec f16_words_to_float(WordVec half) {
  const FloatTag df;
  const WordTag dw;
  const auto magnitude = hn::And(half, hn::Set(dw, 0x7FFFU));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(half, magnitude));
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  const auto normal = hn::Add(shifted, hn::Set(dw, (127U - 15U) << 23));
  // Inf and NaN: exponent 255, and a NaN becomes quiet.
  const auto special = hn::Or(shifted, hn::Set(dw, 0xFFU << 23));
  const hn::RebindToSigned<WordTag> di;
  const auto is_nan = hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x7C00));
  const auto quiet =
      hn::And(hn::BitCast(dw, hn::VecFromMask(di, is_nan)), hn::Set(dw, 0x00400000U));
  // Denormal: an exact subtraction brings m x 2^-24 into shape.
  const auto base = hn::Set(dw, 113U << 23);
  const auto denormal =
      hn::BitCast(dw, hn::Sub(hn::BitCast(df, hn::Add(shifted, base)), hn::BitCast(df, base)));
  const auto exponent = hn::And(half, hn::Set(dw, 0x7C00U));
  const auto all_ones = hn::Eq(exponent, hn::Set(dw, 0x7C00U));
  auto bits = hn::IfThenElse(all_ones, hn::Or(special, quiet), normal);
  bits = hn::IfThenElse(hn::Eq(exponent, hn::Zero(dw)), denormal, bits);
  return hn::BitCast(df, hn::Or(bits, sign));
}

/// f16 bits, in 32-bit lanes, of FP32 values, without any f16 instruction.
HWY_INLINE WordVec float_to_f16_words(FloatVec value) {
  const FloatTag df;
  const WordTag dw;
  const hn::RebindToSigned<WordTag> di;
  const auto bits = hn::BitCast(dw, value);
  const auto magnitude = hn::And(bits, hn::Set(dw, 0x7FFFFFFFU));
  const auto sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(dw, 1U));
  // A carry out of the mantissa raises the exponent, up to Inf: that is rounding to nearest even.
  const auto rebased = hn::Sub(magnitude, hn::Set(dw, (127U - 15U) << 23));
  const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(rebased, hn::Set(dw, 0xFFFU)), odd));
  // Denormal result: adding 0.5 lets the adder round at 2^-24.
  const auto half = hn::Set(dw, 126U << 23);
  const auto denormal =
      hn::Sub(hn::BitCast(dw, hn::Add(hn::BitCast(df, magnitude), hn::BitCast(df, half))), half);
  const auto payload = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(dw, 0x3FFU));
  const auto nan = hn::Or(payload, hn::Set(dw, 0x7E00U));
  const auto compared = hn::BitCast(di, magnitude);  // the sign bit is clear
  const auto is_denormal = hn::RebindMask(dw, hn::Lt(compared, hn::Set(di, 0x38800000)));
  const auto is_large = hn::RebindMask(dw, hn::Gt(compared, hn::Set(di, 0x477FFFFF)));
  const auto is_nan = hn::RebindMask(dw, hn::Gt(compared, hn::Set(di, 0x7F800000)));
  auto result = hn::IfThenElse(is_denormal, denormal, normal);
  result = hn::IfThenElse(is_large, hn::Set(dw, 0x7C00U), result);
  result = hn::IfThenElse(is_nan, nan, result);
  return hn::Or(result, sign);
}

/// bf16 bits, in 32-bit lanes, of FP32 values.
HWY_INLINE WordVec float_to_bf16_words(FloatVec value) {
  const WordTag dw;
  const auto bits = hn::BitCast(dw, value);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(dw, 1U));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(dw, 0x7FFFU)), odd));
  const auto quiet = hn::Or(upper, hn::Set(dw, 0x40U));
  return hn::IfThenElse(hn::RebindMask(dw, hn::IsNaN(value)), quiet, rounded);
}

/// Lanes(FloatTag) elements at `at` (any alignment), as FP32.
template <DType kFrom>
HWY_INLINE FloatVec load_lanes(const std::byte* at) {
  const FloatTag df;
  if constexpr (kFrom == DType::f32) {
    return hn::LoadU(df, reinterpret_cast<const float*>(at));
  } else {
    const auto half = hn::LoadU(HalfTag(), reinterpret_cast<const std::uint16_t*>(at));
    if constexpr (kFrom == DType::bf16) {
      return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(WordTag(), half)));
    } else {
#if FERRY_NATIVE_F16
      return hn::PromoteTo(df, hn::BitCast(hn::Rebind<hwy::float16_t, FloatTag>(), half));
#else
      return f16_words_to_float(hn::PromoteTo(WordTag(), half));
#endif
    }
  }
}

/// What a finite value becomes that is too large for a 16-bit dtype: infinite as in arithmetic, or
/// the largest number as on the wire.
enum class Overflow : bool { infinite, saturates };

/// Finite values within what kTo can hold; an infinity or a NaN stays.
template <DType kTo>
HWY_INLINE FloatVec saturated(FloatVec value) {
  if constexpr (kTo == DType::f32) return value;
  const FloatTag df;
  const auto largest = hn::Set(df, kTo == DType::f16 ? 65504.0F : 0x1.FEp127F);
  const auto within = hn::Max(hn::Min(value, largest), hn::Neg(largest));
  return hn::IfThenElse(hn::IsFinite(value), within, value);
}

/// Each lane rounded to nearest even to a 16-bit dtype.
template <DType kTo>
HWY_INLINE hn::Vec<HalfTag> half_words(FloatVec value) {
  if constexpr (kTo == DType::bf16) {
    return hn::TruncateTo(HalfTag(), float_to_bf16_words(value));
  } else {
#if FERRY_NATIVE_F16
    const hn::Rebind<hwy::float16_t, FloatTag> dh;
    return hn::BitCast(HalfTag(), hn::DemoteTo(dh, value));
#else
    return hn::TruncateTo(HalfTag(), float_to_f16_words(value));
#endif
  }
}

/// Writes Lanes(FloatTag) elements at `at` (any alignment), each rounded to nearest even.
template <DType kTo>
HWY_INLINE void store_lanes(FloatVec value, std::byte* at) {
  if constexpr (kTo == DType::f32) {
    hn::StoreU(value, FloatTag(), reinterpret_cast<float*>(at));
  } else {
    hn::StoreU(half_words<kTo>(value), HalfTag(), reinterpret_cast<std::uint16_t*>(at));
  }
}

/// `count` elements at `source` to `out`, which has room for whole vectors.
template <DType kFrom, DType kTo>
HWY_NOINLINE void convert_chunk(const std::byte* source, std::size_t count, Overflow overflow,
                                std::byte* out) {
  constexpr std::size_t from_bytes = element_bytes(kFrom);
  constexpr std::size_t to_bytes = element_bytes(kTo);
  const std::size_t lanes = hn::Lanes(FloatTag());
  const std::size_t whole = count - count % lanes;
  const auto convert = [overflow](const std::byte* from, std::byte* to) {
    FloatVec value = load_lanes<kFrom>(from);
    if (overflow == Overflow::saturates) value = saturated<kTo>(value);
    store_lanes<kTo>(value, to);
  };
  for (std::size_t i = 0; i < whole; i += lanes) {
    convert(source + i * from_bytes, out + i * to_bytes);
  }
  if (whole == count) return;
  alignas(64) std::byte tail[kMostVectorBytes] = {};  // a row is never read past its end
  std::memcpy(tail, source + whole * from_bytes, (count - whole) * from_bytes);
  convert(tail, out + whole * to_bytes);
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
