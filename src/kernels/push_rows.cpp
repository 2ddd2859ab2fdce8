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
  std::size_t row_bytes = 0;
  const std::byte* later = nullptr;  ///< the row that is rows_ahead() further on, or null
};

void convert_row(const PushJob& job, ReadFunction read, const SourceRow& source,
                 std::span<std::byte* const> targets) {
  alignas(64) std::byte chunk[kConvertChunk * sizeof(float)];
  const std::size_t hidden = static_cast<std::size_t>(job.hidden);
  const std::size_t from_bytes = element_bytes(job.source.format);
  const std::size_t to_bytes = element_bytes(job.target_dtype);
  const detail::Lookahead ahead = detail::look_past_row(source.row, source.row_bytes, source.later);
  const detail::Lookahead nothing(nullptr, 0, nullptr);
  const ReadRow from = open_row(job.source, source.row, job.hidden);
  for (std::size_t begin = 0; begin < hidden; begin += kConvertChunk) {
    const std::size_t count = std::min(kConvertChunk, hidden - begin);
    ahead.touch_lines(begin * from_bytes, count * from_bytes);
    read(from, begin, count, chunk);
    copy_to_all({chunk, count * to_bytes, begin * to_bytes}, targets, nothing);
  }
}

void copy_row(const SourceRow& source, std::span<std::byte* const> targets) {
  copy_to_all({source.row, source.row_bytes, 0}, targets,
              detail::look_past_row(source.row, source.row_bytes, source.later));
}

ReadFunction choose_read(WireFormat from, DType to) {
  switch (to) {
    case DType::f32: return choose_read<DType::f32>(from);
    case DType::bf16: return choose_read<DType::bf16>(from);
    case DType::f16: return choose_read<DType::f16>(from);
  }
  return nullptr;
}

void push_all(const PushJob& job) {
  const bool converts = wire_format_of(job.target_dtype) != job.source.format;
  const ReadFunction read = choose_read(job.source.format, job.target_dtype);
  const std::size_t row_bytes = job.source.row_bytes(job.hidden);
  const std::size_t distance = detail::rows_ahead(row_bytes);
  for (std::size_t i = 0; i < job.rows.size(); ++i) {
    const PushRow& row = job.rows[i];
    if (row.count == 0) continue;
    const std::byte* later =
        i + distance < job.rows.size() ? job.rows[i + distance].source : nullptr;
    const SourceRow source{row.source, row_bytes, later};
    const auto targets = job.targets.subspan(row.first, row.count);
    if (converts) {
      convert_row(job, read, source, targets);
    } else {
      copy_row(source, targets);
    }
  }
}

using ConvertFunction = void (*)(const std::byte*, std::size_t, Overflow, std::byte*);

/// Packs with plain stores: the block is sent, so it is read again at once and belongs in cache.
void pack_converted(const PackJob& job, ConvertFunction convert) {
  alignas(64) std::byte chunk[kConvertChunk * sizeof(float)];
  const std::size_t hidden = static_cast<std::size_t>(job.hidden);
  const std::size_t from_bytes = element_bytes(job.source_dtype);
  const std::size_t to_bytes = element_bytes(job.wire.format);
  const Overflow overflow = job.wire.crosses ? Overflow::saturates : Overflow::infinite;
  std::byte* out = job.out;
  for (const std::byte* row : job.rows) {
    for (std::size_t begin = 0; begin < hidden; begin += kConvertChunk) {
      const std::size_t count = std::min(kConvertChunk, hidden - begin);
      convert(row + begin * from_bytes, count, overflow, chunk);
      std::memcpy(out, chunk, count * to_bytes);
      out += count * to_bytes;
    }
  }
}

using EncodeFunction = void (*)(const EncodedColumns&, const BlockRow&);

void pack_quantised(const PackJob& job, EncodeFunction encode) {
  const std::size_t hidden = static_cast<std::size_t>(job.hidden);
  BlockRow to{job.out, hidden, job.wire.block_columns};
  const std::size_t size = element_bytes(job.source_dtype);
  const std::size_t distance = detail::rows_ahead(hidden * size);
  for (std::size_t i = 0; i < job.rows.size(); ++i) {
    const std::byte* const later =
        i + distance < job.rows.size() ? job.rows[i + distance] : nullptr;
    const detail::Lookahead ahead = detail::look_past_row(job.rows[i], hidden * size, later);
    for (std::size_t begin = 0; begin < hidden; begin += kEncodeColumns) {
      const std::size_t count = std::min(kEncodeColumns, hidden - begin);
      encode({job.rows[i] + begin * size, begin, count, ahead}, to);
    }
    to.row += job.wire.row_bytes(job.hidden);
  }
}

template <DType kFrom>
void pack_from(const PackJob& job) {
  switch (job.wire.format) {
    case WireFormat::f32: return pack_converted(job, convert_chunk<kFrom, DType::f32>);
    case WireFormat::bf16: return pack_converted(job, convert_chunk<kFrom, DType::bf16>);
    case WireFormat::f16: return pack_converted(job, convert_chunk<kFrom, DType::f16>);
    case WireFormat::fp8_e4m3fn:
      return pack_quantised(job, encode_columns<kFrom, WireFormat::fp8_e4m3fn>);
    case WireFormat::int8: return pack_quantised(job, encode_columns<kFrom, WireFormat::int8>);
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
  detail::check_blocks("push_rows", job.source);
  const detail::FloatState state;
  HWY_DYNAMIC_DISPATCH(push_all)(job);
}

void pack_rows(const PackJob& job) {
  FERRY_ASSERT(job.hidden >= 1, "pack_rows: hidden = {}; allowed: 1 or more", job.hidden);
  detail::check_blocks("pack_rows", job.wire);
  const detail::FloatState state;
  HWY_DYNAMIC_DISPATCH(pack_all)(job);
}

}  // namespace ferry::kernels
#endif  // HWY_ONCE
