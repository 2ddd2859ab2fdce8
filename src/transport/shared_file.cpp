// memfd and SCM_RIGHTS; see shared_file.hpp.

#include "transport/shared_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include <fmt/format.h>

#include "ferry/error.hpp"

namespace ferry::detail {

namespace {

[[noreturn]] void refuse(std::uint64_t bytes, const char* step, int error) {
  throw Error(ErrorCode::resource_exhausted,
              fmt::format("create_region: the system gave no shared memory for a region of {} "
                          "bytes ({}: {}); fix: ask for less, free memory, or raise the limits of "
                          "this process",
                          bytes, step, std::strerror(error)));
}

/// Memory that the system could still give, at most; all there is where it does not say.
std::uint64_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::uint64_t value = 0;
  std::string unit;
  std::uint64_t available = 0;
  while (file >> key >> value && std::getline(file, unit)) {
    if (key == "MemAvailable:" || key == "SwapFree:") available += value * 1024;
  }
  return available > 0 ? available : std::numeric_limits<std::uint64_t>::max();
}

/// Room for one descriptor beside a message.
struct FileRoom {
  alignas(cmsghdr) char bytes[CMSG_SPACE(sizeof(int))] = {};
};

}  // namespace

UniqueFd make_shared_file(std::uint64_t bytes) {
  if (bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    refuse(bytes, "ftruncate", EFBIG);
  }
  // To reserve more than there is would not fail: the kernel would look for a process to end.
  if (bytes > available_bytes()) refuse(bytes, "fallocate", ENOMEM);
  UniqueFd file(::memfd_create("ferry", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid()) refuse(bytes, "memfd_create", errno);
  const off_t size = bytes == 0 ? 1 : static_cast<off_t>(bytes);
  if (::ftruncate(file.get(), size) != 0) refuse(bytes, "ftruncate", errno);
  int reserved = 0;
  do {
    reserved = ::fallocate(file.get(), 0, 0, size);
  } while (reserved != 0 && errno == EINTR);
  if (reserved != 0) refuse(bytes, "fallocate", errno);
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    refuse(bytes, "seal", errno);
  }
  return file;
}

bool is_safe_to_map(int file, std::uint64_t bytes) {
  const int seals = ::fcntl(file, F_GET_SEALS);
  struct stat status = {};
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ::fstat(file, &status) == 0 &&
         static_cast<std::uint64_t>(status.st_size) >= bytes;
}

SendOutcome send_with_file(int socket, std::span<const std::byte> message, int file) {
  iovec part{const_cast<std::byte*>(message.data()), message.size()};
  FileRoom room;
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (file >= 0) {
    header.msg_control = room.bytes;
    header.msg_controllen = sizeof room.bytes;
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &file, sizeof file);
  }
  while (::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    const int error = errno;
    if (error == EINTR) continue;
    // The last two: more descriptors on their way, or bytes in buffers, than the system allows.
    if (error == EAGAIN || error == ETOOMANYREFS || error == ENOBUFS) return SendOutcome::full;
    if (error == EPIPE || error == ECONNRESET || error == ENOTCONN) return SendOutcome::gone;
    throw Error(ErrorCode::resource_exhausted,
                fmt::format("create_region: a region cannot be shown to a rank of this node ({}); "
                            "fix: see the limits of this process",
                            std::strerror(error)));
  }
  return SendOutcome::sent;
}

std::optional<ReceivedFile> receive_with_file(int socket, std::span<std::byte> into) {
  iovec part{into.data(), into.size()};
  FileRoom room;
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = room.bytes;
  header.msg_controllen = sizeof room.bytes;
  ssize_t length = 0;
  do {
    length = ::recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    // A reset is told once, and what was sent before it can still be read.
  } while (length < 0 && (errno == EINTR || errno == ECONNRESET));
  if (length <= 0) return std::nullopt;
  ReceivedFile received{.bytes = static_cast<std::size_t>(length), .file = {}};
  const cmsghdr* const rights = CMSG_FIRSTHDR(&header);
  if (rights != nullptr && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS) {
    // Padding leaves room for a second one, which a stranger may have sent: it is closed.
    for (std::size_t at = 0; CMSG_LEN(at + sizeof(int)) <= rights->cmsg_len; at += sizeof(int)) {
      int file = -1;
      std::memcpy(&file, CMSG_DATA(rights) + at, sizeof file);
      received.file = UniqueFd(file);
    }
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0 && !received.file.valid()) {
    throw Error(ErrorCode::resource_exhausted,
                "map_region: this process may open no more files, so it cannot map what a rank of "
                "its node shows; fix: raise the limit of open files (ulimit -n)");
  }
  return received;
}

}  // namespace ferry::detail
