#pragma once
// Ranks as processes of an MPI job: the ranks of a communicator exchange through shared memory
// inside a machine and through MPI between machines. The only public header that needs <mpi.h>;
// link ferry::mpi_openmpi or ferry::mpi_mpich, whichever your program is built with.

#include <mpi.h>

#include <memory>
#include <optional>

#include "ferry/topology.hpp"
#include "ferry/transport.hpp"

namespace ferry::mpi {

struct AttachOptions {
  /// Splits machines into virtual nodes, as if they were machines of their own. Ranks of one node
  /// must share memory: an override can only split. Unset = the machines as they are found.
  std::optional<Topology> topology{};
  /// Longest time for the other ranks to come to attach, in seconds.
  double deadline_s = 300;
};

/// The transport of this process among the ranks of `comm`. Collective over `comm`; several groups
/// of one job may each have their own. Ferry works on duplicates of `comm`, so that its messages
/// never meet the program's own.
/// Requires: MPI_Init was called. One caller thread at a time; with a thread level below
///           MPI_THREAD_SERIALIZED that is the thread that initialised MPI.
/// Ensures:  after MPI_Finalize the transport and its exchanges can still be destroyed, and calls
///           on them are refused.
/// Errors:   invalid_argument, unsupported (thread level), resource_exhausted, limit_exceeded (64
///           transports of one communicator), mismatch, timeout (the communicator is then of no
///           more use to Ferry), peer_failed (text of MPI, or another rank that could not)
/// Source:   the MPI standard, 4.0: sections 3.8.2 (matched probe), 11.6 (threads)
std::unique_ptr<Transport> attach(MPI_Comm comm, const AttachOptions& options = {});

}  // namespace ferry::mpi
