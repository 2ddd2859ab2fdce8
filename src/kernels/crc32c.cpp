// CRC-32C by ISA-L, which picks the fastest code for the machine. ISA-L works on the bare
// remainder; the standard form (RFC 3720: check value 0xE3069283 of "123456789") inverts it before
// and after, which also makes crc32c(b, crc32c(a)) the value of a followed by b.

#include <algorithm>
#include <isa-l/crc.h>

#include "kernels/row_kernels.hpp"

namespace ferry::kernels {

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t start) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 30;  // ISA-L takes the length as an int
  std::uint32_t remainder = ~start;
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min(kMostBytes, bytes.size()));
    // ISA-L reads only; its C prototype lacks the const.
    auto* data = reinterpret_cast<unsigned char*>(const_cast<std::byte*>(part.data()));
    remainder = crc32_iscsi(data, static_cast<int>(part.size()), remainder);
    bytes = bytes.subspan(part.size());
  }
  return ~remainder;
}

}  // namespace ferry::kernels
