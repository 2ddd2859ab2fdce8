// Keeps the largest values of blocks of columns. The smallest that is kept is found bit by bit,
// with a count of those that reach it; nothing is sorted.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/keep_largest.cpp"
#include "hwy/foreach_target.h"  // before highway.h: includes this file once per target
#include "hwy/highway.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "ferry/wire_format.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::size_t kMostElementLanes = 64;

template <typename S>
using MagnitudeTag = hn::CappedTag<S, kMostElementLanes>;

/// How many of `count` magnitudes are at least `limit`, 1 or more. Requires: whole vectors
template <typename S>
HWY_INLINE std::size_t count_from(const S* magnitudes, std::size_t count, S limit) {
  const MagnitudeTag<S> d;
  const auto below = hn::Set(d, static_cast<S>(limit - 1));  // integers have no Ge
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; i += hn::Lanes(d)) {
    found += hn::CountTrue(d, hn::Gt(hn::Load(d, magnitudes + i), below));
  }
  return found;
}

/// The largest number that at least `keep` of the magnitudes reach, at least 1: bit by bit, since
/// magnitudes have the order of their bits.
template <typename S>
HWY_INLINE S smallest_kept(const S* magnitudes, std::size_t count, std::size_t keep) {
  S limit = 0;
  for (int bit = static_cast<int>(sizeof(S)) * 8 - 2; bit >= 0; --bit) {
    const S candidate = static_cast<S>(limit | S{1} << bit);
    const std::size_t reached = count_from(magnitudes, count, candidate);
    if (reached >= keep) limit = candidate;
    if (reached == keep) break;
  }
  return std::max(limit, S{1});
}

/// Keeps `keep` elements of a block of at most kMostBlockColumns, the first of equal magnitudes.
template <typename T>
HWY_NOINLINE void keep_in_block(std::byte* block, std::size_t count, std::size_t keep) {
  using S = std::make_signed_t<T>;
  const MagnitudeTag<S> d;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t whole = count - count % lanes;
  const auto mask = hn::Set(d, std::numeric_limits<S>::max());
  alignas(64) S magnitudes[kMostBlockColumns + kMostElementLanes];
  alignas(64) S tail[kMostElementLanes] = {};
  std::memcpy(tail, block + whole * sizeof(S), (count - whole) * sizeof(S));
  S* const elements = reinterpret_cast<S*>(block);
  const auto for_each_vector = [&](const auto& visit) {
    for (std::size_t i = 0; i < whole; i += lanes) visit(elements + i, magnitudes + i);
    if (whole < count) visit(tail, magnitudes + whole);
  };
  for_each_vector(
      [&](const S* from, S* to) { hn::Store(hn::And(hn::LoadU(d, from), mask), d, to); });
  const std::size_t padded = whole + (whole < count ? lanes : 0);
  const S limit = keep < count ? smallest_kept(magnitudes, padded, keep) : S{1};
  const auto below = hn::Set(d, static_cast<S>(limit - 1));
  for_each_vector([&](S* at, const S* magnitude) {
    const auto kept = hn::Gt(hn::Load(d, magnitude), below);
    hn::StoreU(hn::IfThenElseZero(kept, hn::LoadU(d, at)), d, at);
  });
  std::memcpy(block + whole * sizeof(S), tail, (count - whole) * sizeof(S));
  std::size_t kept = count_from(magnitudes, padded, limit);
  for (std::size_t i = count; kept > keep; --kept) {  // the last of equal ones
    do --i;
    while (magnitudes[i] != limit);
    std::memset(block + i * sizeof(S), 0, sizeof(S));
  }
}

void keep_in_columns(std::byte* block, std::size_t count, std::size_t element_bytes,
                     std::size_t keep) {
  if (element_bytes == sizeof(std::uint16_t)) {
    keep_in_block<std::uint16_t>(block, count, keep);
  } else {
    keep_in_block<std::uint32_t>(block, count, keep);
  }
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cmath>

#include "kernels/sparse_mask.hpp"
#include "kernels/sparse_rows.hpp"

namespace ferry::kernels {

HWY_EXPORT(keep_in_columns);

SparseCounts keep_largest(const KeepLargestJob& job) {
  check_shape("keep_largest", job.shape);
  FERRY_ASSERT(job.ratio > 0 && job.ratio <= 1 && job.block_columns > 0 &&
                   job.block_columns <= kMostBlockColumns,
               "keep_largest: ratio = {} in blocks of {}", job.ratio, job.block_columns);
  const std::size_t columns = job.shape.columns();
  const std::size_t size = job.shape.element_bytes;
  SparseMask mask(job.shape);
  SparseCounts counts;
  for (std::uint32_t i = 0; i < job.num_rows; ++i) {
    std::byte* const row = job.rows + i * job.shape.row_bytes();
    for (std::size_t begin = 0; begin < columns; begin += job.block_columns) {
      const std::size_t count = std::min<std::size_t>(job.block_columns, columns - begin);
      const auto keep = static_cast<std::size_t>(std::ceil(job.ratio * static_cast<float>(count)));
      HWY_DYNAMIC_DISPATCH(keep_in_columns)
      (row + begin * size, count, size, std::max<std::size_t>(keep, 1));
    }
    mask.read(row);
    counts.values += mask.num_values();
    counts.runs += mask.num_runs();
  }
  return counts;
}

}  // namespace ferry::kernels
#endif  // HWY_ONCE
