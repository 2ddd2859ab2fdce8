// Wire formats of the oracle: see wire_numbers.hpp.

#include "support/wire_numbers.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "support/numbers.hpp"

namespace ferry::support {
namespace {

// The magnitudes of e4m3fn, by code: 0 to 448. Code 127, never sent, reads as 480.
const std::array<float, 128>& fp8_magnitudes() {
  static const std::array<float, 128> magnitudes = [] {
    std::array<float, 128> made{};
    for (int code = 0; code < 128; ++code) {
      const int exponent = code / 8;
      const int fraction = code % 8;
      made[static_cast<std::size_t>(code)] =
          exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                        : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
    }
    return made;
  }();
  return magnitudes;
}

// The nearest magnitude; half way between two, the even code.
std::uint8_t fp8_code(float value) {
  const auto& magnitudes = fp8_magnitudes();
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const double size = std::fabs(value);
  const auto largest = magnitudes.end() - 1;  // without 480
  const auto above = std::lower_bound(magnitudes.begin(), largest, size);
  if (above == largest) return sign | 126U;
  const auto code = static_cast<unsigned>(above - magnitudes.begin());
  if (code == 0) return sign;
  const double up = double{*above} - size;
  const double down = size - double{*(above - 1)};
  const bool rounds_up = up < down || (up == down && code % 2 == 0);
  return static_cast<std::uint8_t>(sign | (rounds_up ? code : code - 1));
}

float fp8_value(std::uint8_t code) {
  const float size = fp8_magnitudes()[code & 0x7F];
  return (code & 0x80) != 0 ? -size : size;
}

std::uint8_t int8_code(float value) {
  const float rounded = std::nearbyint(value);
  return static_cast<std::uint8_t>(static_cast<std::int8_t>(std::clamp(rounded, -127.F, 127.F)));
}

float scale_of(std::span<const float> block, float largest_code) {
  float largest = 0;
  for (const float value : block) {
    if (!std::isfinite(value)) return std::bit_cast<float>(0x7FC00000U);
    largest = std::max(largest, std::fabs(value));
  }
  if (largest == 0) return 0;
  const float scale = std::min(largest, 0x1.fffff8p127F) / largest_code;
  return std::max(scale, std::numeric_limits<float>::min());
}

std::size_t count_blocks(std::size_t columns, std::size_t block) {
  return columns / block + (columns % block != 0 ? 1 : 0);
}

// The dtype whose numbers cross as they are; none where codes do.
std::optional<DType> numbers_of(WireFormat format) {
  switch (format) {
    case WireFormat::f32: return DType::f32;
    case WireFormat::bf16: return DType::bf16;
    case WireFormat::f16: return DType::f16;
    case WireFormat::fp8_e4m3fn:
    case WireFormat::int8:
    case WireFormat::sparse_f32:
    case WireFormat::sparse_bf16:
    case WireFormat::sparse_f16: return std::nullopt;
  }
  return std::nullopt;
}

std::size_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

std::vector<std::byte> quantised(const Wire& wire, std::span<const float> values) {
  const bool fp8 = wire.format == WireFormat::fp8_e4m3fn;
  const auto block = static_cast<std::size_t>(wire.block_columns);
  const std::size_t num_blocks = count_blocks(values.size(), block);
  std::vector<std::byte> bytes(num_blocks * 4 + values.size());
  for (std::size_t b = 0; b < num_blocks; ++b) {
    const std::size_t end = std::min((b + 1) * block, values.size());
    const float scale = scale_of(values.subspan(b * block, end - b * block), fp8 ? 448 : 127);
    std::memcpy(&bytes[b * 4], &scale, 4);
    for (std::size_t i = b * block; i < end; ++i) {
      if (std::isnan(scale)) continue;
      const float scaled = scale == 0 ? values[i] : values[i] * (1 / scale);
      bytes[num_blocks * 4 + i] = std::byte{fp8 ? fp8_code(scaled) : int8_code(scaled)};
    }
  }
  return bytes;
}

}  // namespace

std::vector<std::byte> encode_row(const Wire& wire, std::span<const float> values) {
  const std::optional<DType> dtype = numbers_of(wire.format);
  if (!dtype) return quantised(wire, values);
  const std::size_t size = bytes_of(*dtype);
  std::vector<std::byte> bytes(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    float value = values[i];
    if (*dtype != DType::f32 && !wire.gradients && std::isfinite(value)) {
      const float largest = *dtype == DType::f16 ? 65504.0F : 0x1.FEp127F;
      value = std::clamp(value, -largest, largest);
    }
    const std::uint32_t bits = to_bits(*dtype, value);
    std::memcpy(&bytes[i * size], &bits, size);
  }
  return bytes;
}

void decode_row(const Wire& wire, std::span<const std::byte> bytes, std::span<float> values) {
  if (const std::optional<DType> dtype = numbers_of(wire.format)) {
    const std::size_t size = bytes_of(*dtype);
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, &bytes[i * size], size);
      values[i] = from_bits(*dtype, bits);
    }
    return;
  }
  const auto block = static_cast<std::size_t>(wire.block_columns);
  const std::size_t codes = count_blocks(values.size(), block) * 4;
  for (std::size_t i = 0; i < values.size(); ++i) {
    float scale = 0;
    std::memcpy(&scale, &bytes[i / block * 4], 4);
    const auto code = std::to_integer<std::uint8_t>(bytes[codes + i]);
    values[i] = scale * (wire.format == WireFormat::int8
                             ? static_cast<float>(static_cast<std::int8_t>(code))
                             : fp8_value(code));
  }
}

namespace {

// In FP32, as the decision is defined to the bit: 16 sums, then halves onto halves.
float sum_of_squares(std::span<const float> values) {
  float sums[16] = {};
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float square = values[i] * values[i];
    sums[i % 16] += square;
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

bool is_within(std::span<const float> values, std::span<const float> crossed, float limit) {
  float largest = 0;
  for (const float value : values) {
    if (!std::isfinite(value)) return false;
    largest = std::max(largest, std::fabs(value));
  }
  const float inverse = 1.0F / std::max(largest, std::numeric_limits<float>::min());
  std::vector<float> errors;
  std::vector<float> sizes;
  for (std::size_t i = 0; i < values.size(); ++i) {
    errors.push_back((values[i] - crossed[i]) * inverse);
    sizes.push_back(values[i] * inverse);
  }
  return sum_of_squares(errors) <= limit * limit * sum_of_squares(sizes);
}

// Drops the smallest magnitude, of equal ones the last, until the block has what it may keep.
void drop_smallest(std::span<float> block, float ratio) {
  const auto size_of = [&](std::size_t i) {
    return std::isnan(block[i]) ? std::numeric_limits<double>::infinity() : std::fabs(block[i]);
  };
  const float kept = std::ceil(ratio * static_cast<float>(block.size()));
  auto values = std::ranges::count_if(block, [](float value) { return value != 0; });
  for (; static_cast<float>(values) > kept; --values) {
    std::size_t smallest = block.size();
    for (std::size_t i = 0; i < block.size(); ++i) {
      if (block[i] == 0) continue;
      if (smallest == block.size() || size_of(i) <= size_of(smallest)) smallest = i;
    }
    block[smallest] = 0;
  }
}

WireFormat without_positions(WireFormat format) {
  if (format == WireFormat::sparse_f32) return WireFormat::f32;
  if (format == WireFormat::sparse_bf16) return WireFormat::bf16;
  return format == WireFormat::sparse_f16 ? WireFormat::f16 : format;
}

}  // namespace

void cross(const Wire& wire, std::span<float> values) {
  Wire plain = wire;
  plain.format = without_positions(wire.format);
  const std::vector<float> before(values.begin(), values.end());
  decode_row(plain, encode_row(plain, values), values);
  if (plain.format != wire.format) {
    const auto block = static_cast<std::size_t>(wire.block_columns);
    for (float& value : values) value = value == 0 ? 0 : value;  // also of -0
    for (std::size_t begin = 0; begin < values.size(); begin += block) {
      drop_smallest(values.subspan(begin, std::min(block, values.size() - begin)),
                    wire.sparse_ratio);
    }
    return;
  }
  if (wire.max_relative_error == 0 || numbers_of(wire.format)) return;
  if (is_within(before, values, wire.max_relative_error)) return;
  plain.format = wire.escalated;
  decode_row(plain, encode_row(plain, before), values);
}

}  // namespace ferry::support
