#pragma once
// Communicators of sub-groups. MPI_Comm_create_group waits for ever for a rank that does not come,
// so its ranks first tell the first of them that they are here, with a deadline.

#include <mpi.h>

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "transport/mpi/mpi_comm.hpp"

namespace ferry::detail {

/// Made once for each list of ranks, and kept: communicators are scarce. The ranks meet each time,
/// because what follows is collective, too, and cannot be taken back.
class SubgroupComms {
 public:
  /// Where the ranks meet: tags that no use of a pair has, see CommPairs::take.
  static constexpr int kFirstTag = 32764;

  /// Collective over `ranks`, which are ranks of `whole`. `look` is asked while it waits; it throws
  /// where the job has ended.
  /// Errors: timeout, mismatch (other lists came), peer_failed
  MPI_Comm of(const std::vector<int>& ranks, const CommPair& whole, double deadline_s,
              const std::function<void()>& look);

 private:
  std::map<std::vector<int>, MPI_Comm> known_;
  std::uint64_t num_calls_ = 0;
};

}  // namespace ferry::detail
