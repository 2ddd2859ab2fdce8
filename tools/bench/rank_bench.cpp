// Order inside a repeat: fill, memcpy, plan, dispatch, check, experts, combine, check, bytes. What
// is timed is bracketed by line_up() and the call itself; all checks lie outside.
#include "bench/rank_bench.hpp"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "bench/clock.hpp"
#include "bench/memory.hpp"
#include "common/failures.hpp"
#include "support/rows.hpp"
#include "support/verify.hpp"

namespace ferry::bench {
namespace {

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
  return {{.topology = workload.topology,
           .placement = workload.placement,
           .hidden = workload.shape.hidden,
           .dtype = workload.shape.dtype,
           .strategy = options.strategies[strategy],
           .wire_dispatch = wire_dispatch(options),
           .wire_combine = wire_combine(options),
           .layout = options.layout,
           .weights = options.weights,
           .wire_block_columns = options.wire.block_columns,
           .max_relative_error = max_relative_error(options),
           .wire_sparse_ratio = options.wire.sparse_ratio,
           .wire_combine_backward = wire_combine_backward(options),
           .wire_dispatch_backward = wire_dispatch_backward(options)},
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
  result.wire_combine_backward = wire_combine_backward(options);
  result.wire_dispatch_backward = wire_dispatch_backward(options);
  result.wire_block_columns = options.wire.block_columns;
  result.max_relative_error = max_relative_error(options);
  result.wire_sparse_ratio = options.wire.sparse_ratio;
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
      stage_(transport, *context.line, cold_bytes_per_rank(context.ranks_of_machine)),
      reference_copy_(
          {context.counts.received[static_cast<std::size_t>(rank_)], context.workload.row_bytes()}),
      oracle_(make_oracle(context, 0, -1)) {
  for (const Strategy strategy : context.options.strategies) {
    exchanges_.emplace_back(transport, context.workload.placement, context.workload.shape,
                            exchange_options(context.options, strategy));
  }
  if (context.options.rail_message && RailReference::exists(context.workload.topology)) {
    rail_reference_.emplace(*context.job, context.workload.topology);
  }
  if (context.options.backward) {
    backward_.emplace(BackwardBench::Setting{context.options, transport, stage_, routing_},
                      context.workload.shape);
  }
  if (!context.options.baseline) return;
  for (const BaselineRows which : kBaselines) {
    baselines_.emplace_back(
        which, BaselineBench::Setting{
                   context.options, context.workload, *context.job, stage_, {x_, out_}});
  }
}

void RankBench::note_settings() {
  const ExchangeOptions& filled_in = exchanges_.front().options();
  RunSettings& settings = context_.settings;
  settings.transport = std::string(transport_.name());
  settings.paced = transport_.paced();
  settings.fragment_bytes = filled_in.fragment_bytes;
  settings.range_tokens = filled_in.range_tokens;
}

void RankBench::run() {
  // Threads share one context, the processes of a job have one each.
  if (rank_ == 0 || context_.job != nullptr) note_settings();
  context_.ranks[static_cast<std::size_t>(rank_)].strategies.resize(exchanges_.size());
  stage_.drain();
  const std::uint64_t before = transport_.counters().control_bytes;
  stage_.drain();
  control_bytes_per_barrier_ = transport_.counters().control_bytes - before;
  // Repeat -1 is the warm-up: it is verified like all others, and not counted.
  for (int repeat = -1; repeat < context_.options.repeat; ++repeat) {
    for (std::size_t strategy = 0; strategy < exchanges_.size(); ++strategy) {
      run_once(strategy, repeat);
    }
    run_baselines(repeat);
  }
  for (const BaselineBench& baseline : baselines_) {
    context_.ranks[static_cast<std::size_t>(rank_)].baselines.push_back(baseline.record());
  }
}

void RankBench::run_baselines(int repeat) {
  for (std::size_t i = 0; i < baselines_.size(); ++i) {
    baselines_[i].run_once(repeat, row_seed(context_.options, exchanges_.size() + i, repeat));
  }
}

std::uint64_t RankBench::heap_bytes() const {
  // The heap is the process's: one rank of it counts for all that are its threads.
  if (rank_ != 0 && context_.job == nullptr) return 0;
  const struct mallinfo2 heap = mallinfo2();
  return heap.uordblks + heap.hblkhd;
}

void RankBench::fail(std::size_t strategy, const std::string& text) {
  const Strategy which = context_.options.strategies[strategy];
  throw tools::VerificationError(which,
                                 fmt::format("verification failed: {}, {}: {}", to_string(which),
                                             name_of_repeat(repeat_), text));
}

void RankBench::run_once(std::size_t strategy, int repeat) {
  show_progress(strategy, repeat);
  repeat_ = repeat;
  oracle_ = make_oracle(context_, strategy, repeat);
  support::fill_rows(row_seed(context_.options, strategy, repeat), rank_, x_);
  std::memset(out_memory_.data(), kPoison, out_memory_.bytes());
  poison_free_slots(transport_, kPoison);

  RepeatTimes times;
  reference_copy_.copy();  // untimed, as all that follows
  stage_.line_up();
  times.memcpy.start_s = now_s();
  reference_copy_.copy();
  times.memcpy.end_s = now_s();

  counted_ = {};
  run_plan_and_dispatch(strategy, times);
  const Plan plan = run_plan(strategy, times);
  const ExpertRows rows = run_dispatch(strategy, plan, times);
  run_combine(strategy, rows, times);
  check(strategy, plan, rows);
  if (backward_) run_backward(strategy, rows, times);
  if (rail_reference_) run_rail_reference(times);

  RankRecord& record = context_.ranks[static_cast<std::size_t>(rank_)].strategies[strategy];
  record.summary = plan.summary();
  record.counted = counted_;
  // The largest: a plan takes the place of the one before it, which goes while it is made.
  record.memory = {pool_bytes(transport_), staging_bytes(transport_),
                   std::max(record.memory.plan, plan_heap_bytes_)};
  record.metadata_rounds = metadata_rounds_;
  if (repeat + 1 == context_.options.repeat) record.indices = measure_indices(strategy, plan);
  if (repeat >= 0) record.repeats.push_back(times);
}

Plan RankBench::run_plan(std::size_t strategy, RepeatTimes& times) {
  Exchange& exchange = exchanges_[strategy];
  const std::uint64_t heap_before = heap_bytes();
  stage_.drain();
  {
    const Plan untimed = exchange.plan(routing_);
    stage_.wait_for_all();
    const std::uint64_t heap_after = heap_bytes();
    plan_heap_bytes_ = heap_after > heap_before ? heap_after - heap_before : 0;
  }
  stage_.line_up();
  const TrafficCounters before = transport_.counters();
  const std::uint64_t rounds_before = exchange.metadata_rounds();
  times.plan.start_s = now_s();
  Plan plan = exchange.plan(routing_);
  times.plan.end_s = now_s();
  // Read before the ranks meet, which may take messages too.
  counted_.metadata = transport_.counters().metadata_bytes - before.metadata_bytes;
  metadata_rounds_ = exchange.metadata_rounds() - rounds_before;
  count_control(before);
  return plan;
}

ExpertRows RankBench::run_dispatch(std::size_t strategy, const Plan& plan, RepeatTimes& times) {
  Exchange& exchange = exchanges_[strategy];
  exchange.dispatch(plan, out_);  // untimed, and of poison
  stage_.line_up();
  const TrafficCounters before = transport_.counters();
  const WireUse used = exchange.wire_statistics().dispatch;
  times.dispatch.start_s = now_s();
  ExpertRows rows = exchange.dispatch(plan, x_);
  times.dispatch.end_s = now_s();
  count_control(before);
  counted_.dispatch = transport_.counters().payload_bytes - before.payload_bytes;
  counted_.beyond.dispatch =
      bytes_beyond(used, exchange.wire_statistics().dispatch,
                   plain_row_bytes(context_.options, exchange, wire_dispatch(context_.options)));
  return rows;
}

void RankBench::run_plan_and_dispatch(std::size_t strategy, RepeatTimes& times) {
  Exchange& exchange = exchanges_[strategy];
  exchange.plan_and_dispatch(routing_, out_);  // untimed, and of poison
  stage_.line_up();
  times.plan_and_dispatch.start_s = now_s();
  const Dispatched dispatched = exchange.plan_and_dispatch(routing_, x_);
  times.plan_and_dispatch.end_s = now_s();
  stage_.drain();
  if (const auto fault = support::check_rows(oracle_, rank_, dispatched.rows.matrix())) {
    fail(strategy, "plan_and_dispatch: " + *fault);
  }
}

void RankBench::run_combine(std::size_t strategy, const ExpertRows& rows, RepeatTimes& times) {
  Exchange& exchange = exchanges_[strategy];
  const OutputRows y = exchange.output(rows.plan());
  support::run_experts(y.plan(), rows.matrix(), y.matrix(), context_.options.weights);
  exchange.combine(y.plan(), y.matrix(), out_);  // untimed
  std::memset(out_memory_.data(), kPoison, out_memory_.bytes());
  stage_.line_up();
  const TrafficCounters before = transport_.counters();
  const WireUse used = exchange.wire_statistics().combine;
  times.combine.start_s = now_s();
  exchange.combine(y.plan(), y.matrix(), out_);
  times.combine.end_s = now_s();
  count_control(before);
  counted_.combine = transport_.counters().payload_bytes - before.payload_bytes;
  counted_.beyond.combine =
      bytes_beyond(used, exchange.wire_statistics().combine,
                   plain_row_bytes(context_.options, exchange, wire_combine(context_.options)));
}

void RankBench::run_backward(std::size_t strategy, const ExpertRows& rows, RepeatTimes& times) {
  RankRecord& record = context_.ranks[static_cast<std::size_t>(rank_)].strategies[strategy];
  const BackwardBench::Repeat repeat{exchanges_[strategy], rows, oracle_, x_, repeat_};
  if (const auto fault = backward_->run(repeat, times, counted_, record)) fail(strategy, *fault);
}

void RankBench::run_rail_reference(RepeatTimes& times) {
  rail_reference_->set_bytes(counted_.metadata + counted_.dispatch + counted_.combine);
  rail_reference_->run();  // untimed
  stage_.line_up();
  times.rail_message.start_s = now_s();
  rail_reference_->run();
  times.rail_message.end_s = now_s();
}

void RankBench::count_control(const TrafficCounters& before) {
  stage_.drain();
  const std::uint64_t control = transport_.counters().control_bytes - before.control_bytes;
  counted_.control +=
      control > control_bytes_per_barrier_ ? control - control_bytes_per_barrier_ : 0;
}

void RankBench::check(std::size_t strategy, const Plan& plan, const ExpertRows& rows) {
  const bool faulty = repeat_ == 0;
  if (faulty && context_.options.fault == Fault::row) flip_first_bit(rows.matrix());
  if (faulty && context_.options.fault == Fault::out) flip_first_bit(out_);
  for (const auto& fault : {support::check_plan(oracle_, rank_, plan),
                            support::check_rows(oracle_, rank_, rows.matrix()),
                            support::check_out(oracle_, rank_, out_)}) {
    if (fault) fail(strategy, *fault);
  }
  check_bytes(strategy, plan.summary());
}

IndexRecord RankBench::measure_indices(std::size_t strategy, const Plan& plan) const {
  IndexRecord record;
  for (const IndexSummary& index : plan.indices()) {
    ++record.tokens[static_cast<std::size_t>(index.tokens)];
    ++record.experts[static_cast<std::size_t>(index.experts)];
    record.bytes += index.bytes;
  }
  for (const IndexBounds& bounds : exchanges_[strategy].index_bounds(routing_)) {
    record.best_bytes += bounds.best_bytes;
    record.entropy_bytes += bounds.entropy_bytes;
  }
  return record;
}

void RankBench::check_bytes(std::size_t strategy, const PlanSummary& summary) {
  if (context_.options.fault == Fault::bytes && repeat_ == 0) ++counted_.dispatch;
  struct Check {
    const char* what;
    std::uint64_t counted;
    std::uint64_t planned;
  };
  for (const Check& check : {Check{"metadata_bytes", counted_.metadata, summary.metadata_bytes},
                             Check{"inter_node_bytes_dispatch", counted_.dispatch,
                                   summary.inter_node_bytes_dispatch + counted_.beyond.dispatch},
                             Check{"inter_node_bytes_combine", counted_.combine,
                                   summary.inter_node_bytes_combine + counted_.beyond.combine}}) {
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
