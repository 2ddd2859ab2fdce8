#pragma once
// Little-endian numbers and varints in byte buffers, for the encoders and decoders of this folder.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

namespace ferry::wire {

static_assert(std::endian::native == std::endian::little,
              "numbers and rows are copied to the wire as they lie in memory; a big-endian host "
              "would need conversions here and in the row kernels");

/// Writes a number and returns the first byte after it. Requires: room for it.
template <typename T>
std::byte* store(std::byte* at, T value) {
  static_assert(std::is_arithmetic_v<T>);
  std::memcpy(at, &value, sizeof(T));
  return at + sizeof(T);
}

/// Requires: sizeof(T) readable bytes.
template <typename T>
T load(const std::byte* at) {
  static_assert(std::is_arithmetic_v<T>);
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

/// memcpy that allows null pointers where there is nothing to copy (an empty vector has one).
inline std::byte* store_block(std::byte* at, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(at, from, bytes);
  return at + bytes;
}

/// A varint is LEB128: 7 bits per byte, lowest first; the top bit says that more follow.
inline constexpr std::size_t kMaxVarintBytes = 10;

constexpr std::size_t varint_bytes(std::uint64_t value) {
  return value == 0 ? 1 : (static_cast<std::size_t>(std::bit_width(value)) + 6) / 7;
}

/// Requires: room for varint_bytes(value).
inline std::byte* store_varint(std::byte* at, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) *at++ = static_cast<std::byte>(value | 0x80);
  *at++ = static_cast<std::byte>(value);
  return at;
}

/// Takes one varint off the front of `bytes`. False, and nothing taken, when it is cut off, exceeds
/// 64 bits or is not in its shortest form (one number has one encoding).
[[nodiscard]] inline bool take_varint(std::span<const std::byte>& bytes, std::uint64_t& value) {
  std::uint64_t result = 0;
  for (std::size_t i = 0; i < bytes.size() && i < kMaxVarintBytes; ++i) {
    const auto byte = std::to_integer<std::uint64_t>(bytes[i]);
    if (i == kMaxVarintBytes - 1 && byte > 1) return false;
    result |= (byte & 0x7F) << (7 * i);
    if (byte >= 0x80) continue;
    if (byte == 0 && i > 0) return false;
    bytes = bytes.subspan(i + 1);
    value = result;
    return true;
  }
  return false;
}

}  // namespace ferry::wire
