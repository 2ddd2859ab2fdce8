#pragma once
// Ranks wherever this process was started: under an MPI launcher it is one rank of that job, else
// all ranks are threads of it. So one program runs with `./program` and with `mpirun ./program`.

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ferry/topology.hpp"
#include "ferry/transport.hpp"

namespace ferry::detail {
class MpiJob;
}

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

/// This process as one rank while the object lives, for programs that have no function to hand to
/// run(), such as an interpreter. Under a launcher a rank of its job, else the only rank there is.
/// Requires: the transports that it made go before it; all calls on the thread that made it
class Session {
 public:
  /// Starts MPI under a launcher, unless the program did. No rank waits for another here.
  /// Errors: unsupported, invalid_argument, as run()
  explicit Session(const Options& options = {});
  /// Leaves like a rank that failed, unless end() was called.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// A transport over all ranks. Collective over them; several may be made, one after another or
  /// side by side.
  /// Errors: as run() and mpi::attach
  std::unique_ptr<Transport> attach(const std::optional<Topology>& topology = {});
  /// Ends MPI with all other ranks, if it was started here. Waits for them.
  void end();

 private:
  void leave(double limit_s);

  Options options_;
  std::optional<Launcher> launcher_;
  std::unique_ptr<detail::MpiJob> job_;  // null where the rank is a thread
};

/// mpi::attach for a program that runs on MPI but does not link ferry::mpi_openmpi or mpi_mpich:
/// the module of `options.mpi`, "openmpi" or "mpich", is loaded for it.
/// Requires: `comm` is the address of a communicator of that MPI, which was initialised
/// Errors:   as mpi::attach; invalid_argument (no such module), unsupported (it is not there)
std::unique_ptr<Transport> attach(const void* comm, const Options& options);

}  // namespace ferry::launch
