#pragma once
// Figures as people read them in tables, and lines of JSON as programs read them.

#include <cstdint>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace ferry::tools {

/// "512 us", "8.41 ms", "1.20 s"
std::string duration(double us);
/// Two digits behind the point, without the unit.
std::string megabytes(double bytes);
/// "1 node", "2 nodes"
std::string counted(std::int64_t count, std::string_view noun);

/// To three digits behind the point: nanoseconds are the last digit that a clock gives; more digits
/// would only look exact.
double rounded(double value);
/// To four digits behind the point; a ratio of nothing to nothing is null, since JSON has no NaN.
nlohmann::ordered_json ratio(double value);
/// One line. A path may hold bytes that are not UTF-8; they are replaced rather than refused.
std::string line_of(const nlohmann::ordered_json& json);

}  // namespace ferry::tools
