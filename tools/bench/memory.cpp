// Both sides of every comparison live on the same kind of pages and start equally cold.
#include "bench/memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "common/failures.hpp"

namespace ferry::bench {
namespace {

constexpr std::uint64_t kHugePage = 2ULL << 20;
constexpr std::uint64_t kLine = 64;
// Bounds on what the system reports about its last-level cache; virtual machines often say 0 or
// the cache of the whole host.
constexpr std::uint64_t kMinColdBytes = 64ULL << 20;
constexpr std::uint64_t kMaxColdBytes = 128ULL << 20;

}  // namespace

HugeBuffer::HugeBuffer(std::uint64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  mapped_bytes_ = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  mapping_ =
      mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw tools::EnvironmentError(
        fmt::format("no memory for a buffer of {} bytes: {}; fix: fewer "
                    "--tokens, a smaller --hidden or fewer ranks",
                    bytes, std::strerror(errno)));
  }
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  const std::uintptr_t aligned = (address + kHugePage - 1) / kHugePage * kHugePage;
  data_ = reinterpret_cast<std::byte*>(aligned);
  // Best effort: without huge pages all sides of the comparison lose alike.
  madvise(data_, mapped_bytes_ - (aligned - address), MADV_HUGEPAGE);
}

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept { *this = std::move(other); }

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  return *this;
}

HugeBuffer::~HugeBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
}

std::uint64_t cold_bytes() {
  const long reported = sysconf(_SC_LEVEL3_CACHE_SIZE);
  const std::uint64_t last_level = reported > 0 ? static_cast<std::uint64_t>(reported) : 0;
  return std::clamp(2 * last_level, kMinColdBytes, kMaxColdBytes);
}

std::uint64_t cold_bytes_per_rank(int num_ranks) {
  // Never less than what the private caches of a core hold.
  constexpr std::uint64_t kLeast = 8ULL << 20;
  return std::max(kLeast, cold_bytes() / static_cast<std::uint64_t>(num_ranks));
}

void CacheCooler::cool() {
  std::byte* data = buffer_.data();
  for (std::uint64_t at = 0; at < buffer_.bytes(); at += kLine) {
    // volatile: the value is of no use, the access is.
    volatile std::byte& line = data[at];
    line = static_cast<std::byte>(static_cast<unsigned>(line) + 1U);
  }
}

MemcpyReference::MemcpyReference(const Shape& shape)
    : shape_(shape),
      source_(static_cast<std::uint64_t>(shape.num_rows) * shape.row_bytes),
      target_(source_.bytes()) {
  // The first touch of a page is no part of a copy. Not zero, or all pages may be one page.
  std::memset(source_.data(), 1, source_.bytes());
  std::memset(target_.data(), 2, target_.bytes());
}

void MemcpyReference::copy() {
  for (std::uint64_t at = 0; at < source_.bytes(); at += shape_.row_bytes) {
    std::memcpy(target_.data() + at, source_.data() + at, shape_.row_bytes);
  }
}

}  // namespace ferry::bench
