#pragma once
// The oracle's own wire formats: docs/wire-formats.md written out, one number at a time, sharing
// nothing with the kernels but the names of the formats.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ferry/wire_format.hpp"

namespace ferry::support {

inline constexpr WireFormat kWireFormats[] = {WireFormat::f32, WireFormat::bf16, WireFormat::f16,
                                              WireFormat::fp8_e4m3fn, WireFormat::int8};

/// A row as it crosses, byte by byte.
std::vector<std::byte> encode_row(WireFormat format, std::int64_t block_columns,
                                  std::span<const float> values);
/// The FP32 values of such a row.
void decode_row(WireFormat format, std::int64_t block_columns, std::span<const std::byte> bytes,
                std::span<float> values);
/// What is left of values that crossed.
void cross(WireFormat format, std::int64_t block_columns, std::span<float> values);

}  // namespace ferry::support
