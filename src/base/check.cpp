#include "base/check.hpp"

#include <stdexcept>

namespace ferry::detail {

void assertion_failed(const char* text, const std::string& why, SourceLine where) {
  throw std::logic_error(
      fmt::format("ferry: internal check failed: {} ({}) at {}:{}; please report it", text, why,
                  where.file, where.line));
}

}  // namespace ferry::detail
