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

/// Made once for each list of ranks, and kept: communicators are scarce.
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
  struct Entry {
    MPI_Comm comm = MPI_COMM_NULL;
    std::uint64_t num_calls = 0;  ///< those that failed left messages behind
  };
  std::map<std::vector<int>, Entry> known_;
};

}  // namespace ferry::detail
