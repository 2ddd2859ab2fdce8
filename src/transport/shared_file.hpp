#pragma once
// Memory that one process makes and others map: a sealed memfd, and the unix socket that carries
// its descriptor. Nothing depends on the size of /dev/shm.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "transport/unique_fd.hpp"

namespace ferry::detail {

/// A file in memory of `bytes` bytes: reserved now, so that a shortage is an error here and no
/// SIGBUS later, and sealed, so that nobody can shrink it under a peer that maps it.
/// Errors: resource_exhausted, with the size.
UniqueFd make_shared_file(std::uint64_t bytes);

/// True when a peer's file can be mapped without fear: sealed against shrinking, and of that size.
bool is_safe_to_map(int file, std::uint64_t bytes);

enum class SendOutcome : std::uint8_t {
  sent,
  full,  ///< the socket takes nothing more now; try again later
  gone,  ///< the peer has closed its end
};

/// Sends one message with a descriptor (-1 = none). Never blocks.
/// Errors: resource_exhausted
SendOutcome send_with_file(int socket, std::span<const std::byte> message, int file);

struct ReceivedFile {
  std::size_t bytes = 0;  ///< length of the message
  UniqueFd file;
};
/// The next message, cut to `into`; empty while there is none, or no more. Never blocks.
std::optional<ReceivedFile> receive_with_file(int socket, std::span<std::byte> into);

}  // namespace ferry::detail
