// How much of a dispatch is left to wait for after 20 ms of compute between its start and wait:
// with no calls of Ferry meanwhile, with progress() every 100 us, and with a progress thread. Each
// rank is a node and sends all its rows to the next one. Prints one line of JSON; checks what the
// docs promise. Moving rows takes CPU: where ranks have one core each, the compute gets longer.
// Run with at least 2 ranks: overlap_test TOKENS REPEATS

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ferry/ferry.hpp"
#include "ferry/mpi.hpp"

namespace {

constexpr std::int64_t kHidden = 2048;
constexpr double kCompute_ms = 20;
constexpr double kSlice_ms = 0.1;
constexpr double kMostLeft = 0.25;  // of a dispatch, with polling or a thread

enum class Mode { nothing, polling, thread };

[[noreturn]] void fail(const std::string& what) {
  std::printf("overlap_test: %s\n", what.c_str());
  std::fflush(stdout);
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

/// Work of a fixed size, so that whoever takes the core away makes it longer.
class Compute {
 public:
  Compute() {
    constexpr int kTrial = 2'000'000;
    double best_s = 1;
    for (int i = 0; i < 5; ++i) {
      const double began_s = MPI_Wtime();
      work(kTrial);
      best_s = std::min(best_s, MPI_Wtime() - began_s);
    }
    steps_per_slice_ = static_cast<int>(kTrial * kSlice_ms / (best_s * 1000));
  }

  template <typename AfterSlice>
  void run(const AfterSlice& after_slice) {
    for (int slice = 0; slice < static_cast<int>(kCompute_ms / kSlice_ms); ++slice) {
      work(steps_per_slice_);
      after_slice();
    }
  }

 private:
  void work(int steps) {
    for (int i = 0; i < steps; ++i) value_ = 0.5F * value_ + 1.0F;
  }

  volatile float value_ = 0;
  int steps_per_slice_ = 0;
};

double now_ms() { return MPI_Wtime() * 1000; }

double slowest(double own) {
  double all = 0;
  MPI_Allreduce(&own, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return all;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// Of the slowest rank, from a start that all make together.
struct Times {
  double total_ms = 0;
  double wait_ms = 0;  ///< the part of it after the compute
};

/// Medians of `body`, which returns the time when its compute had ended.
template <typename Body>
Times measure(int repeats, const Body& body) {
  std::vector<double> totals_ms, waits_ms;
  for (int i = 0; i < repeats; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double began_ms = now_ms();
    const double computed_ms = body();
    const double ended_ms = now_ms();
    totals_ms.push_back(slowest(ended_ms - began_ms));
    waits_ms.push_back(slowest(ended_ms - computed_ms));
  }
  return {median(totals_ms), median(waits_ms)};
}

class Experiment {
 public:
  Experiment(ferry::Transport& transport, std::int64_t num_tokens, int repeats)
      : transport_(transport),
        repeats_(repeats),
        num_tokens_(num_tokens),
        exchange_(transport,
                  ferry::Placement::contiguous(transport.topology().num_ranks(),
                                               transport.topology().num_ranks()),
                  {.hidden = kHidden, .dtype = ferry::DType::bf16}),
        x_(static_cast<std::size_t>(num_tokens * kHidden)),
        ids_(static_cast<std::size_t>(num_tokens),
             (transport.rank() + 1) % transport.topology().num_ranks()),
        plan_(exchange_.plan(
            ferry::Routing::of(num_tokens, 1, std::span<const std::int32_t>(ids_)))) {
    for (std::size_t i = 0; i < x_.size(); ++i) {
      x_[i] = static_cast<std::uint16_t>(i * 7 + static_cast<std::size_t>(transport.rank()));
    }
  }

  double dispatch_ms() {
    return measure(repeats_,
                   [&] {
                     check(start().wait());
                     return now_ms();
                   })
        .total_ms;
  }
  double compute_ms() {
    return measure(repeats_,
                   [&] {
                     compute_.run([] {});
                     return now_ms();
                   })
        .total_ms;
  }
  Times both(Mode mode) {
    std::optional<ferry::ProgressThread> thread;
    if (mode == Mode::thread) thread.emplace(transport_);
    return measure(repeats_, [&] {
      ferry::Pending<ferry::ExpertRows> pending = start();
      compute_.run([&] {
        if (mode == Mode::polling) pending.progress();
      });
      const double computed_ms = now_ms();
      check(pending.wait());
      return computed_ms;
    });
  }

 private:
  ferry::Pending<ferry::ExpertRows> start() {
    return exchange_.start_dispatch(plan_, {x_.data(), ferry::DType::bf16, num_tokens_, kHidden});
  }
  // The rows are those of the rank before this one.
  void check(const ferry::ExpertRows& rows) const {
    const int num_ranks = transport_.topology().num_ranks();
    const auto source = static_cast<std::size_t>((transport_.rank() + num_ranks - 1) % num_ranks);
    const auto* const last = static_cast<const std::uint16_t*>(rows.matrix().data) +
                             (num_tokens_ - 1) * rows.matrix().stride_bytes() / 2;
    const auto at = static_cast<std::size_t>((num_tokens_ - 1) * kHidden);
    if (rows.num_rows() != num_tokens_ ||
        last[5] != static_cast<std::uint16_t>((at + 5) * 7 + source)) {
      fail("a row is wrong");
    }
  }

  ferry::Transport& transport_;
  int repeats_;
  std::int64_t num_tokens_;
  ferry::Exchange exchange_;
  std::vector<std::uint16_t> x_;
  std::vector<std::int32_t> ids_;
  ferry::Plan plan_;
  Compute compute_;
};

void run(std::int64_t num_tokens, int repeats) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto transport =
      ferry::mpi::attach(MPI_COMM_WORLD, {.topology = ferry::Topology::uniform(size, 1)});
  Experiment experiment(*transport, num_tokens, repeats);
  const double dispatch_ms = experiment.dispatch_ms();
  const double compute_ms = experiment.compute_ms();
  const Times nothing = experiment.both(Mode::nothing);
  const Times polling = experiment.both(Mode::polling);
  const Times thread = experiment.both(Mode::thread);
  if (transport->rank() != 0) return;
  std::printf("{\"dispatch_ms\": %.2f, \"compute_ms\": %.2f", dispatch_ms, compute_ms);
  const auto print = [](const char* name, const Times& times) {
    std::printf(", \"%s\": {\"total_ms\": %.2f, \"wait_ms\": %.2f}", name, times.total_ms,
                times.wait_ms);
  };
  print("nothing", nothing);
  print("polling", polling);
  print("thread", thread);
  std::printf("}\n");
  if (std::max(polling.wait_ms, thread.wait_ms) > kMostLeft * dispatch_ms) {
    fail("too much of the dispatch was left after the compute");
  }
}

}  // namespace

int main(int argc, char** argv) {
  int level = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  if (argc != 3) fail("usage: overlap_test TOKENS REPEATS");
  if (level < MPI_THREAD_MULTIPLE) fail("MPI_THREAD_MULTIPLE is not provided");
  run(std::atoll(argv[1]), std::atoi(argv[2]));
  MPI_Finalize();
  return 0;
}
