#pragma once
// Ranks that are processes of a job: which of them share this machine and its clock, where they
// start together, and how their records come to every rank.

#include <cstddef>
#include <span>
#include <vector>

#include "bench/record.hpp"
#include "bench/start_line.hpp"
#include "ferry/transport.hpp"

namespace ferry::bench {

/// Who shares what with this rank.
struct Neighbours {
  std::vector<int> ranks_here;  ///< on this machine, ascending, this rank included
  bool one_clock = true;        ///< all ranks of the job read the same CLOCK_MONOTONIC
};
/// Virtual nodes and network namespaces of one machine share it; other machines, and time
/// namespaces, do not. Collective.
Neighbours find_neighbours(Transport& transport);

/// Ranks tell each other when they arrived. With one clock they then start at one time, a moment
/// after the last has arrived: as long after it as the news took to reach the slowest rank before.
class JobLine final : public StartLine {
 public:
  JobLine(Transport& transport, bool one_clock) : transport_(transport), one_clock_(one_clock) {}
  void arrive_and_wait() override;

 private:
  Transport& transport_;
  const bool one_clock_;
  double news_took_s_ = 0;
};

/// All that one rank wrote down, as bytes for another rank that runs the same program.
std::vector<std::byte> to_bytes(const RankRecords& records);
/// Errors: EnvironmentError when the bytes are not those of such records
RankRecords from_bytes(std::span<const std::byte> bytes);

}  // namespace ferry::bench
