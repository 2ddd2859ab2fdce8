#pragma once
// What a network or a memory may do to a message behind its checksum: a bit flips, a burst of bytes
// is something else, two bytes change places.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string_view>
#include <utility>

namespace ferry::support {

enum class Damage : std::uint8_t { bit, burst, swap };
inline constexpr Damage kDamages[] = {Damage::bit, Damage::burst, Damage::swap};

inline std::string_view to_string(Damage kind) {
  switch (kind) {
    case Damage::bit: return "a bit flipped";
    case Damage::burst: return "a burst of other bytes";
    case Damage::swap: return "two bytes swapped";
  }
  return "";
}

/// Damages a part of a message; a swap that would change nothing becomes a flipped bit.
/// Ensures: the bytes are not what they were
inline void damage(std::span<std::byte> part, Damage kind, std::mt19937_64& random) {
  const auto place = [&] { return static_cast<std::size_t>(random() % part.size()); };
  const std::size_t first = place();
  switch (kind) {
    case Damage::bit: break;
    case Damage::burst: {
      const std::size_t end = std::min<std::size_t>(part.size(), first + 2 + random() % 31);
      for (std::size_t i = first + 1; i < end; ++i) part[i] ^= static_cast<std::byte>(random());
      part[first] ^= static_cast<std::byte>(1 + random() % 255);
      return;
    }
    case Damage::swap: {
      const std::size_t second = place();
      if (part[first] == part[second]) break;
      std::swap(part[first], part[second]);
      return;
    }
  }
  part[first] ^= std::byte{1} << (random() % 8);
}

}  // namespace ferry::support
