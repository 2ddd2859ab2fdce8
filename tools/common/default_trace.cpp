#include "common/default_trace.hpp"

#include <system_error>

namespace ferry::tools {

std::filesystem::path default_trace_directory() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return {};
  return (program.parent_path() / "../share/ferry/traces" / kDefaultTrace).lexically_normal();
}

}  // namespace ferry::tools
