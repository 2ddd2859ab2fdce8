// One rank of a job that goes on with steps until something goes wrong. What each rank is told then
// is written to a file of its own, because launchers may lose what ranks print when a job breaks.
//
// Run: failing_job FOLDER DEADLINE_S VICTIM SIGNAL   (rank VICTIM sends itself SIGNAL in a later
//      step; -1 = nobody does). FOLDER/running appears once steps run.

#include <signal.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "ferry/ferry.hpp"

namespace {

constexpr std::int64_t kHidden = 256;
constexpr std::int64_t kTokens = 64;
constexpr int kTopk = 2;
constexpr int kStepsBefore = 20;
constexpr double kLimit_s = 60;  // nothing went wrong

struct Job {
  std::string folder;
  double deadline_s;
  int victim;
  int signal;
};

void run_step(const Job& job, ferry::Exchange& exchange, const ferry::Routing& routing, bool last) {
  std::vector<float> x(kTokens * kHidden, 1.0F);
  const ferry::Plan plan = exchange.plan(routing);
  auto dispatching = exchange.start_dispatch(plan, {x.data(), ferry::DType::f32, kTokens, kHidden});
  if (last) ::raise(job.signal);
  const ferry::ExpertRows rows = dispatching.wait();
  exchange.combine(plan, rows.matrix(), {x.data(), ferry::DType::f32, kTokens, kHidden});
}

void run_rank(const Job& job, ferry::Transport& transport) {
  ferry::set_limits(transport, {.deadline_s = job.deadline_s});
  const int rank = transport.rank();
  const int ranks = transport.topology().num_ranks();
  ferry::Exchange exchange(transport, ferry::Placement::contiguous(2 * ranks, ranks),
                           {.hidden = kHidden, .dtype = ferry::DType::f32});
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < kTokens * kTopk; ++i) {
    ids.push_back(static_cast<std::int32_t>((i + rank) % (2 * ranks)));
  }
  const ferry::Routing routing =
      ferry::Routing::of(kTokens, kTopk, std::span<const std::int32_t>(ids), {});
  const double began = ferry::base::now_s();
  double progressed = began;
  try {
    for (int step = 0; progressed - began < kLimit_s; ++step) {
      if (step == kStepsBefore && rank == 0) std::ofstream(job.folder + "/running") << "\n";
      run_step(job, exchange, routing, rank == job.victim && step == kStepsBefore);
      progressed = ferry::base::now_s();
    }
  } catch (const ferry::Error& error) {
    const std::string file = job.folder + "/rank" + std::to_string(rank);
    const std::string unfinished = file + ".part";
    std::ofstream(unfinished) << ferry::base::now_s() - progressed << "\n"
                              << to_string(error.code()) << "\n"
                              << error.what() << "\n";
    std::rename(unfinished.c_str(), file.c_str());
    throw;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const Job job{argv[1], std::atof(argv[2]), std::atoi(argv[3]), std::atoi(argv[4])};
  try {
    ferry::launch::run({}, [&](ferry::Transport& transport) { run_rank(job, transport); });
  } catch (const std::exception&) {
    return 1;  // written down where it was caught
  }
  return 0;
}
