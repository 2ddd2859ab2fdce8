#pragma once
// Node memory of ranks that live in one process: page-aligned, zero-filled regions found by
// (owner, key). All of them live until the table goes, unless their owner retires one earlier: a
// rank may leave while another still reads its memory. Who holds one keeps its memory longer. Safe
// to call from any thread.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "ferry/topology.hpp"

namespace ferry::detail {

/// Pages that go with the object: anonymous, or of a file that other processes map, too.
class Pages {
 public:
  /// Errors: resource_exhausted, with the size.
  explicit Pages(std::uint64_t bytes) : Pages(kAnonymous, bytes) {}
  /// Maps the first `bytes` of the file; the descriptor is needed no longer.
  Pages(int file, std::uint64_t bytes);
  Pages(Pages&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), length_(other.length_) {}
  Pages& operator=(Pages&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(length_, other.length_);
    return *this;
  }
  ~Pages();

  std::byte* data() const { return address_; }

 private:
  static constexpr int kAnonymous = -1;

  std::byte* address_ = nullptr;
  std::size_t length_ = 0;
};

class RegionTable {
 public:
  explicit RegionTable(Topology topology) : topology_(std::move(topology)) {}

  /// Errors: invalid_argument when the owner has a region of that key, resource_exhausted.
  std::byte* create(int owner, std::uint64_t key, std::uint64_t bytes);
  /// Null while the owner has not created it. Errors: invalid_argument on another node.
  std::byte* map(int asker, int owner, std::uint64_t key);
  /// Errors: invalid_argument when there is no such region.
  void retire(int owner, std::uint64_t key);
  /// Errors: invalid_argument when there is no such region.
  std::shared_ptr<const void> hold(int owner, std::uint64_t key);

 private:
  Topology topology_;
  std::mutex mutex_;
  // Shared by the table and whoever holds a region.
  std::map<std::pair<int, std::uint64_t>, std::shared_ptr<const Pages>> regions_;
};

}  // namespace ferry::detail
