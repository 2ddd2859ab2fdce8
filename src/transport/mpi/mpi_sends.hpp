#pragma once
// Sends of a rank that MPI still works on. MPI moves everything along at each call that asks about
// a request, and with more ranks than cores it gives the core away there too: so one call asks for
// all sends.

#include <mpi.h>

#include <cstdint>
#include <optional>
#include <unordered_set>
#include <vector>

namespace ferry::detail {

class MpiSends {
 public:
  /// Tickets ascend.
  void add(std::uint64_t ticket, MPI_Request request);

  /// Whether a send is done; nothing when the ticket is unknown, or was told as done before. MPI is
  /// asked again for the first ticket of each ascending row of questions.
  /// Errors: peer_failed with MPI's text
  std::optional<bool> is_done(std::uint64_t ticket);

  /// Waits until all are done. False when that takes longer.
  bool finish(double limit_s);

 private:
  void look();

  // Side by side, as MPI takes them.
  std::vector<std::uint64_t> tickets_;
  std::vector<MPI_Request> requests_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::unordered_set<std::uint64_t> done_;  ///< and not asked about since
  std::uint64_t last_asked_ = 0;
  bool added_ = false;  ///< since MPI was asked
};

}  // namespace ferry::detail
