#pragma once
// launch::run for the ferry command, which also needs to know what started it and to reach the MPI
// job that its ranks are part of. Not installed.

#include <functional>
#include <optional>
#include <string>

#include "ferry/launch.hpp"
#include "transport/mpi/mpi_module.hpp"

namespace ferry::launch {

/// The launcher whose rank this process is to be under this choice of Options::mpi, FERRY_MPI
/// included; nothing where ranks are threads.
/// Errors: invalid_argument (no such choice), unsupported (the choice contradicts the launcher, or
///         the launcher has no MPI)
std::optional<Launcher> choose_launcher(const std::string& mpi);

/// run(); `body` also gets the job of this rank, null where ranks are threads.
void run_with_job(const Options& options,
                  const std::function<void(Transport&, detail::MpiJob*)>& body);

}  // namespace ferry::launch
