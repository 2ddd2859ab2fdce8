#pragma once
// Assertions for what Ferry itself promises; input of users is validated and refused instead.
// FERRY_ASSERT is always on and O(1). FERRY_ASSERT_SLOW may cost O(N) and is on in dev and asan.

#include <string>

#include <fmt/format.h>

#include "ferry/error.hpp"

namespace ferry::detail {

/// Where an assertion stands. Not std::source_location: clang 14 has none.
struct SourceLine {
  const char* file;
  int line;
};

[[noreturn]] void assertion_failed(const char* text, const std::string& why, SourceLine where);

}  // namespace ferry::detail

#define FERRY_ASSERT(condition, ...)                                            \
  do {                                                                          \
    if (!(condition)) [[unlikely]] {                                            \
      ::ferry::detail::assertion_failed(#condition, ::fmt::format(__VA_ARGS__), \
                                        {__FILE__, __LINE__});                  \
    }                                                                           \
  } while (false)

#ifdef FERRY_ASSERT_SLOW_ENABLED
#define FERRY_ASSERT_SLOW(condition, ...) FERRY_ASSERT(condition, __VA_ARGS__)
#else
#define FERRY_ASSERT_SLOW(condition, ...) \
  do {                                    \
  } while (false)
#endif
