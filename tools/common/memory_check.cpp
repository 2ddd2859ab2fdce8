#include "common/memory_check.hpp"

#include <fstream>
#include <string>

#include <fmt/format.h>

#include "common/failures.hpp"

namespace ferry::tools {

void check_memory(std::uint64_t needed_bytes, std::string_view fix) {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::uint64_t kibibytes = 0;
  std::string unit;
  while (file >> key >> kibibytes && std::getline(file, unit)) {
    if (key != "MemAvailable:") continue;
    if (needed_bytes / 1024 > kibibytes) {
      throw EnvironmentError(
          fmt::format("this run needs about {:.1f} GB of memory, {:.1f} GB are free; fix: {}",
                      static_cast<double>(needed_bytes) / 1e9,
                      static_cast<double>(kibibytes) * 1024 / 1e9, fix));
    }
    return;
  }
}

}  // namespace ferry::tools
