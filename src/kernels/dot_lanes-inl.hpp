// Sums over the columns of a row that have the same bits on every SIMD target (once per target,
// hence no #pragma once): 16 lanes add up alone, whatever a vector holds, then in one fixed tree.
#if defined(FERRY_KERNELS_DOT_LANES_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_KERNELS_DOT_LANES_INL_HPP_
#undef FERRY_KERNELS_DOT_LANES_INL_HPP_
#else
#define FERRY_KERNELS_DOT_LANES_INL_HPP_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/lanes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {

inline constexpr std::size_t kDotLanes = 16;
static_assert(kDotLanes % kMostLanes == 0);

/// Lane i adds columns i, i + 16, ...: loaded from memory and stored back around a run of columns.
class DotLanes {
 public:
#if HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE
  void load(float* memory) { memory_ = memory; }
  /// Adds a vector of products of columns that start at `column`.
  HWY_INLINE void add(std::size_t column, FloatVec products) {
    const FloatTag df;
    float* const at = memory_ + column % kDotLanes;
    hn::StoreU(hn::Add(hn::LoadU(df, at), products), df, at);
  }
  void store() const {}

 private:
#else
  // Spelled out: an implicit one is not compiled for the target, so it could not make vectors.
  HWY_INLINE DotLanes() {}
  HWY_INLINE void load(float* memory) {
    memory_ = memory;
    for (std::size_t i = 0; i < kVectorsOfLanes; ++i) {
      sums_[i] = hn::LoadU(FloatTag(), memory + i * kVector);
    }
  }
  HWY_INLINE void add(std::size_t column, FloatVec products) {
    FloatVec& sum = sums_[column % kDotLanes / kVector];
    sum = hn::Add(sum, products);
  }
  HWY_INLINE void store() const {
    for (std::size_t i = 0; i < kVectorsOfLanes; ++i) {
      hn::StoreU(sums_[i], FloatTag(), memory_ + i * kVector);
    }
  }

 private:
  static constexpr std::size_t kVector = kMostLanes;
  static constexpr std::size_t kVectorsOfLanes = kDotLanes / kVector;
  FloatVec sums_[kVectorsOfLanes];
#endif
  float* memory_ = nullptr;
};

/// The fixed tree over the lanes.
HWY_INLINE float sum_of_lanes(float* lanes) {
  for (std::size_t half = kDotLanes / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
