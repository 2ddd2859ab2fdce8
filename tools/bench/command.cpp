// From flags to a printed result. Ranks are threads; the first failure of any rank is the one told.
#include "bench/command.hpp"

#include <unistd.h>

#include <cstdio>
#include <exception>
#include <mutex>
#include <string>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "bench/memory.hpp"
#include "bench/print.hpp"
#include "bench/rank_bench.hpp"
#include "bench/result.hpp"
#include "bench/workload.hpp"
#include "common/memory_check.hpp"
#include "ferry/threads.hpp"

namespace ferry::bench {
namespace {

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
        context.line.break_off();
        throw;
      }
    });
  } catch (...) {
    failure.rethrow();
    throw;
  }
}

void clear_progress() {
  if (isatty(STDERR_FILENO) != 0) fmt::print(stderr, "\r\033[K");
}

}  // namespace

CLI::App& add_command(CLI::App& app, BenchFlags& flags) {
  CLI::App* command = app.add_subcommand(
      "bench", "Measure dispatch and combine of every strategy, and verify every row and sum");
  add_bench_flags(*command, flags);
  command->footer(
      "Examples:\n"
      "  ferry bench --routing zipf:1.0 --link-rate 1gbit\n"
      "  ferry bench --trace traces/deepseek_v2_lite/intent --layer 3 --tokens 1024 --json\n"
      "  ferry bench --nodes 1 --ranks-per-node 2 --tokens 1024\n\n"
      "Exit codes: 0 ok; 2 usage; 3 verification failed; 4 environment (unreadable trace, too\n"
      "little memory). docs/metrics.md defines every figure.");
  return *command;
}

void run_command(const BenchFlags& flags) {
  const BenchOptions options = parse_bench_flags(flags);
  const Workload workload = make_workload(options);
  const RowCounts counts = count_rows(workload);
  tools::check_memory(needed_bytes(workload, counts),
                      "fewer --tokens, a smaller --hidden or --topk, or fewer ranks");
  RunContext context{options, workload, counts, StartLine(workload.num_ranks()), {}, {}};
  context.records.assign(options.strategies.size(),
                         std::vector<RankRecord>(static_cast<std::size_t>(workload.num_ranks())));
  std::vector<StrategyResult> results;
  try {
    run_ranks(context);
    results = summarise(context);
  } catch (const tools::VerificationError& failure) {
    clear_progress();
    if (options.json) {
      fmt::print("{}\n", to_json_failed(context, failure.strategy(), failure.what()));
    }
    throw;
  } catch (...) {
    clear_progress();
    throw;
  }
  clear_progress();
  if (!options.json) {
    fmt::print("{}", to_table(context, results));
    return;
  }
  for (const std::string& note : workload.notes) fmt::print(stderr, "ferry: note: {}\n", note);
  for (const StrategyResult& result : results) fmt::print("{}\n", to_json(context, result));
}

}  // namespace ferry::bench
