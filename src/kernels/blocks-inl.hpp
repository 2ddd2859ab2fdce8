// Quantised rows, once per SIMD target (hence no #pragma once): scales of blocks of columns, then
// one byte for each column; docs/wire-formats.md has the format. Encoding reads columns twice, the
// second time from first-level cache: the scales of many blocks are worked out side by side, since
// one after the other they would wait for two divisions each. Decoding is part of what reads a row.
//
// Invariants:
//   1. Every target gives the same bits: products are rounded to FP32, and rounding to a code is
//      integer code or an addition, no conversion instruction.
//   2. A scale is 0 (a block of zeros), NaN (a block with a NaN or an infinity) or a normal number
//      whose inverse is one, too; a code is never a NaN.
//   3. Nothing is read or written past the end of a row.
#if defined(FERRY_KERNELS_BLOCKS_INL_HPP_) == defined(HWY_TARGET_TOGGLE)
#ifdef FERRY_KERNELS_BLOCKS_INL_HPP_
#undef FERRY_KERNELS_BLOCKS_INL_HPP_
#else
#define FERRY_KERNELS_BLOCKS_INL_HPP_
#endif

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ferry/wire_format.hpp"
#include "hwy/highway.h"
#include "kernels/lanes-inl.hpp"
#include "kernels/lookahead.hpp"
#include "kernels/row_kernels.hpp"
#include "kernels/store-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {

using CodeTag = hn::Rebind<std::uint8_t, FloatTag>;
using SignedTag = hn::RebindToSigned<FloatTag>;

/// What load_codes leaves to the scale.
template <WireFormat kFormat>
inline constexpr float kCodeUnit = kFormat == WireFormat::fp8_e4m3fn ? 0x1p8F : 1.0F;

/// The number each code stands for, over kCodeUnit and before its scale. A code of fp8_e4m3fn is an
/// f16 of the same fraction whose exponent counts from 2^-8 below. Codes that stand for a NaN are
/// never sent; they read as 480.
template <WireFormat kFormat>
HWY_INLINE FloatVec load_codes(const std::byte* at) {
  const FloatTag df;
  const hn::Rebind<std::int8_t, FloatTag> d8;
  const auto bytes = hn::LoadU(d8, reinterpret_cast<const std::int8_t*>(at));
  if constexpr (kFormat == WireFormat::int8) {
    return hn::ConvertTo(df, hn::PromoteTo(SignedTag(), bytes));
  } else {
#if FERRY_NATIVE_F16
    const hn::Rebind<std::int16_t, FloatTag> d16;
    const auto half = hn::And(hn::ShiftLeft<7>(hn::PromoteTo(d16, bytes)),
                              hn::Set(d16, static_cast<std::int16_t>(0xBFFF)));
    return hn::PromoteTo(df, hn::BitCast(hn::Rebind<hwy::float16_t, FloatTag>(), half));
#else
    const auto words = hn::BitCast(WordTag(), hn::PromoteTo(SignedTag(), bytes));
    return f16_words_to_float(hn::And(hn::ShiftLeft<7>(words), hn::Set(WordTag(), 0xBFFFU)));
#endif
  }
}

/// The code of each `scaled` value in the low byte of its lane; the other bytes mean nothing.
/// Requires: magnitudes that exceed the largest code by a rounding at most, so that none rounds up
/// to more than the largest code
template <WireFormat kFormat>
HWY_INLINE WordVec code_words(FloatVec scaled) {
  const FloatTag df;
  const WordTag dw;
  if constexpr (kFormat == WireFormat::int8) {
    // The addition rounds at 1, to nearest even; the low byte of the sum is the number.
    return hn::BitCast(dw, hn::Add(scaled, hn::Set(df, 0x1.8p23F)));
  } else {
    // A number of 2^20 times the value's power of two (of 2^-6, for denormal results) makes the
    // adder round at the last of three bits of fraction, to nearest even, and leaves them, with the
    // implicit one, in the sum's low bits. The power of two is then added as the code has it, less
    // (127 - 6) x 8, which is 56 in a byte and comes with the number added.
    const SignedTag di;
    const auto bits = hn::BitCast(di, scaled);
    const auto power = hn::Max(hn::And(bits, hn::Set(di, 0x7F800000)), hn::Set(di, 121 << 23));
    const auto rounder = hn::Add(power, hn::Set(di, (20 << 23) + 56));
    const auto sum = hn::BitCast(dw, hn::Add(hn::Abs(scaled), hn::BitCast(df, rounder)));
    const auto code = hn::Add(sum, hn::BitCast(dw, hn::ShiftRight<20>(power)));
    const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(dw, bits)), hn::Set(dw, 0x80U));
    return hn::Or(code, sign);
  }
}

/// What a block is multiplied with.
struct BlockScale {
  float scale = 0;    ///< as it is sent
  float inverse = 0;  ///< makes codes of values
};

/// Of a block whose largest magnitude has these FP32 bits.
template <WireFormat kFormat>
HWY_INLINE BlockScale block_scale(std::uint32_t largest_bits) {
  constexpr float kLargestCode = kFormat == WireFormat::int8 ? 127.0F : 448.0F;
  constexpr float kSmallest = 0x1p-126F;       // below it, an inverse could be infinite
  constexpr float kLargest = 0x1.fffff8p127F;  // above it, the largest code times the scale could
  if (largest_bits == 0) return {};
  if (largest_bits >= 0x7F800000U) return {std::bit_cast<float>(0x7FC00000U), 0};
  const float largest = std::min(std::bit_cast<float>(largest_bits), kLargest);
  const float scale = std::max(largest / kLargestCode, kSmallest);
  return {scale, 1.0F / scale};
}

/// FP32 bits of the largest magnitude of `count` elements; those of an infinity or more where one
/// is not finite.
template <DType kFrom>
HWY_INLINE std::uint32_t largest_bits(const std::byte* at, std::size_t count) {
  constexpr std::size_t size = element_bytes(kFrom);
  const SignedTag di;
  auto largest = hn::Zero(di);
#if HWY_TARGET != HWY_SCALAR
  if constexpr (size == 2) {
    // Magnitudes of a 16-bit dtype have the order of their bits.
    const hn::Repartition<std::int16_t, FloatTag> d16;
    const auto mask = hn::Set(d16, 0x7FFF);
    const std::size_t lanes = hn::Lanes(d16);
    auto halves = hn::Zero(d16);
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      const auto bits = hn::LoadU(d16, reinterpret_cast<const std::int16_t*>(at + i * size));
      halves = hn::Max(halves, hn::And(bits, mask));
    }
    if (i < count) {
      alignas(64) std::byte tail[kMostVectorBytes] = {};
      std::memcpy(tail, at + i * size, (count - i) * size);
      const auto bits = hn::LoadU(d16, reinterpret_cast<const std::int16_t*>(tail));
      halves = hn::Max(halves, hn::And(bits, mask));
    }
    const auto pairs = hn::BitCast(di, halves);
    largest = hn::Max(hn::ShiftRight<16>(pairs), hn::And(pairs, hn::Set(di, 0xFFFF)));
    const auto bits = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest)));
    if constexpr (kFrom == DType::bf16) return bits << 16;
    alignas(64) std::byte one[kMostVectorBytes] = {};
    std::memcpy(one, &bits, size);
    return static_cast<std::uint32_t>(hn::GetLane(hn::BitCast(WordTag(), load_lanes<kFrom>(one))));
  }
#endif
  const auto mask = hn::Set(di, 0x7FFFFFFF);
  const std::size_t lanes = hn::Lanes(di);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto bits = hn::BitCast(di, load_lanes<kFrom>(at + i * size));
    largest = hn::Max(largest, hn::And(bits, mask));
  }
  if (i < count) {
    alignas(64) std::byte tail[kMostVectorBytes] = {};
    std::memcpy(tail, at + i * size, (count - i) * size);
    largest = hn::Max(largest, hn::And(hn::BitCast(di, load_lanes<kFrom>(tail)), mask));
  }
  return static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(di, largest)));
}

/// Encodes 2 x Lanes(FloatTag) elements of bf16. Neighbours are one word, and so are their codes.
template <WireFormat kTo>
HWY_INLINE void encode_pairs(const std::byte* from, FloatVec factor, std::byte* to) {
  const FloatTag df;
  const WordTag dw;
  const auto pairs = hn::LoadU(dw, reinterpret_cast<const std::uint32_t*>(from));
  const auto even = hn::BitCast(df, hn::ShiftLeft<16>(pairs));
  const auto odd = hn::BitCast(df, hn::And(pairs, hn::Set(dw, 0xFFFF0000U)));
  const auto first = hn::And(code_words<kTo>(hn::Mul(even, factor)), hn::Set(dw, 0xFFU));
  const auto second = hn::ShiftLeft<8>(code_words<kTo>(hn::Mul(odd, factor)));
  hn::StoreU(hn::TruncateTo(HalfTag(), hn::Or(first, second)), HalfTag(),
             reinterpret_cast<std::uint16_t*>(to));
}

template <DType kFrom, WireFormat kTo>
HWY_INLINE void encode_block(const std::byte* source, std::size_t count, float inverse,
                             std::byte* codes) {
  constexpr std::size_t size = element_bytes(kFrom);
  const FloatVec factor = hn::Set(FloatTag(), inverse);
  const std::size_t lanes = hn::Lanes(FloatTag());
  const auto encode = [&](const std::byte* from, std::byte* to) {
    const WordVec words = code_words<kTo>(hn::Mul(load_lanes<kFrom>(from), factor));
    hn::StoreU(hn::TruncateTo(CodeTag(), words), CodeTag(), reinterpret_cast<std::uint8_t*>(to));
  };
  std::size_t i = 0;
  if constexpr (kFrom == DType::bf16) {
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
      encode_pairs<kTo>(source + i * size, factor, codes + i);
    }
  }
  for (; i + lanes <= count; i += lanes) encode(source + i * size, codes + i);
  if (i == count) return;
  alignas(64) std::byte tail[kMostVectorBytes] = {};
  alignas(64) std::byte out[kMostVectorBytes];
  std::memcpy(tail, source + i * size, (count - i) * size);
  encode(tail, out);
  std::memcpy(codes + i, out, count - i);
}

/// Where columns of a row go that starts at `row`.
struct BlockRow {
  std::byte* row = nullptr;
  std::size_t hidden = 0;
  std::size_t block = 0;  ///< columns
};

/// Columns that are encoded at a time, at most.
inline constexpr std::size_t kEncodeColumns = kMostBlockColumns;

/// Columns [begin, begin + count) of a row, at most kEncodeColumns.
struct EncodedColumns {
  const std::byte* source = nullptr;  ///< the first of them
  std::size_t begin = 0;
  std::size_t count = 0;
  /// What to prefetch meanwhile, by byte offset in the source row. Asked for block by block: at
  /// once, most of it would be dropped.
  detail::Lookahead ahead{nullptr, 0, nullptr};
};

/// Encodes columns that are whole blocks or end the row.
template <DType kFrom, WireFormat kTo>
HWY_NOINLINE void encode_columns(const EncodedColumns& from, const BlockRow& row) {
  // Copies: the stores may not alias them.
  const auto [source, begin, count, ahead] = from;
  const BlockRow to = row;
  constexpr std::size_t size = element_bytes(kFrom);
  const std::size_t num_blocks = (to.hidden + to.block - 1) / to.block;
  std::byte* const scales = to.row + begin / to.block * sizeof(float);
  std::byte* const codes = to.row + num_blocks * sizeof(float) + begin;
  const auto columns_at = [block = to.block, all = count](std::size_t at) {
    return std::min(block, all - at);
  };
  std::uint32_t largest[kEncodeColumns / kFewestBlockColumns];
  BlockScale found[kEncodeColumns / kFewestBlockColumns];
  std::size_t blocks = 0;
  for (std::size_t at = 0; at < count; at += to.block) {
    largest[blocks++] = largest_bits<kFrom>(source + at * size, columns_at(at));
  }
  for (std::size_t b = 0; b < blocks; ++b) found[b] = block_scale<kTo>(largest[b]);
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t at = b * to.block;
    ahead.touch_lines((begin + at) * size, columns_at(at) * size);
    std::memcpy(scales + b * sizeof(float), &found[b].scale, sizeof(float));
    if (found[b].scale != found[b].scale) {  // NaN: all codes are 0
      std::memset(codes + at, 0, columns_at(at));
    } else {
      encode_block<kFrom, kTo>(source + at * size, columns_at(at), found[b].inverse, codes + at);
    }
  }
}

/// A row as it is read, whatever its format.
struct ReadRow {
  const std::byte* elements = nullptr;
  const std::byte* scales = nullptr;
  std::size_t block = 0;                   ///< columns that share a scale
  Overflow overflow = Overflow::infinite;  ///< of what was rounded to cross
};

inline ReadRow open_row(const RowFormat& format, const std::byte* row, std::int64_t hidden) {
  return {row + scale_bytes(format.format, hidden, format.block_columns), row, format.block_columns,
          format.crosses ? Overflow::saturates : Overflow::infinite};
}

/// What codes are multiplied with as load_codes gives them.
template <WireFormat kFormat>
HWY_INLINE float load_scale(const std::byte* at) {
  float scale = 0;
  std::memcpy(&scale, at, sizeof scale);
  return scale * kCodeUnit<kFormat>;
}

/// Codes of one block to `out`, which has room for whole vectors. Requires: a factor that is no NaN
template <WireFormat kFrom, DType kTo>
HWY_INLINE void decode_block(const std::byte* codes, std::size_t count, float factor,
                             std::byte* out) {
  constexpr std::size_t size = element_bytes(kTo);
  const FloatVec scale = hn::Set(FloatTag(), factor);
  const std::size_t lanes = hn::Lanes(FloatTag());
  const auto decode = [&](const std::byte* from) {
    return hn::Mul(load_codes<kFrom>(from), scale);
  };
  std::size_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    put_pair<kTo, Nan::none>(decode(codes + i), decode(codes + i + lanes), {out + i * size, false});
  }
  for (; i < count; i += lanes) {
    alignas(64) std::byte tail[kMostVectorBytes] = {};
    std::memcpy(tail, codes + i, std::min(lanes, count - i));
    store_lanes<kTo>(one_nan(decode(tail)), out + i * size);
  }
}

/// A block whose scale is NaN.
template <DType kTo>
HWY_INLINE void fill_with_nan(std::size_t count, std::byte* out) {
  const FloatVec nan = one_nan(hn::NaN(FloatTag()));
  for (std::size_t i = 0; i < count; i += hn::Lanes(FloatTag())) {
    store_lanes<kTo>(nan, out + i * element_bytes(kTo));
  }
}

/// Columns [begin, begin + count) converted to `out`, which has room for whole vectors. Requires:
/// `begin` starts a block
template <WireFormat kFrom, DType kTo>
HWY_NOINLINE void read_columns(const ReadRow& row, std::size_t begin, std::size_t count,
                               std::byte* out) {
  const std::byte* const from = row.elements + begin * element_bytes(kFrom);
  if constexpr (!is_quantised(kFrom)) {
    convert_chunk<dtype_of(kFrom), kTo>(from, count, row.overflow, out);
  } else {
    for (std::size_t at = 0; at < count; at += row.block) {
      const std::size_t columns = std::min(row.block, count - at);
      std::byte* const to = out + at * element_bytes(kTo);
      const float factor = load_scale<kFrom>(row.scales + (begin + at) / row.block * sizeof(float));
      if (factor == factor) {
        decode_block<kFrom, kTo>(from + at, columns, factor, to);
      } else {
        fill_with_nan<kTo>(columns, to);
      }
    }
  }
}

using ReadFunction = void (*)(const ReadRow&, std::size_t, std::size_t, std::byte*);

template <DType kTo>
ReadFunction choose_read(WireFormat from) {
  switch (from) {
    case WireFormat::f32: return read_columns<WireFormat::f32, kTo>;
    case WireFormat::bf16: return read_columns<WireFormat::bf16, kTo>;
    case WireFormat::f16: return read_columns<WireFormat::f16, kTo>;
    case WireFormat::fp8_e4m3fn: return read_columns<WireFormat::fp8_e4m3fn, kTo>;
    case WireFormat::int8: return read_columns<WireFormat::int8, kTo>;
    case WireFormat::sparse_f32:
    case WireFormat::sparse_bf16:
    case WireFormat::sparse_f16: break;  // expanded before
  }
  return nullptr;
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
