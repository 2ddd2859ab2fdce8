#pragma once
// Memory for fragments: blocks of one size that go around between sending, receiving and staging.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <utility>
#include <vector>

namespace ferry::detail {

class BlockPool;

/// One block; goes back to its pool when the handle goes. Must not outlive the pool.
class Block {
 public:
  Block() = default;
  Block(BlockPool* pool, std::span<std::byte> memory) : pool_(pool), memory_(memory) {}
  Block(Block&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), memory_(std::exchange(other.memory_, {})) {}
  Block& operator=(Block&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~Block();

  std::span<std::byte> memory() const { return memory_; }
  /// The memory without its owner, for a receive that is posted.
  std::span<std::byte> release() {
    pool_ = nullptr;
    return std::exchange(memory_, {});
  }

 private:
  BlockPool* pool_ = nullptr;
  std::span<std::byte> memory_;
};

class BlockPool {
 public:
  explicit BlockPool(std::uint64_t block_bytes) : block_bytes_(block_bytes) {}
  ~BlockPool() {
    for (const auto& memory : free_) free_memory(memory);
  }
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  std::uint64_t block_bytes() const { return block_bytes_; }
  /// The most that blocks of this pool have taken at one time, in use or free.
  std::uint64_t most_bytes() const { return most_bytes_; }
  /// Blocks handed out from now on have at least this size.
  void grow(std::uint64_t block_bytes) {
    if (block_bytes <= block_bytes_) return;
    block_bytes_ = block_bytes;
    for (const auto& memory : std::exchange(free_, {})) free_memory(memory);
  }
  Block take() {
    if (free_.empty()) return {this, allocate(block_bytes_)};
    const auto memory = free_.back();
    free_.pop_back();
    return {this, memory};
  }
  /// Owns again memory that Block::release gave away.
  Block adopt(std::span<std::byte> memory) { return {this, memory}; }
  void give_back(std::span<std::byte> memory) {
    if (memory.size() == block_bytes_) {
      free_.push_back(memory);
    } else {
      free_memory(memory);
    }
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  std::span<std::byte> allocate(std::uint64_t bytes) {
    const std::span memory(static_cast<std::byte*>(::operator new(bytes, kAlignment)), bytes);
    bytes_ += bytes;
    most_bytes_ = std::max(most_bytes_, bytes_);
    return memory;
  }
  void free_memory(std::span<std::byte> memory) {
    ::operator delete(memory.data(), kAlignment);
    bytes_ -= memory.size();
  }

  std::uint64_t block_bytes_;
  std::uint64_t bytes_ = 0;
  std::uint64_t most_bytes_ = 0;
  std::vector<std::span<std::byte>> free_;
};

inline Block::~Block() {
  if (pool_ != nullptr) pool_->give_back(memory_);
}

}  // namespace ferry::detail
