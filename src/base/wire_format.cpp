#include "ferry/wire_format.hpp"

namespace ferry {

static_assert(wire_format_of(DType::f32) == WireFormat::f32);
static_assert(wire_format_of(DType::bf16) == WireFormat::bf16);
static_assert(wire_format_of(DType::f16) == WireFormat::f16);

std::string_view to_string(WireFormat format) {
  switch (format) {
    case WireFormat::f32: return "f32";
    case WireFormat::bf16: return "bf16";
    case WireFormat::f16: return "f16";
    case WireFormat::fp8_e4m3fn: return "fp8_e4m3fn";
    case WireFormat::int8: return "int8";
    case WireFormat::sparse_f32: return "sparse_f32";
    case WireFormat::sparse_bf16: return "sparse_bf16";
    case WireFormat::sparse_f16: return "sparse_f16";
  }
  return "unknown";
}

std::optional<WireFormat> wire_format_from_string(std::string_view name) {
  if (name == "fp8") return WireFormat::fp8_e4m3fn;
  for (std::uint8_t number = 0; number <= static_cast<std::uint8_t>(kLastWireFormat); ++number) {
    const auto format = static_cast<WireFormat>(number);
    if (name == to_string(format)) return format;
  }
  return std::nullopt;
}

}  // namespace ferry
