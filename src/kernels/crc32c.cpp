// CRC-32C by ISA-L, which picks the fastest code for the machine. ISA-L works on the bare
// remainder; the standard form (RFC 3720: check value 0xE3069283 of "123456789") inverts it before
// and after, which also makes crc32c(b, crc32c(a)) the value of a followed by b.

#include <isa-l/crc.h>
#include <algorithm>

#include "kernels/row_kernels.hpp"

namespace ferry::kernels {

namespace {

#if defined(__x86_64__)
__attribute__((target("avx"))) void clear_upper_halves() { __builtin_ia32_vzeroupper(); }
#endif

// ISA-L leaves the upper halves of vector registers in use, and code without AVX, such as the BLAS
// of a caller, is then 4 to 8 times as slow until somebody clears them.
void end_wide_vectors() {
#if defined(__x86_64__)
  static const bool has_avx = __builtin_cpu_supports("avx") != 0;
  if (has_avx) clear_upper_halves();
#endif
}

}  // namespace

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
  end_wide_vectors();
  return ~remainder;
}

}  // namespace ferry::kernels
