#pragma once
// Every environment variable that the library reads, and the only place that reads them. Launchers
// set those of their own; docs/environment.md lists the ones that are Ferry's.

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace ferry::base {

/// An environment variable, its text taken once when it is asked for; empty counts as unset.
std::optional<std::string> environment(std::string_view name);

/// Ferry's own variables, with one line each for `ferry info` and the docs.
struct EnvironmentVariable {
  std::string_view name;
  std::string_view meaning;
};
inline constexpr std::array kEnvironment{
    EnvironmentVariable{"FERRY_MPI", "MPI module under a launcher: auto, openmpi, mpich or off"},
    EnvironmentVariable{"FERRY_LOG", "lines on standard error: off, info or debug"},
    EnvironmentVariable{"FERRY_MODULE_PATH", "folder of the MPI modules, before the usual ones"},
};

}  // namespace ferry::base
