#pragma once
// Finds and loads the MPI module that a launcher's ranks must use.

#include <memory>

#include "ferry/launch.hpp"
#include "transport/mpi/mpi_module.hpp"

namespace ferry::detail {

/// This process as a rank of the launcher's job. The module stays loaded until the process ends,
/// because MPI cannot be unloaded.
/// Errors: unsupported, with the folders that were searched; invalid_argument
std::unique_ptr<MpiJob> start_job(const launch::Launcher& launcher, const MpiJobOptions& options);

}  // namespace ferry::detail
