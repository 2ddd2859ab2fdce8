#include "base/environment.hpp"

#include <cstdlib>

namespace ferry::base {

std::optional<std::string> environment(std::string_view name) {
  const char* const text = std::getenv(std::string(name).c_str());
  if (text == nullptr || *text == '\0') return std::nullopt;
  return std::string(text);
}

}  // namespace ferry::base
