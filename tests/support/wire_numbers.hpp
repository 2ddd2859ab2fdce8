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

/// How rows of one kind cross.
struct Wire {
  WireFormat format = WireFormat::f32;
  std::int64_t block_columns = 128;
  bool gradients = false;  ///< a finite value that 16 bits cannot hold becomes infinite
  /// Rows with a larger error (root mean square, over that of the values) cross in `escalated`.
  float max_relative_error = 0;
  WireFormat escalated = WireFormat::bf16;
  float sparse_ratio = 1;  ///< of a sparse format
};

/// A row as it crosses, byte by byte, where its format is not sparse, and whatever its error.
std::vector<std::byte> encode_row(const Wire& wire, std::span<const float> values);
/// The FP32 values of such a row.
void decode_row(const Wire& wire, std::span<const std::byte> bytes, std::span<float> values);
/// What is left of values that crossed.
void cross(const Wire& wire, std::span<float> values);

}  // namespace ferry::support
