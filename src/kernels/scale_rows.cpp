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

#include "kernels/blocks-inl.hpp"
#include "kernels/copy-inl.hpp"
#include "kernels/dot_lanes-inl.hpp"
#include "kernels/lanes-inl.hpp"
#include "kernels/lookahead.hpp"
#include "kernels/row_kernels.hpp"
#include "kernels/store-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {

/// Columns of the source row that are FP32 at a time (8 KiB).
inline constexpr std::size_t kScaleChunk = 2048;
/// The most columns of a block: two vectors, and all lanes of a dot product.
inline constexpr std::size_t kMostBlock = 2 * kMostLanes + kDotLanes;
static_assert(kScaleChunk % (2 * kMostLanes) == 0);
static_assert(kScaleChunk % kDotLanes == 0);
static_assert(kScaleChunk % kMostBlockColumns == 0);

HWY_INLINE std::size_t block_columns() { return std::max(2 * hn::Lanes(FloatTag()), kDotLanes); }

/// Columns that are prefetched at a time: whole lines in every format.
inline constexpr std::size_t kAheadColumns = detail::kLineBytes;

/// Columns of the source row as FP32, and 0 up to a whole block.
struct ScaleSource {
  const float* values = nullptr;
  std::size_t count = 0;
  bool finite = false;  ///< no NaN, no infinity
  /// What to prefetch of source rows while these columns are worked on, from which offset on, and
  /// how many bytes a column has there. Asked for at once, most of it would be dropped.
  detail::Lookahead ahead{nullptr, 0, nullptr};
  std::size_t offset = 0;
  std::size_t column_bytes = 0;
};

/// What one target makes of them.
struct ScaleRun {
  float weight = 1.0F;
  bool whole_lines = false;
  const std::byte* y = nullptr;
  std::byte* out = nullptr;
  float* lanes = nullptr;  ///< of the dot product so far
  detail::Lookahead ahead{nullptr, 0, nullptr};
};

/// What is made of a block of columns.
struct ScaleKind {
  bool dots = false;
  Nan nan = Nan::possible;
};

/// One block of columns of one target.
template <DType kTo, ScaleKind kKind>
HWY_INLINE void scale_block(const float* source, std::size_t column, const ScaleRun& run,
                            DotLanes& dot) {
  constexpr std::size_t size = element_bytes(kTo);
  const FloatTag df;
  const std::size_t lanes = hn::Lanes(df);
  const FloatVec weight = hn::Set(df, run.weight);
  for (std::size_t i = 0; i < block_columns(); i += 2 * lanes) {
    const std::size_t at = column + i;
    const FloatVec a = hn::LoadU(df, source + at);
    const FloatVec b = hn::LoadU(df, source + at + lanes);
    if constexpr (kKind.dots) {
      dot.add(i, hn::Mul(a, load_lanes<kTo>(run.y + at * size)));
      dot.add(i + lanes, hn::Mul(b, load_lanes<kTo>(run.y + (at + lanes) * size)));
    }
    put_pair<kTo, kKind.nan>(hn::Mul(weight, a), hn::Mul(weight, b),
                             {run.out + at * size, run.whole_lines});
  }
}

/// The columns behind the last whole block. A row is never read or written past its end.
template <DType kTo, ScaleKind kKind>
void scale_last(const ScaleSource& source, std::size_t done, const ScaleRun& run, DotLanes& dot) {
  constexpr std::size_t size = element_bytes(kTo);
  alignas(64) std::byte y[kMostBlock * sizeof(float)] = {};
  alignas(64) std::byte out[kMostBlock * sizeof(float)];
  const std::size_t rest = (source.count - done) * size;
  if constexpr (kKind.dots) std::memcpy(y, run.y + done * size, rest);
  ScaleRun last = run;
  last.y = y;
  last.out = out;
  last.whole_lines = false;
  scale_block<kTo, kKind>(source.values + done, 0, last, dot);
  std::memcpy(run.out + done * size, out, rest);
}

/// Targets side by side: a dot product is a chain of additions, and two of them fill the gaps.
template <DType kTo, ScaleKind kKind, std::size_t kTargets>
void scale_runs(const ScaleSource& source, const ScaleRun* runs) {
  constexpr std::size_t size = element_bytes(kTo);
  const std::size_t block = block_columns();
  const std::size_t whole = source.count - source.count % block;
  DotLanes dots[kTargets];
  for (std::size_t k = 0; kKind.dots && k < kTargets; ++k) dots[k].load(runs[k].lanes);
  for (std::size_t column = 0; column < whole; column += block) {
    if (column % kAheadColumns == 0) {
      source.ahead.touch_lines(source.offset + column * source.column_bytes,
                               kAheadColumns * source.column_bytes);
      for (std::size_t k = 0; kKind.dots && k < kTargets; ++k) {
        runs[k].ahead.touch_lines(column * size, kAheadColumns * size);
      }
    }
    for (std::size_t k = 0; k < kTargets; ++k) {
      scale_block<kTo, kKind>(source.values, column, runs[k], dots[k]);
    }
  }
  for (std::size_t k = 0; k < kTargets; ++k) {
    if (whole < source.count) scale_last<kTo, kKind>(source, whole, runs[k], dots[k]);
    if constexpr (kKind.dots) dots[k].store();
  }
}

/// Requires: 0 up to a whole vector behind the columns
HWY_INLINE bool is_finite(const float* columns, std::size_t count) {
  const FloatTag df;
  const hn::RebindToSigned<FloatTag> di;
  auto largest = hn::Zero(di);
  for (std::size_t i = 0; i < count; i += hn::Lanes(df)) {
    const auto magnitude = hn::Abs(hn::LoadU(df, columns + i));
    largest = hn::Max(largest, hn::BitCast(di, magnitude));
  }
  return hn::AllTrue(di, hn::Lt(largest, hn::Set(di, 0x7F800000)));
}

/// One row and its targets, from `first` on among those of the job.
struct ScaleTask {
  const ScaleJob& job;
  const PushRow& row;
  const std::byte* later;  ///< the source row that is rows_ahead() further on, or null
};

/// A target's part in a run of columns that starts at `begin`.
template <DType kTo>
ScaleRun run_of(const ScaleJob& job, std::size_t index, std::size_t begin, float* lanes) {
  const ScaleTarget& target = job.targets[index];
  const std::size_t offset = begin * element_bytes(kTo);
  ScaleRun run{.weight = target.weight, .out = target.out + offset, .lanes = lanes};
  run.whole_lines = line_offset(run.out) == 0;
  if (target.y == nullptr) return run;
  run.y = target.y + offset;
  const std::size_t row_bytes = static_cast<std::size_t>(job.hidden) * element_bytes(kTo);
  const std::size_t next = index + std::max<std::size_t>(detail::rows_ahead(row_bytes), 2);
  const bool follows = next < job.targets.size() && job.targets[next].y != nullptr;
  run.ahead =
      detail::look_past_row(run.y, row_bytes, follows ? job.targets[next].y + offset : nullptr);
  return run;
}

/// Targets that are worked on side by side.
inline constexpr std::size_t kMostSide = 8;
inline constexpr std::size_t kMostDots = 2;
using RunsFunction = void (*)(const ScaleSource&, const ScaleRun*);
/// For 1, 2, 4 and 8 of them.
template <DType kTo, ScaleKind kKind>
inline constexpr RunsFunction kScaleRuns[] = {scale_runs<kTo, kKind, 1>, scale_runs<kTo, kKind, 2>,
                                              scale_runs<kTo, kKind, 4>, scale_runs<kTo, kKind, 8>};

template <DType kTo>
const RunsFunction* choose_runs(bool dots, Nan nan) {
  if (nan == Nan::none) {
    return dots ? kScaleRuns<kTo, ScaleKind{true, Nan::none}>
                : kScaleRuns<kTo, ScaleKind{false, Nan::none}>;
  }
  return dots ? kScaleRuns<kTo, ScaleKind{true, Nan::possible}>
              : kScaleRuns<kTo, ScaleKind{false, Nan::possible}>;
}

/// All targets of a row, for a run of columns that starts at `begin`.
template <DType kTo>
void scale_targets(const ScaleTask& task, ScaleSource source, std::size_t begin, float* lanes) {
  const auto run = [&](std::size_t k) {
    return run_of<kTo>(task.job, task.row.first + k, begin, lanes + k * kDotLanes);
  };
  const auto has_dot = [&](std::size_t k) {
    return task.job.targets[task.row.first + k].y != nullptr;
  };
  ScaleRun runs[kMostSide];
  for (std::size_t k = 0; k < task.row.count;) {
    const bool dots = has_dot(k);
    Nan nan = source.finite ? Nan::none : Nan::possible;
    std::size_t side = 0;
    for (; side < (dots ? kMostDots : kMostSide) && k + side < task.row.count &&
           has_dot(k + side) == dots;
         ++side) {
      runs[side] = run(k + side);
      if (!std::isfinite(runs[side].weight)) nan = Nan::possible;
    }
    side = std::bit_floor(side);
    choose_runs<kTo>(dots, nan)[std::countr_zero(side)](source, runs);
    k += side;
    source.column_bytes = 0;  // the first ones have asked for all of it
  }
}

/// Lanes of the dot products of a row's targets; its memory is used again.
using LaneRows = std::vector<float>;

template <DType kTo>
void scale_row(const ScaleTask& task, ReadFunction read, LaneRows& lanes) {
  const ScaleJob& job = task.job;
  const std::size_t hidden = static_cast<std::size_t>(job.hidden);
  const std::size_t column_bytes = element_bytes(job.source.format);
  const ReadRow from = open_row(job.source, task.row.source, job.hidden);
  const detail::Lookahead source_ahead =
      detail::look_past_row(task.row.source, job.source.row_bytes(job.hidden), task.later);
  alignas(64) float source[kScaleChunk + kMostBlock];
  lanes.assign(task.row.count * kDotLanes, 0.0F);
  for (std::size_t begin = 0; begin < hidden; begin += kScaleChunk) {
    const std::size_t count = std::min(kScaleChunk, hidden - begin);
    read(from, begin, count, reinterpret_cast<std::byte*>(source));
    std::fill_n(source + count, kMostBlock, 0.0F);
    scale_targets<kTo>(task,
                       {.values = source,
                        .count = count,
                        .finite = is_finite(source, count),
                        .ahead = source_ahead,
                        .offset = begin * column_bytes,
                        .column_bytes = column_bytes},
                       begin, lanes.data());
  }
  for (std::size_t k = 0; k < task.row.count; ++k) {
    const ScaleTarget& target = job.targets[task.row.first + k];
    if (target.y == nullptr) continue;
    const float dot = sum_of_lanes(&lanes[k * kDotLanes]);
    *target.dot = std::isnan(dot) ? std::bit_cast<float>(0x7FC00000U) : dot;
  }
}

using ScaleFunction = void (*)(const ScaleTask&, ReadFunction, LaneRows&);

ScaleFunction choose_scale(DType to) {
  switch (to) {
    case DType::f32: return scale_row<DType::f32>;
    case DType::bf16: return scale_row<DType::bf16>;
    case DType::f16: return scale_row<DType::f16>;
  }
  return nullptr;
}

void scale_all(const ScaleJob& job) {
  const ScaleFunction scale = choose_scale(job.target_dtype);
  const ReadFunction read = choose_read<DType::f32>(job.source.format);
  const std::size_t row_bytes = job.source.row_bytes(job.hidden);
  const std::size_t distance = detail::rows_ahead(row_bytes);
  LaneRows lanes;
  for (std::size_t i = 0; i < job.rows.size(); ++i) {
    const std::byte* const later =
        i + distance < job.rows.size() ? job.rows[i + distance].source : nullptr;
    if (job.rows[i].count > 0) scale({job, job.rows[i], later}, read, lanes);
  }
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "base/check.hpp"
#include "kernels/check_blocks.hpp"
#include "kernels/float_state.hpp"

namespace ferry::kernels {

HWY_EXPORT(scale_all);

void scale_rows(const ScaleJob& job) {
  FERRY_ASSERT(job.hidden >= 1, "scale_rows: hidden = {}; allowed: 1 or more", job.hidden);
  detail::check_blocks("scale_rows", job.source);
  const detail::FloatState state;
  HWY_DYNAMIC_DISPATCH(scale_all)(job);
}

}  // namespace ferry::kernels
#endif  // HWY_ONCE
