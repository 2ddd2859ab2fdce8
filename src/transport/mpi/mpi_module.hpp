#pragma once
// What a program that links no MPI asks of ferry_mpi_openmpi.so or ferry_mpi_mpich.so. One of them
// is loaded under a launcher (src/launch), built from the same sources as the program.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "ferry/topology.hpp"
#include "ferry/transport.hpp"

namespace ferry::detail {

struct MpiJobOptions {
  /// Ask for a thread level at which a second thread may move messages.
  bool many_threads = false;
  double deadline_s = 300;
};

/// One side of an all-to-all of rows: which part of `data` goes to, or comes from, each rank.
/// Units: counts and offsets are in units of `unit_bytes`, so that 64-bit byte offsets fit MPI's
///        int as long as there are fewer than 2^31 units.
struct RankParts {
  std::byte* data = nullptr;  ///< only read on the sending side
  std::uint64_t unit_bytes = 1;
  std::span<const std::int64_t> counts;   ///< by rank of the job
  std::span<const std::int64_t> offsets;  ///< by rank of the job
};

/// A message to a rank of the job and one from it.
struct Swap {
  int peer = -1;
  std::span<const std::byte> send;
  std::span<std::byte> receive;
};

/// This process as one rank of an MPI job. MPI is initialised unless the program did so, and ends
/// with the object then.
class MpiJob {
 public:
  MpiJob() = default;
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;
  virtual ~MpiJob() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Library and version, for example "Open MPI v4.1.4" or "MPICH 4.0.2".
  virtual std::string mpi() const = 0;
  /// mpi::attach over the first `num_ranks` ranks of the job. Collective over the job; null on the
  /// other ranks. `topology` null = the machines as they are found.
  virtual std::unique_ptr<Transport> attach(int num_ranks, const Topology* topology) = 0;
  /// mpi::attach over a communicator of the program, given by the address of its MPI_Comm.
  virtual std::unique_ptr<Transport> attach_to(const void* comm, const Topology* topology) = 0;
  // MPI's own collectives over all ranks, for programs that compare Ferry with them. They block, on
  // a communicator of their own; a rank that does not come blocks the others.
  /// Part r of `send` (send.size() / size() values) becomes part rank() of `receive` on rank r.
  /// Errors: invalid_argument (sizes), peer_failed (text of MPI)
  virtual void alltoall(std::span<const std::int64_t> send, std::span<std::int64_t> receive) = 0;
  /// MPI_Alltoallv. Requires: both sides have the same unit, on every rank
  /// Errors: invalid_argument (lists of another length), unsupported (2^31 units or more),
  ///         peer_failed (text of MPI)
  virtual void alltoallv(const RankParts& send, const RankParts& receive) = 0;
  /// All swaps at once, then MPI_Barrier of `ranks`, this one among them.
  /// Requires: the ranks of a barrier name the same ranks in the same order
  /// Errors: peer_failed (text of MPI)
  virtual void swap_and_meet(std::span<const Swap> swaps, std::span<const int> ranks) = 0;

  /// Returns true when every rank of the job is here; false when they are not after limit_s, or
  /// some seconds after the job of `transport` (may be null) was aborted.
  virtual bool meet(double limit_s, Transport* transport) = 0;
  /// From now on MPI is left as it is, because other ranks are not there to end it with.
  virtual void leave_mpi() = 0;
};

/// The one symbol of a module. Throws ferry::Error.
using StartMpiJob = MpiJob*(const MpiJobOptions& options);
inline constexpr const char* kStartMpiJob = "ferry_start_mpi_job";
/// A module that was built with other headers is refused by its second symbol, a std::uint32_t
/// with the value of FERRY_MPI_INTERFACE (cmake/FerryMpi.cmake).
inline constexpr const char* kMpiModuleVersion = "ferry_mpi_module_version";

}  // namespace ferry::detail
