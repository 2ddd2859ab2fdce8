#pragma once
// Memory that is used again from plan to plan: vectors keep their capacity, and what is written
// over as a whole is not cleared before. Memory that a plan gives back to the system costs the next
// one a page fault every 4 KiB, which takes longer than the planning itself.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ferry::plan {

/// Gives a vector `count` values that the caller then writes: unlike after assign they may be any.
/// Where it must grow it gets exactly that much, and nothing is copied.
template <typename T>
void resize_for_overwrite(std::vector<T>& values, std::size_t count) {
  if (count > values.capacity()) std::exchange(values, {});
  values.resize(count);
}

/// Bytes that vectors hold, used or not.
template <typename... T>
std::uint64_t capacity_bytes(const std::vector<T>&... values) {
  return (std::uint64_t{0} + ... + (values.capacity() * sizeof(T)));
}

}  // namespace ferry::plan
