#pragma once
// What launch::run and launch::Session share, and launch::run for the ferry command, which also
// needs to know what started it and to reach the MPI job that its ranks are part of. Not installed.

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

// How long a rank that has ended waits for the others: it may be the last to need anything.
inline constexpr double kFailedLimit_s = 5;
inline constexpr double kEndLimit_s = 3600;

/// Errors: unsupported: options that only ranks that are threads have
void check_job_options(const Launcher& launcher, const Options& options);
/// Errors: invalid_argument: a shape with another number of ranks than the job
void check_shape(const Launcher& launcher, const std::optional<Topology>& shape, int job_size);

/// run(); `body` also gets the job of this rank, null where ranks are threads.
void run_with_job(const Options& options,
                  const std::function<void(Transport&, detail::MpiJob*)>& body);

}  // namespace ferry::launch
