// MPI_Finalize deletes the attributes of MPI_COMM_SELF before it does anything else.

#include "transport/mpi/mpi_end.hpp"

#include <mpi.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "transport/mpi/mpi_comm.hpp"

namespace ferry::detail {

namespace {

struct Listeners {
  std::mutex mutex;
  std::vector<MpiEndListener*> alive;
  bool ended = false;
};

Listeners& listeners() {
  static auto* const made = new Listeners;  // never destroyed: the last listener may be a static
  return *made;
}

int tell_listeners(MPI_Comm, int, void*, void*) {
  std::vector<MpiEndListener*> alive;
  {
    const std::lock_guard lock(listeners().mutex);
    alive = listeners().alive;
  }
  std::for_each(alive.rbegin(), alive.rend(), [](MpiEndListener* one) { one->mpi_ends(); });
  const std::lock_guard lock(listeners().mutex);
  listeners().ended = true;
  return MPI_SUCCESS;
}

void hear_of_the_end() {
  static const bool heard = [] {
    int key = MPI_KEYVAL_INVALID;
    check_mpi(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, &tell_listeners, &key, nullptr),
              "MPI_Comm_create_keyval");
    check_mpi(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "MPI_Comm_set_attr");
    return true;
  }();
  static_cast<void>(heard);
}

}  // namespace

MpiEndListener::MpiEndListener() {
  hear_of_the_end();
  const std::lock_guard lock(listeners().mutex);
  listeners().alive.push_back(this);
}

MpiEndListener::~MpiEndListener() {
  const std::lock_guard lock(listeners().mutex);
  std::erase(listeners().alive, this);
}

bool mpi_is_running() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  const std::lock_guard lock(listeners().mutex);
  return initialized != 0 && finalized == 0 && !listeners().ended;
}

}  // namespace ferry::detail
