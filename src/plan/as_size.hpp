#pragma once
// Numbers of ranks, experts and tokens are signed; what counts or indexes elements is not.

#include <cstddef>
#include <cstdint>

namespace ferry::plan {

/// Requires: value >= 0
constexpr std::size_t as_size(std::int64_t value) { return static_cast<std::size_t>(value); }

}  // namespace ferry::plan
