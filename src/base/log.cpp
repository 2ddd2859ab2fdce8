// One level and one sink for the process: see ferry/log.hpp.

#include "base/log.hpp"

#include <unistd.h>

#include <atomic>
#include <mutex>

#include "base/environment.hpp"

namespace ferry {
namespace {

constexpr std::uint8_t kNotRead = 0xFF;  // FERRY_LOG has yet to be read

struct Log {
  std::atomic<std::uint8_t> level{kNotRead};
  std::mutex mutex;
  LogSink sink;
};

Log& the_log() {
  static auto* const made = new Log;  // never destroyed: the last line may come from a static
  return *made;
}

void write_to_standard_error(std::string_view line) {
  const std::string whole = fmt::format("ferry: {}\n", line);
  // One call, so that lines of several processes do not mix. Nobody can be told of a failure.
  static_cast<void>(!::write(STDERR_FILENO, whole.data(), whole.size()));
}

LogLevel level_of_environment() {
  const std::string text = base::environment("FERRY_LOG").value_or("off");
  for (const LogLevel level : {LogLevel::off, LogLevel::info, LogLevel::debug}) {
    if (text == to_string(level)) return level;
  }
  write_to_standard_error(
      fmt::format("FERRY_LOG = '{}'; allowed: off, info, debug; fix: correct it", text));
  return LogLevel::off;
}

}  // namespace

std::string_view to_string(LogLevel level) {
  switch (level) {
    case LogLevel::off: return "off";
    case LogLevel::info: return "info";
    case LogLevel::debug: return "debug";
  }
  return "unknown";
}

void set_log_sink(LogSink sink) {
  const std::lock_guard lock(the_log().mutex);
  the_log().sink = std::move(sink);
}

void set_log_level(LogLevel level) {
  the_log().level.store(static_cast<std::uint8_t>(level), std::memory_order_relaxed);
}

namespace base {

bool is_logged(LogLevel level) {
  std::atomic<std::uint8_t>& wanted = the_log().level;
  std::uint8_t now = wanted.load(std::memory_order_relaxed);
  if (now == kNotRead) {
    static const auto read = static_cast<std::uint8_t>(level_of_environment());
    if (wanted.compare_exchange_strong(now, read, std::memory_order_relaxed)) now = read;
  }
  return static_cast<std::uint8_t>(level) <= now;
}

void write_log(LogLevel level, const std::string& line) {
  const std::lock_guard lock(the_log().mutex);
  if (!the_log().sink) {
    write_to_standard_error(line);
    return;
  }
  try {
    the_log().sink(level, line);
  } catch (...) {
    // A log must not end what it tells about.
  }
}

}  // namespace base
}  // namespace ferry
