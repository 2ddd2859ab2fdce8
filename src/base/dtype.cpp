#include "ferry/dtype.hpp"

namespace ferry {

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
  }
  return "unknown";
}

std::optional<DType> dtype_from_string(std::string_view name) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    if (name == to_string(dtype)) return dtype;
  }
  return std::nullopt;
}

}  // namespace ferry
