// A rank that fails aborts the transport with its failure as text. The first such text reaches all
// ranks, frees them from their waits, and is what all of them end with.
#include "bench/job_run.hpp"

#include <charconv>
#include <cstdio>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "bench/job_ranks.hpp"
#include "bench/print.hpp"
#include "bench/rank_bench.hpp"
#include "bench/result.hpp"
#include "bench/tell.hpp"
#include "bench/workload.hpp"
#include "common/failures.hpp"
#include "common/memory_check.hpp"
#include "launch/job.hpp"

namespace ferry::bench {
namespace {

using tools::ExitCode;
using tools::Failure;

/// "3 node_dedup text"; a dash where no strategy failed.
std::string to_text(const Failure& failure) {
  return fmt::format("{} {} {}", static_cast<int>(failure.code),
                     failure.strategy ? to_string(*failure.strategy) : "-", failure.text);
}

/// A text of another form is one of the library's own.
Failure from_text(const std::string& text) {
  int code = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), code);
  const auto word = static_cast<std::size_t>(end - text.data()) + 1;
  const std::size_t blank = word < text.size() ? text.find(' ', word) : std::string::npos;
  if (error != std::errc{} || blank == std::string::npos) return {ExitCode::environment, text};
  return {static_cast<ExitCode>(code), text.substr(blank + 1),
          strategy_from_string(std::string_view(text).substr(word, blank - word))};
}

/// One process of the job.
class JobRun {
 public:
  JobRun(const BenchOptions& options, Transport& transport, detail::MpiJob& job)
      : options_(options), transport_(transport), job_(job) {}

  /// Errors: ToldFailure
  void run() {
    try {
      measure();
    } catch (...) {
      end_together(tools::describe(std::current_exception()));
    }
  }

 private:
  void measure() {
    const LabLink link = read_lab_link();
    const Neighbours neighbours = find_neighbours(transport_);
    workload_ = make_workload(options_, transport_.topology());
    check_same_routing();
    counts_ = count_rows(*workload_);
    tools::check_memory(
        needed_bytes(*workload_, counts_, neighbours.ranks_here, options_),
        "fewer --tokens, a smaller --hidden or --topk, or fewer ranks on this machine");
    barrier(transport_);  // nobody takes memory that another rank would miss when it checks
    context_.emplace(RunContext{options_,
                                *workload_,
                                counts_,
                                std::make_unique<JobLine>(transport_, neighbours.one_clock),
                                std::vector<RankRecords>(workload_->routing.size()),
                                {},
                                &job_,
                                static_cast<int>(neighbours.ranks_here.size())});
    RunSettings& settings = context_->settings;
    settings.mpi = job_.mpi();
    settings.one_clock = neighbours.one_clock;
    settings.link_bits_per_s = link.bits_per_s;
    settings.burst_bytes = link.burst_bytes;
    RankBench(*context_, transport_).run();
    gather_records();
    // On every rank: where the result is refused, all ranks refuse it.
    const RunResult result = summarise(*context_);
    if (is_first()) tell(*context_, result);
  }

  /// The trace that comes with the command may be on some machines only.
  void check_same_routing() {
    const auto names = all_gather(transport_, std::as_bytes(std::span(workload_->routing_name)));
    const auto text_of = [&](std::size_t rank) {
      return std::string_view(reinterpret_cast<const char*>(names[rank].data()),
                              names[rank].size());
    };
    for (std::size_t rank = 1; rank < names.size(); ++rank) {
      if (text_of(rank) == text_of(0)) continue;
      throw tools::EnvironmentError(fmt::format(
          "rank {} has routing {}, rank 0 {}: the trace that comes with ferry is not on "
          "every machine; fix: install ferry whole on all of them, or give --routing",
          rank, text_of(rank), text_of(0)));
    }
  }

  void gather_records() {
    const RankRecords& own = context_->ranks[static_cast<std::size_t>(transport_.rank())];
    const auto all = all_gather(transport_, to_bytes(own));
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      context_->ranks[rank] = from_bytes(all[rank]);
    }
  }

  [[noreturn]] void end_together(const Failure& own) {
    transport_.abort(to_text(own));
    const Failure first = from_text(transport_.aborted().value_or(to_text(own)));
    if (is_first()) {
      tell_failed(context_ ? &*context_ : nullptr, first);
      fmt::print(stderr, "ferry: {}\n", first.text);
      std::fflush(nullptr);
    }
    throw tools::ToldFailure(first.code);
  }

  bool is_first() const { return transport_.rank() == 0; }

  const BenchOptions& options_;
  Transport& transport_;
  detail::MpiJob& job_;
  std::optional<Workload> workload_;
  RowCounts counts_;
  std::optional<RunContext> context_;
};

}  // namespace

void run_in_job(const BenchOptions& options) {
  launch::Options launch_options{.topology = {}, .mpi = options.mpi};
  if (!options.machines_as_found) {
    launch_options.topology = Topology::uniform(options.num_nodes, options.ranks_per_node);
  }
  launch::run_with_job(launch_options, [&](Transport& transport, detail::MpiJob* job) {
    JobRun(options, transport, *job).run();
  });
}

}  // namespace ferry::bench
