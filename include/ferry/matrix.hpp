#pragma once
// Row-major matrices whose element type is known at run time. Views: they own nothing.

#include <cstddef>
#include <cstdint>
#include <span>

#include "ferry/dtype.hpp"

namespace ferry {

/// A matrix that is read. `row_stride_bytes` is the distance between row starts; 0 means rows are
/// contiguous (columns x element size). `data` may be null when `rows` is 0.
struct ConstMatrix {
  const void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride_bytes = 0;

  std::int64_t stride_bytes() const {
    return row_stride_bytes != 0 ? row_stride_bytes
                                 : columns * static_cast<std::int64_t>(element_bytes(dtype));
  }
  const std::byte* row(std::int64_t index) const {
    return static_cast<const std::byte*>(data) + index * stride_bytes();
  }
};

/// A matrix that is written; converts to ConstMatrix.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride_bytes = 0;

  operator ConstMatrix() const { return {data, dtype, rows, columns, row_stride_bytes}; }
  std::int64_t stride_bytes() const { return ConstMatrix(*this).stride_bytes(); }
  std::byte* row(std::int64_t index) const {
    return static_cast<std::byte*>(data) + index * stride_bytes();
  }
};

}  // namespace ferry
