#pragma once
// The memory layout of DLPack capsules, as far as host arrays need it.
// Source: https://dmlc.github.io/dlpack/latest/c_api.html (version 0.8; capsules named "dltensor")

#include <cstdint>

namespace ferry::python {

inline constexpr std::int32_t kDlCpu = 1;
inline constexpr std::int32_t kDlCudaHost = 3;  ///< pinned, so the host can read it

enum class DlCode : std::uint8_t { integer = 0, unsigned_integer = 1, real = 2, bfloat = 4 };

struct DlDevice {
  std::int32_t type = kDlCpu;
  std::int32_t id = 0;
};

struct DlType {
  std::uint8_t code = 0;
  std::uint8_t bits = 0;
  std::uint16_t lanes = 1;
};

struct DlTensor {
  void* data = nullptr;
  DlDevice device;
  std::int32_t num_dimensions = 0;
  DlType type;
  std::int64_t* shape = nullptr;
  std::int64_t* strides = nullptr;  ///< in elements; null = contiguous
  std::uint64_t byte_offset = 0;
};

struct DlManagedTensor {
  DlTensor tensor;
  void* context = nullptr;
  void (*deleter)(DlManagedTensor*) = nullptr;
};

}  // namespace ferry::python
