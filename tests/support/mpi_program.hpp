#pragma once
// Programs of tests on the processes of an MPI job. Every process runs the same tests in the same
// order; a program takes the first ranks of the job, on any virtual topology, and the others wait
// for its end. What a launched process knows of the others' bodies stands in a file that all of
// them map: FERRY_TEST_FILE, made by whoever starts the job.

#include <functional>
#include <optional>
#include <vector>

#include "ferry/topology.hpp"
#include "ferry/transport.hpp"
#include "support/rank_program.hpp"

namespace ferry::support {

class MpiProgram {
 public:
  /// True in a process of a job that runs tests.
  static bool is_on();
  static int job_rank();
  static int job_size();

  explicit MpiProgram(const Topology& topology);

  using RankBody = std::function<void(Transport&, Meeting&)>;
  /// Runs the body on this process's rank, if the topology has it, and gathers how all ranks ended.
  /// Errors: std::runtime_error when the job is too small or a process does not come to the end
  void run(const RankBody& body, std::vector<std::optional<Failure>>& failures);

  /// Every process gives element [job_rank] and takes the others.
  static void gather(std::vector<std::uint64_t>& values);
  static void gather(std::vector<std::optional<Failure>>& failures);

 private:
  Topology topology_;
};

}  // namespace ferry::support
