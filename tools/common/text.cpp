#include "common/text.hpp"

#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace ferry::tools {

using Json = nlohmann::ordered_json;

std::string duration(double us) {
  if (us < 1000) return fmt::format("{:.0f} us", us);
  if (us < 1e6) return fmt::format("{:.2f} ms", us / 1e3);
  return fmt::format("{:.2f} s", us / 1e6);
}

std::string megabytes(double bytes) { return fmt::format("{:.2f}", bytes / 1e6); }

std::string counted(std::int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

double rounded(double value) { return std::round(value * 1000) / 1000; }

Json ratio(double value) {
  return std::isfinite(value) ? Json(std::round(value * 1e4) / 1e4) : Json(nullptr);
}

std::string line_of(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace ferry::tools
