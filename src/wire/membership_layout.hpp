#pragma once
// What the encoder and the decoder of a membership share: flags and the sizes of its sections, as
// docs/wire-formats.md has them. Sections: version and flags; token list; entries per token;
// columns; slots; weights.

#include <cstddef>
#include <cstdint>
#include <limits>

namespace ferry::wire {

inline constexpr std::uint8_t kMembershipVersion = 1;
inline constexpr std::size_t kMembershipPrefixBytes = 2;  // version, flags

inline constexpr std::uint8_t kBitmask = 0x01;       // token list is a bitmask, else varint gaps
inline constexpr std::uint8_t kNibbleCounts = 0x02;  // entries per token in 4 bits, else in a byte
inline constexpr std::uint8_t kWideColumns = 0x04;   // columns in 2 bytes, else in one
inline constexpr std::uint8_t kSlots = 0x08;         // the slot of each entry follows its column
inline constexpr std::uint8_t kNoWeights = 0x10;     // weights are not sent
inline constexpr std::uint8_t kAllFlags =
    kBitmask | kNibbleCounts | kWideColumns | kSlots | kNoWeights;

inline constexpr int kMaxNarrowColumns = 256;
inline constexpr std::uint32_t kMaxNibble = 15;
inline constexpr std::uint32_t kMaxCount = 255;
inline constexpr std::uint64_t kMaxTokens = std::numeric_limits<std::uint32_t>::max();

constexpr std::uint64_t bitmask_bytes(std::uint64_t num_tokens) { return (num_tokens + 7) / 8; }

constexpr std::uint64_t count_bytes(std::uint64_t tokens, std::uint8_t flags) {
  return (flags & kNibbleCounts) != 0 ? (tokens + 1) / 2 : tokens;
}

constexpr std::uint64_t entry_bytes(std::uint8_t flags) {
  return ((flags & kWideColumns) != 0 ? 2 : 1) + ((flags & kSlots) != 0 ? 1 : 0) +
         ((flags & kNoWeights) != 0 ? 0 : sizeof(float));
}

}  // namespace ferry::wire
