#pragma once
// Numbers of any width in byte buffers: bit i of a list is bit i mod 8 of byte i / 8, and a list
// ends at a byte boundary with zeros. Readers touch no byte outside their buffer.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "wire/bytes.hpp"

namespace ferry::wire {

constexpr std::uint64_t bytes_of_bits(std::uint64_t bits) {
  return bits / 8 + (bits % 8 != 0 ? 1 : 0);
}

/// Bits that tell numbers below `values` apart.
constexpr int width_below(std::uint64_t values) {
  return values <= 1 ? 0 : static_cast<int>(std::bit_width(values - 1));
}

constexpr std::uint64_t low_bits(int width) { return (std::uint64_t{1} << width) - 1; }

/// The 8 bytes from `at` on; those beyond the end are 0. Requires: at <= bytes.size()
inline std::uint64_t load_word(std::span<const std::byte> bytes, std::uint64_t at) {
  std::uint64_t word = 0;
  if (bytes.size() - at >= sizeof(word)) {
    std::memcpy(&word, bytes.data() + at, sizeof(word));
  } else if (at < bytes.size()) {
    std::memcpy(&word, bytes.data() + at, bytes.size() - at);
  }
  return word;
}

/// `width` bits from `bit` on. Requires: width <= 57; bits beyond the end are 0
inline std::uint64_t load_bits(std::span<const std::byte> bytes, std::uint64_t bit, int width) {
  return (load_word(bytes, bit / 8) >> (bit % 8)) & low_bits(width);
}

/// Whether all bits from `bit` to the end of its byte are 0.
inline bool ends_in_zeros(std::span<const std::byte> bytes, std::uint64_t bit) {
  return bit % 8 == 0 || (std::to_integer<unsigned>(bytes[bit / 8]) >> (bit % 8)) == 0;
}

/// Appends numbers to a buffer that has room for them.
class BitWriter {
 public:
  explicit BitWriter(std::byte* at) : at_(at) {}

  /// Requires: width <= 32, value < 2^width
  void put(std::uint64_t value, int width) {
    pending_ |= value << num_pending_;
    num_pending_ += width;
    if (num_pending_ < 32) return;
    const auto full = static_cast<std::uint32_t>(pending_);
    std::memcpy(at_, &full, sizeof(full));
    at_ += sizeof(full);
    pending_ >>= 32;
    num_pending_ -= 32;
  }

  /// Elias gamma code: n zeros, a one, then the n bits of value below its highest.
  /// Requires: 1 <= value < 2^32
  void put_gamma(std::uint64_t value) {
    const int n = static_cast<int>(std::bit_width(value)) - 1;
    put(std::uint64_t{1} << n, n + 1);
    put(value & low_bits(n), n);
  }

  /// Fills the last byte up with zeros; returns the first byte after it.
  std::byte* end() {
    const std::uint64_t bytes = bytes_of_bits(static_cast<std::uint64_t>(num_pending_));
    std::memcpy(at_, &pending_, bytes);
    return at_ + bytes;
  }

 private:
  std::byte* at_;
  std::uint64_t pending_ = 0;
  int num_pending_ = 0;  ///< below 32 between calls
};

constexpr std::uint64_t gamma_bits(std::uint64_t value) {
  return 2 * static_cast<std::uint64_t>(std::bit_width(value)) - 1;
}

/// Takes numbers off a buffer of unknown content.
class BitReader {
 public:
  explicit BitReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  /// False when the bits end before.
  [[nodiscard]] bool take_bit(bool& bit) {
    if (bit_ >= bytes_.size() * 8) return false;
    bit = load_bits(bytes_, bit_++, 1) != 0;
    return true;
  }

  /// False when the bits end before, or value would not be below 2^32.
  [[nodiscard]] bool take_gamma(std::uint64_t& value) {
    const std::uint64_t head = load_bits(bytes_, std::min(bit_, bytes_.size() * 8), 32);
    const int n = std::countr_zero(head);  // 64 where all are zeros
    if (n > 31 || bit_ + 2 * static_cast<unsigned>(n) + 1 > bytes_.size() * 8) return false;
    value = std::uint64_t{1} << n | load_bits(bytes_, bit_ + static_cast<unsigned>(n) + 1, n);
    bit_ += 2 * static_cast<unsigned>(n) + 1;
    return true;
  }

  std::uint64_t bits_taken() const { return bit_; }
  std::uint64_t bytes_taken() const { return bytes_of_bits(bit_); }
  bool rest_of_byte_is_zero() const { return ends_in_zeros(bytes_, bit_); }

 private:
  std::span<const std::byte> bytes_;
  std::uint64_t bit_ = 0;
};

/// Four 16-bit lanes, each below 2^width, moved together into 4 x width bits; and back.
inline std::uint64_t squeeze_lanes(std::uint64_t lanes, int width) {
  constexpr std::uint64_t kEven = 0x0000FFFF0000FFFF;
  const std::uint64_t pairs = (lanes & kEven) | ((lanes >> 16) & kEven) << width;
  return (pairs & 0xFFFFFFFF) | (pairs >> 32) << (2 * width);
}
inline std::uint64_t spread_lanes(std::uint64_t bits, int width) {
  const std::uint64_t pairs =
      (bits & low_bits(2 * width)) | ((bits >> (2 * width)) & low_bits(2 * width)) << 32;
  const std::uint64_t lane = low_bits(width) | low_bits(width) << 32;
  return (pairs & lane) | ((pairs >> width) & lane) << 16;
}

/// Writes values, each below 2^width, eight at a time; returns the byte after them.
/// Requires: width <= 16, room for bytes_of_bits(values x width)
inline std::byte* store_packed(std::byte* at, std::span<const std::uint16_t> values, int width) {
  const std::uint64_t bytes = bytes_of_bits(values.size() * static_cast<unsigned>(width));
  const int shift = 4 * width;
  // Eight numbers are `width` bytes; what is written behind them is written over by the next eight.
  const auto squeeze = [=](const std::byte* from, std::byte* to) {
    const std::uint64_t low = squeeze_lanes(load<std::uint64_t>(from), width);
    const std::uint64_t high = squeeze_lanes(load<std::uint64_t>(from + 8), width);
    store(to, shift < 64 ? low | high << shift : low);
    store(to + 8, shift < 64 ? high >> (63 - shift) >> 1 : high);
  };
  const std::byte* const from = std::as_bytes(values).data();
  std::uint64_t i = 0;
  std::uint64_t done = 0;
  for (; i + 8 <= values.size() && done + 16 <= bytes;
       i += 8, done += static_cast<unsigned>(width)) {
    squeeze(from + 2 * i, at + done);
  }
  for (; done < bytes; i += 8, done += static_cast<unsigned>(width)) {
    std::byte last[16] = {};
    std::byte squeezed[16];
    std::memcpy(last, from + 2 * i, std::min<std::size_t>(2 * (values.size() - i), sizeof(last)));
    squeeze(last, squeezed);
    std::memcpy(at + done, squeezed, std::min<std::uint64_t>(bytes - done, sizeof(squeezed)));
  }
  return at + bytes;
}

/// The way back. Requires: width <= 16, bytes_of_bits(count x width) bytes, room for count values
inline void load_packed(std::span<const std::byte> bytes, int width, std::span<std::uint16_t> out) {
  const auto group_bytes = static_cast<unsigned>(width);
  std::byte* const to = std::as_writable_bytes(out).data();
  std::uint64_t at = 0;
  std::uint64_t i = 0;
  for (; i + 8 <= out.size(); i += 8, at += group_bytes) {
    store(to + 2 * i, spread_lanes(load_word(bytes, at), width));
    store(to + 2 * i + 8,
          spread_lanes(load_word(bytes, at + group_bytes / 2) >> (4 * (group_bytes % 2)), width));
  }
  for (; i < out.size(); ++i) {
    out[i] = static_cast<std::uint16_t>(load_bits(bytes, i * group_bytes, width));
  }
}

/// Writes a bitmap of `bytes` bytes in which the bits position_at(0..count-1), which ascend, are
/// set; returns the byte after it.
template <typename PositionAt>
std::byte* store_bitmap(std::byte* at, std::uint64_t bytes, std::uint64_t count,
                        const PositionAt& position_at) {
  std::uint64_t i = 0;
  for (std::uint64_t done = 0; done < bytes; done += 8) {
    std::uint64_t word = 0;
    for (; i < count && position_at(i) < (done + 8) * 8; ++i) {
      word |= std::uint64_t{1} << (position_at(i) % 64);
    }
    std::memcpy(at + done, &word, std::min<std::uint64_t>(sizeof(word), bytes - done));
  }
  return at + bytes;
}

inline std::uint64_t count_set_bits(std::span<const std::byte> bitmap) {
  std::uint64_t count = 0;
  for (std::uint64_t at = 0; at < bitmap.size(); at += 8) {
    count += static_cast<unsigned>(std::popcount(load_word(bitmap, at)));
  }
  return count;
}

/// Calls visit(position) for each bit that is set, ascending.
template <typename Visit>
void for_each_set_bit(std::span<const std::byte> bitmap, const Visit& visit) {
  for (std::uint64_t at = 0; at < bitmap.size(); at += 8) {
    for (std::uint64_t word = load_word(bitmap, at); word != 0; word &= word - 1) {
      visit(at * 8 + static_cast<unsigned>(std::countr_zero(word)));
    }
  }
}

}  // namespace ferry::wire
