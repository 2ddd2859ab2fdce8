#pragma once
// Ranks wherever this process was started: under an MPI launcher it is one rank of that job, else
// all ranks are threads of it. So one program runs with `./program` and with `mpirun ./program`.

#include <functional>
#include <optional>
#include <string>

#include "ferry/topology.hpp"
#include "ferry/transport.hpp"

namespace ferry::launch {

/// What started this process, read from the environment that launchers set.
struct Launcher {
  std::string name;    ///< "mpirun of Open MPI", "mpiexec of MPICH", "srun with PMIx", ...
  std::string module;  ///< "openmpi" or "mpich": the MPI that its ranks must use
  int num_ranks = 0;   ///< of the job, 0 = it does not say
  int rank = 0;
};

/// Nothing outside a launcher, with FERRY_MPI=off, and where a job has one rank without any MPI.
/// Errors: unsupported under torchrun, and under srun without PMI; the text has the line to use.
std::optional<Launcher> find_launcher();

struct Options {
  /// Shape of the group. Threads: default one rank. Under a launcher: unset = the machines as they
  /// are found; set, it may split machines into virtual nodes, and has as many ranks as the job.
  std::optional<Topology> topology{};
  /// Threads only: rate of the links between nodes, see threads::Options.
  double link_bits_per_s = 0;
  /// Which MPI: "auto" (the launcher's), "openmpi", "mpich", or "off" for threads in any case.
  std::string mpi = "auto";
  /// Longest time to wait for the other ranks to start, in seconds.
  double deadline_s = 300;
  /// A ProgressThread works on each rank while the body runs; MPI is asked for
  /// MPI_THREAD_MULTIPLE. unsupported where the program initialised MPI with less.
  bool progress_thread = false;
};

/// Runs `body` once per rank that this process is, and returns when it has ended on all ranks.
/// Errors: whatever the body throws; on the other ranks peer_failed with that rank's text, from
///         their next wait on. unsupported: the module of the launcher's MPI is not there, or is
///         of the other MPI. invalid_argument: the shape contradicts the job.
void run(const Options& options, const std::function<void(Transport&)>& body);

}  // namespace ferry::launch
