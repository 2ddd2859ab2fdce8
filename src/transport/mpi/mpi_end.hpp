#pragma once
// What must happen before MPI goes: a program may call MPI_Finalize while transports are alive.

namespace ferry::detail {

/// Registered from its construction to its destruction. Told once, first things last made, when
/// MPI_Finalize begins; MPI can still be called then, and never after.
class MpiEndListener {
 public:
  /// Requires: MPI_Init was called, MPI_Finalize was not
  MpiEndListener();
  MpiEndListener(const MpiEndListener&) = delete;
  MpiEndListener& operator=(const MpiEndListener&) = delete;

  virtual void mpi_ends() noexcept = 0;

 protected:
  virtual ~MpiEndListener();
};

/// True between MPI_Init and the end of those calls.
bool mpi_is_running();

}  // namespace ferry::detail
