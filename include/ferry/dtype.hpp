#pragma once
// Element types of rows, in memory and on the wire.

#include <cstdint>
#include <optional>
#include <string_view>

namespace ferry {

enum class DType : std::uint8_t { f32 = 0, bf16 = 1, f16 = 2 };

/// Bytes of one element.
constexpr std::uint64_t element_bytes(DType dtype) {
  switch (dtype) {
    case DType::f32: return 4;
    case DType::bf16: return 2;
    case DType::f16: return 2;
  }
  return 0;
}

std::string_view to_string(DType dtype);
/// "f32", "bf16" or "f16"; nothing for any other name.
std::optional<DType> dtype_from_string(std::string_view name);

}  // namespace ferry
