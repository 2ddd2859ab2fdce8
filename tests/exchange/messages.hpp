#pragma once
// Whole messages as bytes, for those that change them: which field stands where, and checksums that
// fit again.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "exchange/tampering.hpp"
#include "kernels/row_kernels.hpp"
#include "wire/headers.hpp"

namespace ferry::testing {

// Offsets, as docs/wire-formats.md has them.
inline constexpr std::size_t kVersionAt = 4;
inline constexpr std::size_t kTypeAt = 6;
inline constexpr std::size_t kPayloadCrcAt = 48;
inline constexpr std::size_t kBodyCrcAt = 92;

/// Of its header; all of a control message.
inline std::size_t header_bytes(const Outgoing& message) {
  switch (message.kind) {
    case MessageKind::payload: return wire::kFragmentHeaderBytes;
    case MessageKind::metadata: return wire::kMetadataHeaderBytes;
    case MessageKind::control: return message.bytes.size();
  }
  return 0;
}

/// Puts the checksums right: of what follows the header, then of the header. What is too short for
/// them stays as it is.
inline void reseal(Outgoing& message) {
  const std::span bytes(message.bytes);
  const std::size_t header = header_bytes(message);
  const auto put = [&](std::size_t at, std::span<const std::byte> of) {
    const std::uint32_t crc = kernels::crc32c(of);
    std::memcpy(&bytes[at], &crc, sizeof crc);
  };
  if (header < sizeof(std::uint32_t) || header > bytes.size()) return;
  if (message.kind == MessageKind::payload) put(kPayloadCrcAt, bytes.subspan(header));
  if (message.kind == MessageKind::metadata) put(kBodyCrcAt, bytes.subspan(header));
  const std::size_t crc_at = header - sizeof(std::uint32_t);
  put(crc_at, bytes.first(crc_at));
}

}  // namespace ferry::testing
