#include "base/check.hpp"

#include <stdexcept>

namespace ferry::detail {

void assertion_failed(const char* text, const std::string& why, std::source_location where) {
  throw std::logic_error(fmt::format("ferry: internal check failed: {} ({}) at {}:{}; please report it",
                                     text, why, where.file_name(), where.line()));
}

}  // namespace ferry::detail
