// Adds the columns of up to eight terms, read side by side, to one FP32 sum; once per SIMD target
// (hence no #pragma once). A block of columns is summed over all terms in registers, so the sum is
// loaded and stored once per bunch; the last bunch of a row is rounded and written from registers.
// Measured on two cores with rows of 4 KiB at random places: 12 % faster than term after term with
// the sum in first-level cache; rounding in a pass of its own costs 15 %, and leaving out the
// software prefetch 10 % (term after term: twice the time).
#if defined(FERRY_KERNELS_SUM_STREAMS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_KERNELS_SUM_STREAMS_INL_HPP_
#undef FERRY_KERNELS_SUM_STREAMS_INL_HPP_
#else
#define FERRY_KERNELS_SUM_STREAMS_INL_HPP_
#endif

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/blocks-inl.hpp"
#include "kernels/lanes-inl.hpp"
#include "kernels/lookahead.hpp"
#include "kernels/row_kernels.hpp"
#include "kernels/store-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {

/// Terms that are read side by side: each is a stream of its own for the hardware prefetcher.
inline constexpr std::size_t kMostTerms = 8;
/// Vectors of each stream that are summed in registers at a time.
inline constexpr std::size_t kVectors = 4;
static_assert(kFewestBlockColumns % (kVectors * kMostLanes) == 0);  // one scale at a time

/// Terms of one format that follow each other into the same level of the tree.
struct Bunch {
  std::size_t first = 0;  ///< index of its first term in the job
  std::size_t count = 0;
};

/// A bunch as the inner loop reads it. Byte offsets count from the first of the current columns.
struct Streams {
  const std::byte* at[kMostTerms];
  float weights[kMostTerms];
  const std::byte* scales[kMostTerms];  ///< from the block of the first column on
  unsigned block_shift = 0;             ///< of the columns that share a scale
  /// What to prefetch at byte offset o: near[k] + o below `split`, far[k] + o from there on.
  std::uintptr_t near[kMostTerms];
  std::uintptr_t far[kMostTerms];
  std::size_t split = 0;
  std::size_t count = 0;
};

/// Lays out the bunch for the inner loop. Streams share the prefetch distance between them; past
/// the end of a row it goes on at the start of the term one bunch further on, which is mostly what
/// is read next. A wrong guess costs no more than a prefetch.
HWY_INLINE Streams open_streams(const SumJob& job, const Bunch& bunch, std::size_t begin) {
  const WireFormat format = job.terms[bunch.first].format;
  const std::size_t size = element_bytes(format);
  const std::size_t row_bytes = static_cast<std::size_t>(job.hidden) * size;
  const std::size_t in_front = scale_bytes(format, job.hidden, job.block_columns);
  const std::size_t begin_bytes = begin * size;
  const std::size_t distance = detail::kAheadBytes / bunch.count;
  const bool long_rows = row_bytes >= distance;
  const std::size_t skipped = bunch.count * (long_rows ? 1 : distance / row_bytes);
  Streams streams = {};
  streams.count = bunch.count;
  streams.block_shift = static_cast<unsigned>(std::countr_zero(job.block_columns));
  streams.split = row_bytes - std::min(row_bytes, distance + begin_bytes);
  for (std::size_t k = 0; k < bunch.count; ++k) {
    const SumTerm& term = job.terms[bunch.first + k];
    streams.at[k] = term.row + in_front + begin_bytes;
    // Columns of a quantised row are bytes.
    if (in_front > 0) {
      streams.scales[k] = term.row + (begin_bytes >> streams.block_shift) * sizeof(float);
    }
    // Times 1 is exact, so rows that are added as they are need no code of their own.
    streams.weights[k] = term.weighted ? term.weight : 1.0F;
    const auto here = reinterpret_cast<std::uintptr_t>(streams.at[k]);
    streams.near[k] = here + distance;
    const std::size_t later = bunch.first + k + skipped;
    if (later < job.terms.size()) {
      const auto there =
          reinterpret_cast<std::uintptr_t>(job.terms[later].row) + in_front + begin_bytes;
      streams.far[k] = long_rows ? there + distance - row_bytes : there;
    } else {
      streams.far[k] = here;
    }
  }
  return streams;
}

/// Where the result of a block goes: back to the sum, or rounded to the row of the result.
struct Keep {
  static constexpr bool kRounds = false;
};
template <DType kToType>
struct RoundTo {
  static constexpr bool kRounds = true;
  static constexpr DType kTo = kToType;
};

/// A run of columns in the sum and in the row of the result.
struct Place {
  float* sum = nullptr;      ///< aligned to a vector
  std::byte* out = nullptr;  ///< any alignment; used by RoundTo only
  bool starts = false;       ///< nothing is in the sum yet
  bool whole_lines = false;  ///< `out` is the start of a cache line: streaming stores
  Overflow overflow = Overflow::infinite;
};

/// Of the codes at `offset`; rows that are not quantised have none.
template <WireFormat kFrom>
HWY_INLINE FloatVec scale_of(const Streams& streams, std::size_t k, std::size_t offset) {
  if constexpr (!is_quantised(kFrom)) return hn::Zero(FloatTag());
  const std::size_t block = offset >> streams.block_shift;
  return hn::Set(FloatTag(), load_scale<kFrom>(streams.scales[k] + block * sizeof(float)));
}

template <WireFormat kFrom>
HWY_INLINE FloatVec load_term(const std::byte* at, FloatVec weight, FloatVec scale) {
  if constexpr (is_quantised(kFrom)) {
    return hn::Mul(weight, hn::Mul(scale, load_codes<kFrom>(at)));
  } else {
    return hn::Mul(weight, load_lanes<dtype_of(kFrom)>(at));
  }
}

/// Adds kVectors vectors of every stream, at byte offset `offset`, in the order of the streams.
template <WireFormat kFrom, class Result>
HWY_INLINE void add_block(const Streams& streams, std::size_t offset, const Place& place) {
  const FloatTag df;
  const std::size_t lanes = hn::Lanes(df);
  const std::size_t step = lanes * element_bytes(kFrom);
  const std::byte* at = streams.at[0] + offset;
  FloatVec weight = hn::Set(df, streams.weights[0]);
  FloatVec scale = scale_of<kFrom>(streams, 0, offset);
  FloatVec a = load_term<kFrom>(at, weight, scale);
  FloatVec b = load_term<kFrom>(at + step, weight, scale);
  FloatVec c = load_term<kFrom>(at + 2 * step, weight, scale);
  FloatVec d = load_term<kFrom>(at + 3 * step, weight, scale);
  if (!place.starts) {
    a = hn::Add(hn::Load(df, place.sum), a);
    b = hn::Add(hn::Load(df, place.sum + lanes), b);
    c = hn::Add(hn::Load(df, place.sum + 2 * lanes), c);
    d = hn::Add(hn::Load(df, place.sum + 3 * lanes), d);
  }
  for (std::size_t k = 1; k < streams.count; ++k) {
    at = streams.at[k] + offset;
    weight = hn::Set(df, streams.weights[k]);
    scale = scale_of<kFrom>(streams, k, offset);
    a = hn::Add(a, load_term<kFrom>(at, weight, scale));
    b = hn::Add(b, load_term<kFrom>(at + step, weight, scale));
    c = hn::Add(c, load_term<kFrom>(at + 2 * step, weight, scale));
    d = hn::Add(d, load_term<kFrom>(at + 3 * step, weight, scale));
  }
  if constexpr (Result::kRounds) {
    if (place.overflow == Overflow::saturates) {
      a = saturated<Result::kTo>(a);
      b = saturated<Result::kTo>(b);
      c = saturated<Result::kTo>(c);
      d = saturated<Result::kTo>(d);
    }
    std::byte* const second = place.out + 2 * lanes * element_bytes(Result::kTo);
    put_pair<Result::kTo>(a, b, {place.out, place.whole_lines});
    put_pair<Result::kTo>(c, d, {second, place.whole_lines});
  } else {
    hn::Store(a, df, place.sum);
    hn::Store(b, df, place.sum + lanes);
    hn::Store(c, df, place.sum + 2 * lanes);
    hn::Store(d, df, place.sum + 3 * lanes);
  }
}

HWY_INLINE void prefetch_block(const Streams& streams, std::size_t offset, std::size_t bytes) {
  // Blocks that share a line: the first has asked for it.
  if (bytes < detail::kLineBytes && offset % detail::kLineBytes != 0) return;
  const std::uintptr_t* base = offset < streams.split ? streams.near : streams.far;
  for (std::size_t k = 0; k < streams.count; ++k) {
    for (std::size_t line = 0; line < bytes; line += detail::kLineBytes) {
      __builtin_prefetch(reinterpret_cast<const void*>(base[k] + offset + line));
    }
  }
}

template <WireFormat kFrom, class Result>
void add_streams(const Streams& streams, std::size_t columns, const Place& start);

/// The last `columns` of the streams, fewer than a block, from column `done` on. A row is never
/// read or written past its end: its last columns are copied, padded, to and fro.
template <WireFormat kFrom, class Result>
void add_last_columns(const Streams& streams, std::size_t done, std::size_t columns, Place place) {
  constexpr std::size_t size = element_bytes(kFrom);
  alignas(64) std::byte rows[kMostTerms][kVectors * kMostVectorBytes] = {};
  alignas(64) std::byte out[kVectors * kMostVectorBytes];
  Streams padded = streams;
  for (std::size_t k = 0; k < streams.count; ++k) {
    std::memcpy(rows[k], streams.at[k] + done * size, columns * size);
    padded.at[k] = rows[k];
    if constexpr (is_quantised(kFrom)) {
      padded.scales[k] = streams.scales[k] + (done >> streams.block_shift) * sizeof(float);
    }
  }
  std::byte* final_out = place.out;
  place.out = out;
  place.whole_lines = false;
  add_streams<kFrom, Result>(padded, kVectors * hn::Lanes(FloatTag()), place);
  if constexpr (Result::kRounds) std::memcpy(final_out, out, columns * element_bytes(Result::kTo));
}

/// Adds `columns` columns of all streams to the sum at `start`, which has room for whole blocks.
template <WireFormat kFrom, class Result>
void add_streams(const Streams& streams, std::size_t columns, const Place& start) {
  constexpr std::size_t size = element_bytes(kFrom);
  const std::size_t block = kVectors * hn::Lanes(FloatTag());
  Place place = start;
  std::size_t i = 0;
  for (; i < columns; i += block) {
    prefetch_block(streams, i * size, block * size);
    if (i + block > columns) {
      add_last_columns<kFrom, Result>(streams, i, columns - i, place);
      return;
    }
    add_block<kFrom, Result>(streams, i * size, place);
    place.sum += block;
    if constexpr (Result::kRounds) place.out += block * element_bytes(Result::kTo);
  }
}

using AddFunction = void (*)(const Streams&, std::size_t, const Place&);

template <class Result>
AddFunction choose_result(WireFormat from) {
  switch (from) {
    case WireFormat::f32: return add_streams<WireFormat::f32, Result>;
    case WireFormat::bf16: return add_streams<WireFormat::bf16, Result>;
    case WireFormat::f16: return add_streams<WireFormat::f16, Result>;
    case WireFormat::fp8_e4m3fn: return add_streams<WireFormat::fp8_e4m3fn, Result>;
    case WireFormat::int8: return add_streams<WireFormat::int8, Result>;
    case WireFormat::sparse_f32:
    case WireFormat::sparse_bf16:
    case WireFormat::sparse_f16: break;  // expanded before
  }
  return nullptr;
}

/// What adds a bunch of rows to a sum.
inline AddFunction choose_add(WireFormat from) { return choose_result<Keep>(from); }

/// The same for the last bunch of a row, which rounds the sum to `to` and writes it; null where a
/// whole block must be known first.
inline AddFunction choose_finish(WireFormat from, WireFormat to) {
  switch (to) {
    case WireFormat::f32: return choose_result<RoundTo<DType::f32>>(from);
    case WireFormat::bf16: return choose_result<RoundTo<DType::bf16>>(from);
    case WireFormat::f16: return choose_result<RoundTo<DType::f16>>(from);
    case WireFormat::fp8_e4m3fn: return nullptr;
    case WireFormat::int8: return nullptr;
    case WireFormat::sparse_f32:
    case WireFormat::sparse_bf16:
    case WireFormat::sparse_f16: break;  // expanded before
  }
  return nullptr;
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
