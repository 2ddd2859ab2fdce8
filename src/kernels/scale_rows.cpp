// scale_rows: weight x row to each target, and the dot product with the target's own row. The
// source row becomes FP32 once, in chunks that stay in first-level cache.
//
// Invariants:
//   1. Products are rounded before they are added (Mul, then Add; contraction is off).
//   2. Column c of a row is added to lane c mod 16, in ascending order, on every target: chunks and
//      blocks start at multiples of 16. Columns past the end add 0 x 0 to a lane, which is not -0.

#include <bit>
#include <cmath>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/scale_rows.cpp"
#include "hwy/foreach_target.h"  // before highway.h: includes this file once per target
#include "hwy/highway.h"

#include "kernels/copy-inl.hpp"
#include "kernels/lanes-inl.hpp"
#include "kernels/lookahead.hpp"
#include "kernels/row_kernels.hpp"
#include "kernels/store-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {

inline constexpr std::size_t kDotLanes = 16;
/// Columns of the source row that are FP32 at a time (8 KiB).
inline constexpr std::size_t kScaleChunk = 2048;
/// The most columns of a block: two vectors, and all lanes of a dot product.
inline constexpr std::size_t kMostBlock = 2 * HWY_MAX_BYTES / sizeof(float) + kDotLanes;
static_assert(kScaleChunk % (2 * HWY_MAX_BYTES / sizeof(float)) == 0);
static_assert(kScaleChunk % kDotLanes == 0);

HWY_INLINE std::size_t block_columns() { return std::max(2 * hn::Lanes(FloatTag()), kDotLanes); }

/// The lanes of a dot product, loaded from memory and stored back around a run of columns.
class DotLanes {
 public:
#if HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE
  explicit DotLanes(float* memory) : memory_(memory) {}
  /// Adds a vector of products of columns that start at `column`.
  HWY_INLINE void add(std::size_t column, FloatVec products) {
    const FloatTag df;
    float* const at = memory_ + column % kDotLanes;
    hn::StoreU(hn::Add(hn::LoadU(df, at), products), df, at);
  }
  HWY_INLINE void store() const {}

 private:
#else
  HWY_INLINE explicit DotLanes(float* memory) : memory_(memory) {
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
  static constexpr std::size_t kVector = HWY_LANES(float);
  static constexpr std::size_t kVectorsOfLanes = kDotLanes / kVector;
  static_assert(kVectorsOfLanes * kVector == kDotLanes);
  FloatVec sums_[kVectorsOfLanes];
#endif
  float* memory_;
};

/// What one target makes of a run of columns of the source row.
struct ScaleRun {
  const float* source = nullptr;  ///< FP32, and 0 up to a whole block
  std::size_t count = 0;          ///< columns
  float weight = 1.0F;
  const std::byte* y = nullptr;
  std::byte* out = nullptr;
};

template <DType kTo, bool kDot>
HWY_INLINE void scale_block(const ScaleRun& run, std::size_t column, DotLanes& dot,
                            bool whole_lines) {
  constexpr std::size_t size = element_bytes(kTo);
  const FloatTag df;
  const std::size_t lanes = hn::Lanes(df);
  const FloatVec weight = hn::Set(df, run.weight);
  for (std::size_t i = 0; i < block_columns(); i += 2 * lanes) {
    const std::size_t at = column + i;
    const FloatVec a = hn::LoadU(df, run.source + at);
    const FloatVec b = hn::LoadU(df, run.source + at + lanes);
    if constexpr (kDot) {
      dot.add(i, hn::Mul(a, load_lanes<kTo>(run.y + at * size)));
      dot.add(i + lanes, hn::Mul(b, load_lanes<kTo>(run.y + (at + lanes) * size)));
    }
    put_pair<kTo>(hn::Mul(weight, a), hn::Mul(weight, b), {run.out + at * size, whole_lines});
  }
}

/// `lanes`: of the dot product so far.
template <DType kTo, bool kDot>
void scale_run(const ScaleRun& run, const detail::Lookahead& ahead, float* lanes) {
  constexpr std::size_t size = element_bytes(kTo);
  const std::size_t block = block_columns();
  const std::size_t whole = run.count - run.count % block;
  const bool whole_lines = line_offset(run.out) == 0;
  DotLanes dot(lanes);
  for (std::size_t column = 0; column < whole; column += block) {
    if constexpr (kDot) {
      for (std::size_t line = 0; line < block * size; line += detail::kLineBytes) {
        ahead.touch(column * size + line);
      }
    }
    scale_block<kTo, kDot>(run, column, dot, whole_lines);
  }
  if (whole < run.count) {
    // A row is never read or written past its end.
    alignas(64) std::byte y[kMostBlock * sizeof(float)] = {};
    alignas(64) std::byte out[kMostBlock * sizeof(float)];
    const std::size_t rest = (run.count - whole) * size;
    if constexpr (kDot) std::memcpy(y, run.y + whole * size, rest);
    const ScaleRun last{run.source + whole, run.count - whole, run.weight, y, out};
    scale_block<kTo, kDot>(last, 0, dot, false);
    std::memcpy(run.out + whole * size, out, rest);
  }
  dot.store();
}

/// The fixed tree over the lanes.
HWY_INLINE float sum_of_lanes(float* lanes) {
  for (std::size_t half = kDotLanes / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

/// One row and its targets, from `first` on among those of the job.
struct ScaleTask {
  const ScaleJob& job;
  const PushRow& row;
  const std::byte* later;  ///< the source row that is rows_ahead() further on, or null
};

/// Lanes of the dot products of a row's targets; its memory is used again.
using LaneRows = std::vector<float>;

template <DType kFrom, DType kTo>
void scale_row(const ScaleTask& task, LaneRows& lanes) {
  const ScaleJob& job = task.job;
  const std::size_t hidden = static_cast<std::size_t>(job.hidden);
  const std::size_t from_bytes = hidden * element_bytes(kFrom);
  const std::size_t to_bytes = hidden * element_bytes(kTo);
  const detail::Lookahead source_ahead =
      detail::look_past_row(task.row.source, from_bytes, task.later);
  alignas(64) float source[kScaleChunk + kMostBlock];
  lanes.assign(task.row.count * kDotLanes, 0.0F);
  for (std::size_t begin = 0; begin < hidden; begin += kScaleChunk) {
    const std::size_t count = std::min(kScaleChunk, hidden - begin);
    for (std::size_t at = 0; at < count * element_bytes(kFrom); at += detail::kLineBytes) {
      source_ahead.touch(begin * element_bytes(kFrom) + at);
    }
    convert_chunk<kFrom, DType::f32>(task.row.source + begin * element_bytes(kFrom), count,
                                     reinterpret_cast<std::byte*>(source));
    std::fill_n(source + count, kMostBlock, 0.0F);
    for (std::size_t k = 0; k < task.row.count; ++k) {
      const std::size_t index = task.row.first + k;
      const ScaleTarget& target = job.targets[index];
      const std::size_t offset = begin * element_bytes(kTo);
      ScaleRun run{source, count, target.weight, nullptr, target.out + offset};
      if (target.y == nullptr) {
        scale_run<kTo, false>(run, detail::Lookahead(nullptr, 0, nullptr), &lanes[k * kDotLanes]);
        continue;
      }
      run.y = target.y + offset;
      const std::size_t next = index + detail::rows_ahead(to_bytes);
      const std::byte* const later = next < job.targets.size() && job.targets[next].y != nullptr
                                         ? job.targets[next].y + offset
                                         : nullptr;
      scale_run<kTo, true>(run, detail::look_past_row(run.y, to_bytes, later),
                           &lanes[k * kDotLanes]);
    }
  }
  for (std::size_t k = 0; k < task.row.count; ++k) {
    const ScaleTarget& target = job.targets[task.row.first + k];
    if (target.y == nullptr) continue;
    const float dot = sum_of_lanes(&lanes[k * kDotLanes]);
    *target.dot = std::isnan(dot) ? std::bit_cast<float>(0x7FC00000U) : dot;
  }
}

using ScaleFunction = void (*)(const ScaleTask&, LaneRows&);

template <DType kFrom>
ScaleFunction choose_scale_from(DType to) {
  switch (to) {
    case DType::f32: return scale_row<kFrom, DType::f32>;
    case DType::bf16: return scale_row<kFrom, DType::bf16>;
    case DType::f16: return scale_row<kFrom, DType::f16>;
  }
  return nullptr;
}

ScaleFunction choose_scale(DType from, DType to) {
  switch (from) {
    case DType::f32: return choose_scale_from<DType::f32>(to);
    case DType::bf16: return choose_scale_from<DType::bf16>(to);
    case DType::f16: return choose_scale_from<DType::f16>(to);
  }
  return nullptr;
}

void scale_all(const ScaleJob& job) {
  const ScaleFunction scale = choose_scale(job.source_dtype, job.target_dtype);
  const std::size_t row_bytes =
      static_cast<std::size_t>(job.hidden) * element_bytes(job.source_dtype);
  const std::size_t distance = detail::rows_ahead(row_bytes);
  LaneRows lanes;
  for (std::size_t i = 0; i < job.rows.size(); ++i) {
    const std::byte* const later =
        i + distance < job.rows.size() ? job.rows[i + distance].source : nullptr;
    if (job.rows[i].count > 0) scale({job, job.rows[i], later}, lanes);
  }
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "base/check.hpp"
#include "kernels/float_state.hpp"

namespace ferry::kernels {

HWY_EXPORT(scale_all);

void scale_rows(const ScaleJob& job) {
  FERRY_ASSERT(job.hidden >= 1, "scale_rows: hidden = {}; allowed: 1 or more", job.hidden);
  const detail::FloatState state;
  HWY_DYNAMIC_DISPATCH(scale_all)(job);
}

}  // namespace ferry::kernels
#endif  // HWY_ONCE
