#pragma once
// The routing trace that comes with the ferry command. One rule finds it, from where the running
// program lies, so that an installed folder or a build folder can be moved as a whole.

#include <filesystem>

namespace ferry::tools {

/// Its name: model/domain.
inline constexpr const char* kDefaultTrace = "ferry_lm/scripture";

/// Where it belongs: ../share/ferry/traces/NAME, seen from the folder of the program. Nothing says
/// that it is there. Empty where the system does not tell the program's place.
std::filesystem::path default_trace_directory();

}  // namespace ferry::tools
