#pragma once
// Memory of a measurement: big pages for all buffers alike, cold caches before every timed part,
// and the memcpy that ours is compared with.

#include <cstddef>
#include <cstdint>
#include <span>

namespace ferry::bench {

/// The byte of poisoned memory: a NaN in every dtype.
inline constexpr unsigned char kPoison = 0xFF;

/// Zero-filled memory on a 2 MiB boundary, with huge pages where the system grants them.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  /// Errors: EnvironmentError with the size.
  explicit HugeBuffer(std::uint64_t bytes);
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;
  ~HugeBuffer();

  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  void* mapping_ = nullptr;
  std::uint64_t mapped_bytes_ = 0;
};

/// Bytes that, touched by all ranks together, leave nothing of what was there before in a cache.
std::uint64_t cold_bytes();
/// Each rank's part of cold_bytes().
std::uint64_t cold_bytes_per_rank(int num_ranks);

/// Drops what the caches hold by touching other memory.
class CacheCooler {
 public:
  explicit CacheCooler(std::uint64_t bytes) : buffer_(bytes) {}
  void cool();

 private:
  HugeBuffer buffer_;
};

/// The memcpy reference of one rank: as many distinct rows as it receives in dispatch, row by row.
class MemcpyReference {
 public:
  struct Shape {
    std::int64_t num_rows = 0;
    std::uint64_t row_bytes = 0;
  };
  explicit MemcpyReference(const Shape& shape);
  void copy();

 private:
  Shape shape_;
  HugeBuffer source_;
  HugeBuffer target_;
};

}  // namespace ferry::bench
