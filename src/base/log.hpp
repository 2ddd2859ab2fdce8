#pragma once
// Lines of ferry/log.hpp. A line that nobody wants costs one relaxed load.

#include <string>
#include <utility>

#include <fmt/format.h>

#include "ferry/log.hpp"

namespace ferry::base {

bool is_logged(LogLevel level);
void write_log(LogLevel level, const std::string& line);

template <typename... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (is_logged(level)) write_log(level, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace ferry::base
