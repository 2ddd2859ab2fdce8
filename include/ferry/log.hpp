#pragma once
// What the library says about itself while it runs. Errors are ferry::Error and need no log.

#include <cstdint>
#include <functional>
#include <string_view>

namespace ferry {

enum class LogLevel : std::uint8_t {
  off,
  info,   ///< how ranks were started and found, what exchanges were made of, calls that failed
  debug,  ///< and every plan
};
std::string_view to_string(LogLevel level);

/// One line without its end. Called by any thread that calls Ferry and by progress threads, one at
/// a time; must not call Ferry, nor wait for a thread that does. What it throws is dropped.
using LogSink = std::function<void(LogLevel level, std::string_view line)>;

/// Where lines go, for the whole process; null = standard error, each after "ferry: ".
void set_log_sink(LogSink sink);
/// Until this is called the level is that of FERRY_LOG (off, info, debug; unset = off).
void set_log_level(LogLevel level);

}  // namespace ferry
