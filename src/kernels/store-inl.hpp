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

/// Where a pair of vectors is written.
struct PairPlace {
  std::byte* out = nullptr;
  bool whole_lines = false;  ///< `out` lies on a cache line's grid: streaming stores
};

/// Rounds two vectors to nearest even and writes them, one after the other.
template <DType kTo>
HWY_INLINE void put_pair(FloatVec a, FloatVec b, const PairPlace& place) {
  const FloatTag df;
  const std::size_t lanes = hn::Lanes(df);
  a = one_nan(a);
  b = one_nan(b);
#if HWY_TARGET != HWY_SCALAR
  if (place.whole_lines) {
    if constexpr (kTo == DType::f32) {
      hn::Stream(a, df, reinterpret_cast<float*>(place.out));
      hn::Stream(b, df, reinterpret_cast<float*>(place.out) + lanes);
    } else {
      const hn::Repartition<std::uint16_t, FloatTag> dh;
      hn::Stream(hn::Combine(dh, half_words<kTo>(b), half_words<kTo>(a)), dh,
                 reinterpret_cast<std::uint16_t*>(place.out));
    }
    return;
  }
#endif
  store_lanes<kTo>(a, place.out);
  store_lanes<kTo>(b, place.out + lanes * element_bytes(kTo));
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
