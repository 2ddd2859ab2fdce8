// push_rows and pack_rows: a row is read once, converted in first-level cache where the dtypes
// differ, and written to its targets. Equal dtypes copy bits, whatever they mean.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/push_rows.cpp"
#include "hwy/foreach_target.h"  // before highway.h: includes this file once per target
#include "hwy/highway.h"

#include "kernels/blocks-inl.hpp"
#include "kernels/copy-inl.hpp"
#include "kernels/lanes-inl.hpp"
#include "kernels/lookahead.hpp"
#include "kernels/row_kernels.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {

/// Elements that are converted at a time: at most 8 KiB each of source and result.
inline constexpr std::size_t kConvertChunk = 2048;
static_assert(kConvertChunk % kMostLanes == 0);
static_assert(kConvertChunk % kMostBlockColumns == 0);

/// One row that is read from start to end.
struct SourceRow {
  const std::byte* row = nullptr;
  std::size_t hidden = 0;
  std::size_t row_bytes = 0;
  const std::byte* later = nullptr;  ///< the row that is rows_ahead() further on, or null
  std::size_t block = 0;             ///< columns that share a scale
};

template <WireFormat kFrom, DType kTo>
void convert_row(const SourceRow& source, std::span<std::byte* const> targets) {
  alignas(64) std::byte chunk[kConvertChunk * element_bytes(kTo)];
  const detail::Lookahead ahead = detail::look_past_row(source.row, source.row_bytes, source.later);
  const detail::Lookahead nothing(nullptr, 0, nullptr);
  const ReadRow from = open_row<kFrom>(source.row, source.hidden, source.block);
  for (std::size_t begin = 0; begin < source.hidden; begin += kConvertChunk) {
    const std::size_t count = std::min(kConvertChunk, source.hidden - begin);
    for (std::size_t at = 0; at < count * element_bytes(kFrom); at += detail::kLineBytes) {
      ahead.touch(begin * element_bytes(kFrom) + at);
    }
    read_columns<kFrom, kTo>(from, begin, count, chunk);
    copy_to_all({chunk, count * element_bytes(kTo), begin * element_bytes(kTo)}, targets, nothing);
  }
}

void copy_row(const SourceRow& source, std::span<std::byte* const> targets) {
  copy_to_all({source.row, source.row_bytes, 0}, targets,
              detail::look_past_row(source.row, source.row_bytes, source.later));
}

using RowFunction = void (*)(const SourceRow&, std::span<std::byte* const>);

template <WireFormat kFrom>
RowFunction choose_from(DType to) {
  if (kFrom == wire_format_of(to)) return copy_row;
  switch (to) {
    case DType::f32: return convert_row<kFrom, DType::f32>;
    case DType::bf16: return convert_row<kFrom, DType::bf16>;
    case DType::f16: return convert_row<kFrom, DType::f16>;
  }
  return copy_row;
}

RowFunction choose(WireFormat from, DType to) {
  switch (from) {
    case WireFormat::f32: return choose_from<WireFormat::f32>(to);
    case WireFormat::bf16: return choose_from<WireFormat::bf16>(to);
    case WireFormat::f16: return choose_from<WireFormat::f16>(to);
    case WireFormat::fp8_e4m3fn: return choose_from<WireFormat::fp8_e4m3fn>(to);
    case WireFormat::int8: return choose_from<WireFormat::int8>(to);
    case WireFormat::sparse_f32:
    case WireFormat::sparse_bf16:
    case WireFormat::sparse_f16: break;  // expanded before
  }
  return copy_row;
}

void push_all(const PushJob& job) {
  const RowFunction write_row = choose(job.source.format, job.target_dtype);
  const std::size_t hidden = static_cast<std::size_t>(job.hidden);
  const std::size_t row_bytes = job.source.row_bytes(job.hidden);
  const std::size_t distance = detail::rows_ahead(row_bytes);
  for (std::size_t i = 0; i < job.rows.size(); ++i) {
    const PushRow& row = job.rows[i];
    if (row.count == 0) continue;
    const std::byte* later =
        i + distance < job.rows.size() ? job.rows[i + distance].source : nullptr;
    write_row({row.source, hidden, row_bytes, later, job.source.block_columns},
              job.targets.subspan(row.first, row.count));
  }
}

/// Packs with plain stores: the block is sent, so it is read again at once and belongs in cache.
template <DType kFrom, DType kTo>
void pack_converted(const PackJob& job) {
  alignas(64) std::byte chunk[kConvertChunk * element_bytes(kTo)];
  const std::size_t hidden = static_cast<std::size_t>(job.hidden);
  std::byte* out = job.out;
  for (const std::byte* row : job.rows) {
    for (std::size_t begin = 0; begin < hidden; begin += kConvertChunk) {
      const std::size_t count = std::min(kConvertChunk, hidden - begin);
      const std::byte* const from = row + begin * element_bytes(kFrom);
      if (job.wire.crosses) {
        convert_chunk<kFrom, kTo, Overflow::saturates>(from, count, chunk);
      } else {
        convert_chunk<kFrom, kTo>(from, count, chunk);
      }
      std::memcpy(out, chunk, count * element_bytes(kTo));
      out += count * element_bytes(kTo);
    }
  }
}

template <DType kFrom, WireFormat kTo>
void pack_quantised(const PackJob& job) {
  const std::size_t hidden = static_cast<std::size_t>(job.hidden);
  BlockRow to{job.out, hidden, job.wire.block_columns};
  const std::size_t from_bytes = hidden * element_bytes(kFrom);
  const std::size_t distance = detail::rows_ahead(from_bytes);
  for (std::size_t i = 0; i < job.rows.size(); ++i) {
    const std::byte* const later =
        i + distance < job.rows.size() ? job.rows[i + distance] : nullptr;
    const detail::Lookahead ahead = detail::look_past_row(job.rows[i], from_bytes, later);
    for (std::size_t begin = 0; begin < hidden; begin += kEncodeColumns) {
      const std::size_t count = std::min(kEncodeColumns, hidden - begin);
      encode_columns<kFrom, kTo>({job.rows[i] + begin * element_bytes(kFrom), begin, count, ahead},
                                 to);
    }
    to.row += job.wire.row_bytes(job.hidden);
  }
}

template <DType kFrom>
void pack_from(const PackJob& job) {
  switch (job.wire.format) {
    case WireFormat::f32: return pack_converted<kFrom, DType::f32>(job);
    case WireFormat::bf16: return pack_converted<kFrom, DType::bf16>(job);
    case WireFormat::f16: return pack_converted<kFrom, DType::f16>(job);
    case WireFormat::fp8_e4m3fn: return pack_quantised<kFrom, WireFormat::fp8_e4m3fn>(job);
    case WireFormat::int8: return pack_quantised<kFrom, WireFormat::int8>(job);
    case WireFormat::sparse_f32:
    case WireFormat::sparse_bf16:
    case WireFormat::sparse_f16: break;  // expanded before
  }
}

void pack_all(const PackJob& job) {
  if (wire_format_of(job.source_dtype) == job.wire.format) {
    const std::size_t row_bytes = job.wire.row_bytes(job.hidden);
    for (std::size_t i = 0; i < job.rows.size(); ++i) {
      std::memcpy(job.out + i * row_bytes, job.rows[i], row_bytes);
    }
    return;
  }
  switch (job.source_dtype) {
    case DType::f32: return pack_from<DType::f32>(job);
    case DType::bf16: return pack_from<DType::bf16>(job);
    case DType::f16: return pack_from<DType::f16>(job);
  }
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "base/check.hpp"
#include "kernels/check_blocks.hpp"
#include "kernels/float_state.hpp"

namespace ferry::kernels {

HWY_EXPORT(push_all);
HWY_EXPORT(pack_all);

void push_rows(const PushJob& job) {
  FERRY_ASSERT(job.hidden >= 1, "push_rows: hidden = {}; allowed: 1 or more", job.hidden);
  detail::check_blocks("push_rows", job.source.format, job.source.block_columns);
  const detail::FloatState state;
  HWY_DYNAMIC_DISPATCH(push_all)(job);
}

void pack_rows(const PackJob& job) {
  FERRY_ASSERT(job.hidden >= 1, "pack_rows: hidden = {}; allowed: 1 or more", job.hidden);
  detail::check_blocks("pack_rows", job.wire.format, job.wire.block_columns);
  const detail::FloatState state;
  HWY_DYNAMIC_DISPATCH(pack_all)(job);
}

}  // namespace ferry::kernels
#endif  // HWY_ONCE
