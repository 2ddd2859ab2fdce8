// pack_rows_within: quantised rows whose error has a limit. A row is encoded, and what that changes
// is added up, in one go; what is added is arithmetic in one fixed order, so
// that every SIMD target takes the same decisions.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/pack_within.cpp"
#include "hwy/foreach_target.h"  // before highway.h: includes this file once per target
#include "hwy/highway.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/blocks-inl.hpp"
#include "kernels/dot_lanes-inl.hpp"
#include "kernels/lookahead.hpp"
#include "kernels/row_kernels.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {

/// What the values of a block are multiplied with.
struct BlockFactors {
  BlockScale scale{};
  float unit = 0;  ///< of the sums: makes the largest value of the row about 1
};

/// Sums of squares over a row, in units of its largest value, so that no square is out of range.
struct ErrorSums {
  alignas(64) float errors[kDotLanes] = {};
  alignas(64) float values[kDotLanes] = {};
};

/// Codes of `scaled` values to `out`. Returns what they stand for, over the scale and kCodeUnit.
template <WireFormat kTo>
HWY_INLINE FloatVec encode_lanes(FloatVec scaled, std::byte* out) {
  hn::StoreU(hn::TruncateTo(CodeTag(), code_words<kTo>(scaled)), CodeTag(),
             reinterpret_cast<std::uint8_t*>(out));
  if constexpr (kTo == WireFormat::int8) {
    const auto rounder = hn::Set(FloatTag(), 0x1.8p23F);  // as code_words rounds
    return hn::Sub(hn::Add(scaled, rounder), rounder);
  } else {
    return load_codes<kTo>(out);
  }
}

/// Encodes the columns of one block, and adds up what that changes.
template <DType kFrom, WireFormat kTo>
HWY_NOINLINE void encode_and_add(const std::byte* source, std::size_t count, const BlockFactors& of,
                                 std::byte* codes, ErrorSums& sums) {
  constexpr std::size_t size = element_bytes(kFrom);
  const FloatTag df;
  const FloatVec inverse = hn::Set(df, of.scale.inverse);
  const FloatVec scale = hn::Set(df, of.scale.scale * kCodeUnit<kTo>);
  const FloatVec unit = hn::Set(df, of.unit);
  const std::size_t lanes = hn::Lanes(df);
  DotLanes errors;
  DotLanes values;
  errors.load(sums.errors);
  values.load(sums.values);
  const auto encode = [&](const std::byte* from, std::byte* to) {
    for (std::size_t at = 0; at < kDotLanes; at += lanes) {
      const FloatVec value = load_lanes<kFrom>(from + at * size);
      const FloatVec code = encode_lanes<kTo>(hn::Mul(value, inverse), to + at);
      const FloatVec error = hn::Mul(hn::Sub(value, hn::Mul(code, scale)), unit);
      const FloatVec in_units = hn::Mul(value, unit);
      errors.add(at, hn::Mul(error, error));
      values.add(at, hn::Mul(in_units, in_units));
    }
  };
  std::size_t i = 0;
  for (; i + kDotLanes <= count; i += kDotLanes) encode(source + i * size, codes + i);
  if (i < count) {  // zeros behind it add 0
    alignas(64) std::byte tail[kDotLanes * sizeof(float)] = {};
    alignas(64) std::byte out[kDotLanes];
    std::memcpy(tail, source + i * size, (count - i) * size);
    encode(tail, out);
    std::memcpy(codes + i, out, count - i);
  }
  errors.store();
  values.store();
}

/// Scales of all blocks to the row. Returns FP32 bits of the largest magnitude of the row, those of
/// an infinity or more where a value is not finite.
template <DType kFrom, WireFormat kTo>
HWY_INLINE std::uint32_t write_scales(const std::byte* source, const BlockRow& to,
                                      const detail::Lookahead& ahead) {
  constexpr std::size_t size = element_bytes(kFrom);
  std::uint32_t most = 0;
  std::byte* scale = to.row;
  for (std::size_t at = 0; at < to.hidden; at += to.block) {
    const std::size_t count = std::min(to.block, to.hidden - at);
    ahead.touch_lines(at * size, count * size);
    const std::uint32_t largest = largest_bits<kFrom>(source + at * size, count);
    most = std::max(most, largest);
    const float of_block = block_scale<kTo>(largest).scale;
    std::memcpy(scale, &of_block, sizeof of_block);
    scale += sizeof of_block;
  }
  return most;
}

/// Encodes a row. False where the root mean square of the errors is more than `limit` of that of
/// the values, or a value is not finite.
template <DType kFrom, WireFormat kTo>
HWY_NOINLINE bool encode_within(const std::byte* source, const BlockRow& row, float limit,
                                const detail::Lookahead& ahead) {
  constexpr float kSmallest = 0x1p-126F;  // below it, the inverse would be infinite
  const BlockRow to = row;                // a copy: the stores may not alias it
  const std::uint32_t most = write_scales<kFrom, kTo>(source, to, ahead);
  if (most >= 0x7F800000U) return false;
  BlockFactors factors{.unit = 1.0F / std::max(std::bit_cast<float>(most), kSmallest)};
  ErrorSums sums;
  const std::byte* scale = to.row;
  std::byte* const codes = to.row + (to.hidden + to.block - 1) / to.block * sizeof(float);
  for (std::size_t at = 0; at < to.hidden; at += to.block) {
    std::memcpy(&factors.scale.scale, scale, sizeof(float));
    scale += sizeof(float);
    factors.scale.inverse = factors.scale.scale == 0 ? 0 : 1.0F / factors.scale.scale;
    encode_and_add<kFrom, kTo>(source + at * element_bytes(kFrom),
                               std::min(to.block, to.hidden - at), factors, codes + at, sums);
  }
  return sum_of_lanes(sums.errors) <= limit * limit * sum_of_lanes(sums.values);
}

/// One row and the row of the job that is to be prefetched meanwhile.
bool encode_row_within(const PackJob& job, std::size_t i, std::byte* out, float limit) {
  const std::size_t hidden = static_cast<std::size_t>(job.hidden);
  const std::size_t row_bytes = hidden * element_bytes(job.source_dtype);
  const std::size_t later = i + detail::rows_ahead(row_bytes);
  const std::byte* const source = job.rows[i];
  const BlockRow to{out, hidden, job.wire.block_columns};
  const detail::Lookahead ahead =
      detail::look_past_row(source, row_bytes, later < job.rows.size() ? job.rows[later] : nullptr);
  const auto encode = [&]<DType kFrom>() {
    return job.wire.format == WireFormat::int8
               ? encode_within<kFrom, WireFormat::int8>(source, to, limit, ahead)
               : encode_within<kFrom, WireFormat::fp8_e4m3fn>(source, to, limit, ahead);
  };
  switch (job.source_dtype) {
    case DType::f32: return encode.template operator()<DType::f32>();
    case DType::bf16: return encode.template operator()<DType::bf16>();
    case DType::f16: return encode.template operator()<DType::f16>();
  }
  return false;
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "base/check.hpp"
#include "kernels/check_blocks.hpp"
#include "kernels/float_state.hpp"
#include "kernels/marks.hpp"

namespace ferry::kernels {

HWY_EXPORT(encode_row_within);

namespace {

/// One bit for each row. Returns where the marks end.
std::byte* write_marks(std::span<const std::uint32_t> escalated, std::uint64_t num_rows,
                       std::byte* out) {
  std::memset(out, 0, mark_bytes(num_rows));
  for (const std::uint32_t i : escalated) {
    out[i / kBitsPerByte] |= static_cast<std::byte>(1U << i % kBitsPerByte);
  }
  return out + mark_bytes(num_rows);
}

}  // namespace

PackedRows pack_rows_within(const PackWithinJob& job) {
  const PackJob& pack = job.pack;
  FERRY_ASSERT(is_quantised(pack.wire.format) && !is_quantised(job.escalated.format),
               "pack_rows_within: {} and {}", to_string(pack.wire.format),
               to_string(job.escalated.format));
  detail::check_blocks("pack_rows_within", pack.wire);
  const detail::FloatState state;
  std::vector<std::uint32_t> escalated;
  PackJob again = pack;
  again.wire = job.escalated;
  std::byte* out = pack.out;
  for (std::size_t i = 0; i < pack.rows.size(); ++i) {
    if (HWY_DYNAMIC_DISPATCH(encode_row_within)(pack, i, out, job.max_relative_error)) {
      out += pack.wire.row_bytes(pack.hidden);
      continue;
    }
    again.rows = pack.rows.subspan(i, 1);
    again.out = out;
    pack_rows(again);
    escalated.push_back(static_cast<std::uint32_t>(i));
    out += job.escalated.row_bytes(pack.hidden);
  }
  if (!escalated.empty()) out = write_marks(escalated, pack.rows.size(), out);
  return {.bytes = static_cast<std::uint64_t>(out - pack.out),
          .escalated = static_cast<std::uint32_t>(escalated.size())};
}

}  // namespace ferry::kernels
#endif  // HWY_ONCE
