// Rounds finished FP32 values to a row, once per SIMD target (hence no #pragma once). A NaN becomes
// one fixed pattern: which of two NaN an operation hands on depends on the order of its operands in
// the instruction, which a compiler may choose per target.
#if defined(FERRY_KERNELS_STORE_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_KERNELS_STORE_INL_HPP_
#undef FERRY_KERNELS_STORE_INL_HPP_
#else
#define FERRY_KERNELS_STORE_INL_HPP_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/lanes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {

HWY_INLINE FloatVec one_nan(FloatVec value) {
  const FloatTag df;
  const FloatVec nan = hn::BitCast(df, hn::Set(WordTag(), 0x7FC00000U));
  return hn::IfThenElse(hn::IsNaN(value), nan, value);
}

/// Whether a value may be NaN: where none is, the one NaN costs nothing.
enum class Nan : bool { none, possible };

/// Where a pair of vectors is written.
struct PairPlace {
  std::byte* out = nullptr;
  bool whole_lines = false;  ///< `out` lies on a cache line's grid: streaming stores
};

#if HWY_TARGET != HWY_SCALAR
using PairTag = hn::Repartition<std::uint16_t, FloatTag>;

/// The upper halves of 32-bit lanes are bf16, rounded to nearest even; a NaN is the one NaN.
template <Nan kNan>
HWY_INLINE hn::Vec<PairTag> bf16_in_upper_half(FloatVec value) {
  const WordTag dw;
  const auto bits = hn::BitCast(dw, value);
  const auto odd = hn::TestBit(bits, hn::Set(dw, 1U << 16));
  const auto rounded =
      hn::IfThenElse(odd, hn::Add(bits, hn::Set(dw, 0x8000U)), hn::Add(bits, hn::Set(dw, 0x7FFFU)));
  if constexpr (kNan == Nan::none) return hn::BitCast(PairTag(), rounded);
  const auto is_nan = hn::RebindMask(dw, hn::IsNaN(value));
  return hn::BitCast(PairTag(), hn::IfThenElse(is_nan, hn::Set(dw, 0x7FC00000U), rounded));
}

/// Both vectors as 16-bit elements, one after the other.
template <DType kTo, Nan kNan>
HWY_INLINE hn::Vec<PairTag> half_pair(FloatVec a, FloatVec b) {
  if constexpr (kTo == DType::bf16) {
    return hn::ConcatOdd(PairTag(), bf16_in_upper_half<kNan>(b), bf16_in_upper_half<kNan>(a));
  } else {
    return hn::Combine(PairTag(), half_words<kTo>(one_nan(b)), half_words<kTo>(one_nan(a)));
  }
}
#endif

/// Rounds two vectors to nearest even and writes them, one after the other.
template <DType kTo, Nan kNan = Nan::possible>
HWY_INLINE void put_pair(FloatVec a, FloatVec b, const PairPlace& place) {
  const FloatTag df;
  const std::size_t lanes = hn::Lanes(df);
#if HWY_TARGET != HWY_SCALAR
  if constexpr (kTo != DType::f32) {
    auto* const out = reinterpret_cast<std::uint16_t*>(place.out);
    if (place.whole_lines) {
      hn::Stream(half_pair<kTo, kNan>(a, b), PairTag(), out);
    } else {
      hn::StoreU(half_pair<kTo, kNan>(a, b), PairTag(), out);
    }
    return;
  }
  if (place.whole_lines) {
    hn::Stream(one_nan(a), df, reinterpret_cast<float*>(place.out));
    hn::Stream(one_nan(b), df, reinterpret_cast<float*>(place.out) + lanes);
    return;
  }
#endif
  store_lanes<kTo>(one_nan(a), place.out);
  store_lanes<kTo>(one_nan(b), place.out + lanes * element_bytes(kTo));
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
