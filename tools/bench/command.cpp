// From flags to a printed result. Without a launcher ranks are threads, and the first failure of
// any rank is the one told; a launcher's ranks are in job_run.cpp.
#include "bench/command.hpp"

#include <malloc.h>

#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "bench/job_run.hpp"
#include "bench/rank_bench.hpp"
#include "bench/result.hpp"
#include "bench/tell.hpp"
#include "bench/workload.hpp"
#include "common/memory_check.hpp"
#include "ferry/threads.hpp"
#include "launch/job.hpp"

namespace ferry::bench {
namespace {

// What checks free stays with the process. On virtual machines without nested paging, memory that
// goes back to the system takes the translations of all other small pages with it (measured: 7 us
// for each at its next use), and the next timed part would pay for a check.
void keep_freed_memory() {
  constexpr int kLargestThreshold = 32 << 20;  // of glibc; what is larger is kept by its users
  mallopt(M_MMAP_THRESHOLD, kLargestThreshold);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
}

/// Keeps the exception that came first: the others follow from it.
class FirstFailure {
 public:
  void note(std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    if (!first_) first_ = std::move(failure);
  }
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr first_;
};

void run_ranks(RunContext& context) {
  threads::Options options;
  options.topology = context.workload.topology;
  options.link_bits_per_s = context.options.link_bits_per_s;
  FirstFailure failure;
  try {
    threads::run(options, [&](Transport& transport) {
      try {
        RankBench(context, transport).run();
      } catch (...) {
        failure.note(std::current_exception());
        context.line->break_off();
        throw;
      }
    });
  } catch (...) {
    failure.rethrow();
    throw;
  }
}

void run_in_threads(const BenchOptions& options) {
  const Workload workload = make_workload(options);
  const RowCounts counts = count_rows(workload);
  std::vector<int> ranks(static_cast<std::size_t>(workload.num_ranks()));
  std::iota(ranks.begin(), ranks.end(), 0);
  tools::check_memory(needed_bytes(workload, counts, ranks, options),
                      "fewer --tokens, a smaller --hidden or --topk, or fewer ranks");
  RunContext context{options,
                     workload,
                     counts,
                     std::make_unique<ThreadLine>(workload.num_ranks()),
                     std::vector<RankRecords>(ranks.size()),
                     {},
                     nullptr,
                     workload.num_ranks()};
  context.settings.link_bits_per_s = options.link_bits_per_s;
  try {
    run_ranks(context);
    tell(context, summarise(context));
  } catch (...) {
    tell_failed(&context, tools::describe(std::current_exception()));
    throw;
  }
}

}  // namespace

CLI::App& add_command(CLI::App& app, BenchFlags& flags) {
  CLI::App* command = app.add_subcommand(
      "bench", "Measure dispatch and combine of every strategy, and verify every row and sum");
  add_bench_flags(*command, flags);
  command->footer(
      "Examples:\n"
      "  ferry bench --link-rate 1gbit\n"
      "  ferry bench --routing zipf:1.0 --link-rate 1gbit\n"
      "  ferry bench --trace traces/deepseek_v2_lite/intent --layer 3 --tokens 1024 --json\n"
      "  ferry bench --nodes 1 --ranks-per-node 2 --tokens 1024\n"
      "  mpirun -n 8 ferry bench --baseline alltoallv --tokens 1024\n\n"
      "Exit codes: 0 ok; 2 usage; 3 verification failed; 4 environment (unreadable trace, too\n"
      "little memory). docs/metrics.md defines every figure.");
  return *command;
}

void run_command(const BenchFlags& flags) {
  const std::optional<launch::Launcher> launcher = launch::choose_launcher(flags.plain.mpi);
  const BenchOptions options = parse_bench_flags(flags, launcher);
  keep_freed_memory();
  if (launcher) {
    run_in_job(options);
  } else {
    run_in_threads(options);
  }
}

}  // namespace ferry::bench
