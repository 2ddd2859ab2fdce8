// Order inside a repeat: fill, memcpy, plan, dispatch, check, experts, combine, check, bytes. What
// is timed is bracketed by line_up() and the call itself; all checks lie outside.
#include "bench/rank_bench.hpp"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "common/failures.hpp"
#include "support/rows.hpp"
#include "support/verify.hpp"

namespace ferry::bench {
namespace {

constexpr int kPoison = 0xFF;  // a NaN in every dtype

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Matrix matrix_in(const HugeBuffer& memory, const Workload& workload, std::int64_t rows) {
  return {memory.data(), workload.shape.dtype, rows, workload.shape.hidden, 0};
}

/// New for every (strategy, repeat): rows that an earlier one left behind cannot pass.
std::uint64_t row_seed(const BenchOptions& options, std::size_t strategy, int repeat) {
  return options.seed * 1'000'003ULL + strategy * 100'000'007ULL +
         static_cast<std::uint64_t>(repeat + 1);
}

support::Reference make_oracle(const RunContext& context, std::size_t strategy, int repeat) {
  const BenchOptions& options = context.options;
  const Workload& workload = context.workload;
  return {{workload.topology, workload.placement, workload.shape.hidden, workload.shape.dtype,
           options.strategies[strategy], wire_dispatch(options), wire_combine(options),
           options.layout, options.weights},
          support::hashed_model(row_seed(options, strategy, repeat), workload.shape.dtype),
          support::views(workload.routing)};
}

ExchangeOptions exchange_options(const BenchOptions& options, Strategy strategy) {
  ExchangeOptions result;
  result.strategy = strategy;
  result.layout = options.layout;
  result.weights = options.weights;
  result.wire_dispatch = wire_dispatch(options);
  result.wire_combine = wire_combine(options);
  result.fragment_bytes = options.fragment_bytes;
  result.range_tokens = options.range_tokens;
  return result;
}

/// Changes the lowest bit of the first element, which no rounding hides.
void flip_first_bit(Matrix matrix) {
  if (matrix.rows > 0) matrix.row(0)[0] ^= std::byte{1};
}

}  // namespace

RankBench::RankBench(RunContext& context, Transport& transport)
    : context_(context),
      transport_(transport),
      rank_(transport.rank()),
      routing_(context.workload.routing[static_cast<std::size_t>(rank_)].view()),
      x_memory_(static_cast<std::uint64_t>(routing_.num_tokens) * context.workload.row_bytes()),
      out_memory_(x_memory_.bytes()),
      x_(matrix_in(x_memory_, context.workload, routing_.num_tokens)),
      out_(matrix_in(out_memory_, context.workload, routing_.num_tokens)),
      cooler_(cold_bytes_per_rank(context.workload.num_ranks())),
      reference_copy_({context.counts.received[static_cast<std::size_t>(rank_)],
                       context.workload.row_bytes(),
                       cold_bytes_per_rank(context.workload.num_ranks())}),
      oracle_(make_oracle(context, 0, -1)) {
  for (const Strategy strategy : context.options.strategies) {
    exchanges_.emplace_back(transport, context.workload.placement, context.workload.shape,
                            exchange_options(context.options, strategy));
  }
}

void RankBench::run() {
  if (rank_ == 0) {
    const ExchangeOptions& filled_in = exchanges_.front().options();
    context_.settings = {std::string(transport_.name()), transport_.paced(),
                         filled_in.fragment_bytes, filled_in.range_tokens};
  }
  drain();
  const std::uint64_t before = transport_.counters().control_bytes;
  drain();
  control_bytes_per_barrier_ = transport_.counters().control_bytes - before;
  // Repeat -1 is the warm-up: it is verified like all others, and not counted.
  for (int repeat = -1; repeat < context_.options.repeat; ++repeat) {
    for (std::size_t strategy = 0; strategy < exchanges_.size(); ++strategy) {
      run_once(strategy, repeat);
    }
  }
}

void RankBench::drain() {
  barrier(transport_);
  ++num_barriers_;
}

void RankBench::line_up() {
  drain();
  cooler_.cool();
  context_.line.arrive_and_wait();
}

void RankBench::fail(std::size_t strategy, const std::string& text) {
  const Strategy which = context_.options.strategies[strategy];
  throw tools::VerificationError(
      which, fmt::format("verification failed: {}, {}: {}", to_string(which),
                         repeat_ < 0 ? "warm-up" : fmt::format("repeat {}", repeat_ + 1), text));
}

void RankBench::run_once(std::size_t strategy, int repeat) {
  show_progress(strategy, repeat);
  repeat_ = repeat;
  oracle_ = make_oracle(context_, strategy, repeat);
  support::fill_rows(row_seed(context_.options, strategy, repeat), rank_, x_);
  std::memset(out_memory_.data(), kPoison, out_memory_.bytes());
  poison_free_slots(transport_, kPoison);

  RepeatTimes times;
  line_up();
  times.memcpy.start_s = now_s();
  reference_copy_.copy();
  times.memcpy.end_s = now_s();

  counted_ = {};
  const std::uint64_t control_before = transport_.counters().control_bytes;
  num_barriers_ = 0;
  const std::uint64_t rounds_before = exchanges_[strategy].metadata_rounds();
  const Plan plan = run_plan(strategy, times);
  const OutputRows y = run_dispatch(strategy, plan, times);
  run_combine(strategy, y, times);
  const std::uint64_t control = transport_.counters().control_bytes - control_before;
  const std::uint64_t of_barriers = num_barriers_ * control_bytes_per_barrier_;
  counted_.control = control > of_barriers ? control - of_barriers : 0;
  check_bytes(strategy, plan.summary());

  RankRecord& record = context_.records[strategy][static_cast<std::size_t>(rank_)];
  record.summary = plan.summary();
  record.counted = counted_;
  record.pool_bytes = pool_bytes(transport_);
  record.metadata_rounds = exchanges_[strategy].metadata_rounds() - rounds_before;
  if (repeat >= 0) record.repeats.push_back(times);
}

Plan RankBench::run_plan(std::size_t strategy, RepeatTimes& times) {
  line_up();
  const std::uint64_t before = transport_.counters().metadata_bytes;
  times.plan.start_s = now_s();
  Plan plan = exchanges_[strategy].plan(routing_);
  times.plan.end_s = now_s();
  context_.line.arrive_and_wait();  // a check must not take the core of a rank that still plans
  counted_.metadata = transport_.counters().metadata_bytes - before;
  if (const auto fault = support::check_plan(oracle_, rank_, plan)) fail(strategy, *fault);
  return plan;
}

OutputRows RankBench::run_dispatch(std::size_t strategy, const Plan& plan, RepeatTimes& times) {
  line_up();
  const std::uint64_t before = transport_.counters().payload_bytes;
  times.dispatch.start_s = now_s();
  const ExpertRows rows = exchanges_[strategy].dispatch(plan, x_);
  times.dispatch.end_s = now_s();
  drain();
  counted_.dispatch = transport_.counters().payload_bytes - before;
  if (context_.options.fault == Fault::row && repeat_ == 0) flip_first_bit(rows.matrix());
  if (const auto fault = support::check_rows(oracle_, rank_, rows.matrix())) {
    fail(strategy, *fault);
  }
  OutputRows y = exchanges_[strategy].output(plan);
  support::run_experts(plan, rows.matrix(), y.matrix(), context_.options.weights);
  return y;
}

void RankBench::run_combine(std::size_t strategy, const OutputRows& y, RepeatTimes& times) {
  line_up();
  const std::uint64_t before = transport_.counters().payload_bytes;
  times.combine.start_s = now_s();
  exchanges_[strategy].combine(y.plan(), y.matrix(), out_);
  times.combine.end_s = now_s();
  drain();
  counted_.combine = transport_.counters().payload_bytes - before;
  if (context_.options.fault == Fault::out && repeat_ == 0) flip_first_bit(out_);
  if (const auto fault = support::check_out(oracle_, rank_, out_)) fail(strategy, *fault);
}

void RankBench::check_bytes(std::size_t strategy, const PlanSummary& summary) {
  if (context_.options.fault == Fault::bytes && repeat_ == 0) ++counted_.dispatch;
  struct Check {
    const char* what;
    std::uint64_t counted;
    std::uint64_t planned;
  };
  for (const Check& check :
       {Check{"metadata_bytes", counted_.metadata, summary.metadata_bytes},
        Check{"inter_node_bytes_dispatch", counted_.dispatch, summary.inter_node_bytes_dispatch},
        Check{"inter_node_bytes_combine", counted_.combine, summary.inter_node_bytes_combine}}) {
    if (check.counted != check.planned) {
      fail(strategy, fmt::format("rank {}: the transport counted {} {}, the plan says {}", rank_,
                                 check.counted, check.what, check.planned));
    }
  }
}

void RankBench::show_progress(std::size_t strategy, int repeat) const {
  if (rank_ != 0 || isatty(STDERR_FILENO) == 0) return;
  const std::string step = repeat < 0
                               ? std::string("warm-up")
                               : fmt::format("repeat {}/{}", repeat + 1, context_.options.repeat);
  fmt::print(stderr, "\r\033[Kferry bench: {}, {}", step,
             to_string(context_.options.strategies[strategy]));
  std::fflush(stderr);
}

}  // namespace ferry::bench
