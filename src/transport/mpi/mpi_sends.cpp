// One MPI_Testsome for all sends: see mpi_sends.hpp.

#include "transport/mpi/mpi_sends.hpp"

#include <algorithm>
#include <thread>

#include "base/clock.hpp"
#include "transport/mpi/mpi_comm.hpp"

namespace ferry::detail {

void MpiSends::add(std::uint64_t ticket, MPI_Request request) {
  tickets_.push_back(ticket);
  requests_.push_back(request);
  added_ = true;
}

std::optional<bool> MpiSends::is_done(std::uint64_t ticket) {
  if (added_ || ticket <= last_asked_) look();
  added_ = false;
  last_asked_ = ticket;
  if (done_.erase(ticket) > 0) return true;
  if (!std::ranges::binary_search(tickets_, ticket)) return std::nullopt;
  return false;
}

void MpiSends::look() {
  if (requests_.empty()) return;
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int num_done = 0;
  const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &num_done,
                                indices_.data(), statuses_.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (int i = 0; i < num_done; ++i) check_mpi(statuses_[i].MPI_ERROR, "MPI_Testsome of sends");
  }
  check_mpi(code, "MPI_Testsome of sends");
  if (num_done <= 0) return;
  for (int i = 0; i < num_done; ++i) done_.insert(tickets_[indices_[i]]);
  std::erase_if(tickets_, [this](std::uint64_t ticket) { return done_.contains(ticket); });
  std::erase(requests_, MPI_REQUEST_NULL);  // what is done is null
}

bool MpiSends::finish(double limit_s) {
  const double began = base::now_s();
  const auto is_done = [](MPI_Request& request) {
    int done = 0;  // a request that was done before is null, and done
    return MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done != 0;
  };
  while (!std::ranges::all_of(requests_, is_done)) {
    if (base::now_s() - began > limit_s) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace ferry::detail
