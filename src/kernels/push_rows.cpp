// push_rows and pack_rows: a row is read once, converted in first-level cache where the dtypes
// differ, and written to its targets. Equal dtypes copy bits, whatever they mean.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/push_rows.cpp"
#include "hwy/foreach_target.h"  // before highway.h: includes this file once per target
#include "hwy/highway.h"

#include "kernels/copy-inl.hpp"
#include "kernels/lanes-inl.hpp"
#include "kernels/lookahead.hpp"
#include "kernels/row_kernels.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {

/// Elements that are converted at a time: at most 8 KiB each of source and result.
inline constexpr std::size_t kConvertChunk = 2048;
static_assert(kConvertChunk % (HWY_MAX_BYTES / sizeof(float)) == 0);

/// One row that is read from start to end.
struct SourceRow {
  const std::byte* row = nullptr;
  std::size_t hidden = 0;
  std::size_t row_bytes = 0;
  const std::byte* later = nullptr;  ///< the row that is rows_ahead() further on, or null
};

template <DType kFrom, DType kTo>
void convert_row(const SourceRow& source, std::span<std::byte* const> targets) {
  alignas(64) std::byte chunk[kConvertChunk * element_bytes(kTo)];
  const detail::Lookahead ahead = detail::look_past_row(source.row, source.row_bytes, source.later);
  const detail::Lookahead nothing(nullptr, 0, nullptr);
  for (std::size_t begin = 0; begin < source.hidden; begin += kConvertChunk) {
    const std::size_t count = std::min(kConvertChunk, source.hidden - begin);
    const std::size_t from = begin * element_bytes(kFrom);
    for (std::size_t at = 0; at < count * element_bytes(kFrom); at += detail::kLineBytes) {
      ahead.touch(from + at);
    }
    convert_chunk<kFrom, kTo>(source.row + from, count, chunk);
    copy_to_all({chunk, count * element_bytes(kTo), begin * element_bytes(kTo)}, targets, nothing);
  }
}

void copy_row(const SourceRow& source, std::span<std::byte* const> targets) {
  copy_to_all({source.row, source.row_bytes, 0}, targets,
              detail::look_past_row(source.row, source.row_bytes, source.later));
}

using RowFunction = void (*)(const SourceRow&, std::span<std::byte* const>);

template <DType kFrom>
RowFunction choose_from(DType to) {
  switch (to) {
    case DType::f32: return kFrom == DType::f32 ? copy_row : convert_row<kFrom, DType::f32>;
    case DType::bf16: return kFrom == DType::bf16 ? copy_row : convert_row<kFrom, DType::bf16>;
    case DType::f16: return kFrom == DType::f16 ? copy_row : convert_row<kFrom, DType::f16>;
  }
  return copy_row;
}

RowFunction choose(DType from, DType to) {
  switch (from) {
    case DType::f32: return choose_from<DType::f32>(to);
    case DType::bf16: return choose_from<DType::bf16>(to);
    case DType::f16: return choose_from<DType::f16>(to);
  }
  return copy_row;
}

void push_all(const PushJob& job) {
  const RowFunction write_row = choose(job.source_dtype, job.target_dtype);
  const std::size_t hidden = static_cast<std::size_t>(job.hidden);
  const std::size_t row_bytes = hidden * element_bytes(job.source_dtype);
  const std::size_t distance = detail::rows_ahead(row_bytes);
  for (std::size_t i = 0; i < job.rows.size(); ++i) {
    const PushRow& row = job.rows[i];
    if (row.count == 0) continue;
    const std::byte* later =
        i + distance < job.rows.size() ? job.rows[i + distance].source : nullptr;
    write_row({row.source, hidden, row_bytes, later}, job.targets.subspan(row.first, row.count));
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
      convert_chunk<kFrom, kTo>(row + begin * element_bytes(kFrom), count, chunk);
      std::memcpy(out, chunk, count * element_bytes(kTo));
      out += count * element_bytes(kTo);
    }
  }
}

template <DType kFrom>
void pack_from(const PackJob& job) {
  switch (job.wire_dtype) {
    case DType::f32: return pack_converted<kFrom, DType::f32>(job);
    case DType::bf16: return pack_converted<kFrom, DType::bf16>(job);
    case DType::f16: return pack_converted<kFrom, DType::f16>(job);
  }
}

void pack_all(const PackJob& job) {
  if (job.source_dtype == job.wire_dtype) {
    const std::size_t row_bytes =
        static_cast<std::size_t>(job.hidden) * element_bytes(job.source_dtype);
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
#include "kernels/float_state.hpp"

namespace ferry::kernels {

HWY_EXPORT(push_all);
HWY_EXPORT(pack_all);

void push_rows(const PushJob& job) {
  FERRY_ASSERT(job.hidden >= 1, "push_rows: hidden = {}; allowed: 1 or more", job.hidden);
  const detail::FloatState state;
  HWY_DYNAMIC_DISPATCH(push_all)(job);
}

void pack_rows(const PackJob& job) {
  FERRY_ASSERT(job.hidden >= 1, "pack_rows: hidden = {}; allowed: 1 or more", job.hidden);
  const detail::FloatState state;
  HWY_DYNAMIC_DISPATCH(pack_all)(job);
}

}  // namespace ferry::kernels
#endif  // HWY_ONCE
