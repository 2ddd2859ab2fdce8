#pragma once
// Progress without polling: a thread that works for the caller while the caller computes.

#include <memory>

#include "ferry/transport.hpp"

namespace ferry {

namespace detail {
class ProgressLoop;
}

/// While it lives, operations that were started on the transport get on by themselves, with no
/// call of Pending::progress(). It sleeps while none runs, and while the caller waits. Each rank
/// may have one or not, as it likes. It needs a part of a core, but the caller's compute need not
/// be cut in slices. Open MPI must not be told to give its core away (`mpi_yield_when_idle`): each
/// of its questions would then cost the thread a slice of the scheduler.
/// Requires: goes before the transport, and before MPI_Finalize. Log lines may come from this
///           thread.
/// Deadlines: count in wait() only; done() alone never finds out that a peer is missing. While
///            calls run the thread shows ranks of its node that this one lives; ranks of other
///            nodes see that by its messages alone.
/// Errors:   unsupported: MPI was initialised with less than MPI_THREAD_MULTIPLE, or the transport
///           runs step by step; invalid_argument: the transport has one already;
///           resource_exhausted: no thread; peer_failed: after MPI_Finalize, or in a forked child
class ProgressThread {
 public:
  explicit ProgressThread(Transport& transport);
  ~ProgressThread();
  ProgressThread(ProgressThread&&) noexcept;
  ProgressThread& operator=(ProgressThread&&) noexcept;

 private:
  std::unique_ptr<detail::ProgressLoop> loop_;
};

}  // namespace ferry
