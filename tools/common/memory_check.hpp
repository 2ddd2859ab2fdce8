#pragma once
// Memory that a command would need, held against what the machine has.

#include <cstdint>
#include <string_view>

namespace ferry::tools {

/// Errors: EnvironmentError when the machine has less memory free than a run needs; the text ends
///         with `fix`.
void check_memory(std::uint64_t needed_bytes, std::string_view fix);

}  // namespace ferry::tools
