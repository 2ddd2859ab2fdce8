// Regions as anonymous mappings. Big ones start at a huge page, because row copies to many targets
// otherwise spend their time in TLB misses.

#include "transport/regions.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "ferry/error.hpp"
#include "transport/misuse.hpp"

namespace ferry::detail {

namespace {

constexpr std::uint64_t kHugePageBytes = 2ULL << 20;
constexpr std::uint64_t kHugeFromBytes = 4ULL << 20;

std::uint64_t page_bytes() {
  static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

[[noreturn]] void refuse_size(std::uint64_t bytes, int error) {
  throw Error(ErrorCode::resource_exhausted,
              fmt::format("create_region: the system gave no memory for a region of {} bytes ({}); "
                          "fix: ask for less, free memory, or raise the limits of this process",
                          bytes, std::strerror(error)));
}

}  // namespace

Pages::Pages(int file, std::uint64_t bytes) {
  const std::uint64_t page = page_bytes();
  if (bytes > std::numeric_limits<std::uint64_t>::max() / 2) {
    refuse_size(bytes, ENOMEM);
  }
  length_ = bytes == 0 ? page : (bytes + page - 1) / page * page;
  const bool huge = bytes >= kHugeFromBytes;
  const std::uint64_t slack = huge ? kHugePageBytes : 0;
  void* mapped =
      ::mmap(nullptr, length_ + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    refuse_size(bytes, errno);
  }
  address_ = static_cast<std::byte*>(mapped);
  if (huge) {
    // The ends that alignment leaves over go back at once.
    const auto start = reinterpret_cast<std::uintptr_t>(mapped);
    const std::uint64_t before = (kHugePageBytes - start % kHugePageBytes) % kHugePageBytes;
    address_ += before;
    if (before > 0) {
      ::munmap(mapped, before);
    }
    if (slack > before) {
      ::munmap(address_ + length_, slack - before);
    }
  }
  // Populated: else every first touch of a page that exists already would be a fault.
  if (file != kAnonymous && ::mmap(address_, length_, PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_FIXED | MAP_POPULATE, file, 0) == MAP_FAILED) {
    const int error = errno;
    ::munmap(address_, length_);
    refuse_size(bytes, error);
  }
  if (file != kAnonymous) {
    ::madvise(address_, length_, MADV_DONTFORK);  // a forked child is no rank
  }
  if (huge) {
    // Advice only: a system without huge pages refuses it, and the region works all the same.
    ::madvise(address_, length_, MADV_HUGEPAGE);
  }
}

Pages::~Pages() {
  if (address_ != nullptr) {
    ::munmap(address_, length_);
  }
}

std::byte* RegionTable::create(int owner, std::uint64_t key, std::uint64_t bytes) {
  auto pages = std::make_shared<const Pages>(bytes);
  const std::lock_guard lock(mutex_);
  const auto [place, fresh] = regions_.try_emplace({owner, key}, std::move(pages));
  if (!fresh) refuse_second_region(owner, key);
  return place->second->data();
}

std::byte* RegionTable::map(int asker, int owner, std::uint64_t key) {
  check_owner(topology_, asker, owner, key);
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find({owner, key});
  return found == regions_.end() ? nullptr : found->second->data();
}

std::shared_ptr<const void> RegionTable::hold(int owner, std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find({owner, key});
  if (found == regions_.end()) refuse_unknown_region(owner, key);
  return found->second;
}

void RegionTable::retire(int owner, std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  if (regions_.erase({owner, key}) == 0) refuse_unknown_region(owner, key);
}

}  // namespace ferry::detail
