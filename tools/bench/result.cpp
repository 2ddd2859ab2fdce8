// A part begins when the first rank begins it and ends when the last rank has ended it.
#include "bench/result.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

#include <fmt/format.h>

#include "common/failures.hpp"

namespace ferry::bench {
namespace {

double percentile(const std::vector<double>& sorted, double share) {
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<std::size_t>(std::floor(at));
  const std::size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (at - static_cast<double>(low));
}

/// The interval of one part of one repeat on a rank.
using IntervalOf = std::function<const Interval&(const RankRecords& rank, std::size_t repeat)>;

/// Times of one part over all repeats. From the first start, not the last: with more ranks than
/// cores the first rank may be far into its work before the last one gets a core. Clocks of
/// different machines cannot be compared: then it is the longest of the ranks' own durations.
Spread times_of(const RunContext& context, const IntervalOf& interval) {
  std::vector<double> samples;
  const auto num_repeats = static_cast<std::size_t>(context.options.repeat);
  for (std::size_t repeat = 0; repeat < num_repeats; ++repeat) {
    double start = interval(context.ranks.front(), repeat).start_s;
    double end = interval(context.ranks.front(), repeat).end_s;
    double longest = 0;
    for (const RankRecords& rank : context.ranks) {
      const Interval& own = interval(rank, repeat);
      start = std::min(start, own.start_s);
      end = std::max(end, own.end_s);
      longest = std::max(longest, own.end_s - own.start_s);
    }
    samples.push_back((context.settings.one_clock ? end - start : longest) * 1e6);
  }
  return spread_of(std::move(samples));
}

Spread times_of(const RunContext& context, std::size_t strategy, Interval RepeatTimes::*part) {
  return times_of(context, [&](const RankRecords& rank, std::size_t repeat) -> const Interval& {
    return rank.strategies[strategy].repeats[repeat].*part;
  });
}

Spread times_of(const RunContext& context, std::size_t baseline, Interval BaselineTimes::*part) {
  return times_of(context, [&](const RankRecords& rank, std::size_t repeat) -> const Interval& {
    return rank.baselines[baseline].repeats[repeat].*part;
  });
}

std::uint64_t wire_row_bytes(const RunContext& context, WireFormat wire) {
  return ferry::wire_row_bytes(wire, context.workload.shape.hidden,
                               context.options.wire.block_columns);
}

/// What a link needs for its bytes; those of a burst pass at no cost.
double wire_time_us(const RunSettings& settings, std::uint64_t bytes) {
  const std::uint64_t paid = bytes > settings.burst_bytes ? bytes - settings.burst_bytes : 0;
  return static_cast<double>(paid) * 8e6 / settings.link_bits_per_s;
}

/// Bytes on the fullest direction of any node's link. What leaves is counted by the transport; what
/// enters is what the routing sends there, without headers.
struct LinkLoad {
  std::uint64_t dispatch = 0;
  std::uint64_t combine = 0;
};
LinkLoad fullest_link(const RunContext& context, std::size_t strategy) {
  const StrategyRows& rows = context.counts.of(context.options.strategies[strategy]);
  const Topology& topology = context.workload.topology;
  const std::uint64_t out_bytes = wire_row_bytes(context, wire_dispatch(context.options));
  const std::uint64_t back_bytes = wire_row_bytes(context, wire_combine(context.options));
  LinkLoad load;
  for (int node = 0; node < topology.num_nodes(); ++node) {
    std::uint64_t leaves_dispatch = 0;
    std::uint64_t leaves_combine = 0;
    for (const int rank : topology.ranks_of(node)) {
      const RankRecord& record = context.ranks[static_cast<std::size_t>(rank)].strategies[strategy];
      leaves_dispatch += record.counted.dispatch;
      leaves_combine += record.counted.combine;
    }
    std::int64_t comes_back = 0;
    for (int other = 0; other < topology.num_nodes(); ++other) {
      comes_back += rows.back.at(node, other);
    }
    load.dispatch = std::max({load.dispatch, leaves_dispatch,
                              static_cast<std::uint64_t>(rows.out.into(node)) * out_bytes});
    load.combine = std::max(
        {load.combine, leaves_combine, static_cast<std::uint64_t>(comes_back) * back_bytes});
  }
  return load;
}

void check_rows(const RunContext& context, const StrategyResult& result) {
  const StrategyRows& rows = context.counts.of(result.strategy);
  const auto check = [&](const char* what, std::uint64_t planned, std::int64_t expected) {
    if (planned == static_cast<std::uint64_t>(expected)) return;
    throw tools::VerificationError(
        result.strategy,
        fmt::format("verification failed: {}: the plan says {} {}, the routing needs {}",
                    to_string(result.strategy), planned, what, expected));
  };
  check("rows between nodes in dispatch", result.inter_node_rows_dispatch, rows.out.total());
  check("rows between nodes in combine", result.inter_node_rows_combine, rows.back.total());
}

StepResult summarise_step(const RunContext& context, std::size_t strategy,
                          Interval RepeatTimes::*part, StepStalls RankRecord::*stalls) {
  StepResult result;
  result.us = times_of(context, strategy, part);
  const auto repeats = static_cast<double>(context.options.repeat);
  for (const RankRecords& rank : context.ranks) {
    const StepStalls& own = rank.strategies[strategy].*stalls;
    result.metadata_rounds =
        std::max(result.metadata_rounds, static_cast<double>(own.metadata_rounds) / repeats);
    result.host_stalls =
        std::max(result.host_stalls, static_cast<double>(own.host_stalls) / repeats);
    result.stall_us = std::max(result.stall_us, own.stall_us / repeats);
  }
  return result;
}

BackwardResult summarise_backward(const RunContext& context, std::size_t strategy) {
  const auto times = [&](Interval RepeatTimes::*part) { return times_of(context, strategy, part); };
  BackwardResult result;
  result.combine_backward_us = times(&RepeatTimes::combine_backward);
  result.dispatch_backward_us = times(&RepeatTimes::dispatch_backward);
  if (context.options.weights == WeightMode::at_combine) {
    result.combine_backward_weights_us = times(&RepeatTimes::combine_backward_weights);
  }
  if (context.options.weights == WeightMode::at_expert) {
    result.dispatch_backward_weights_us = times(&RepeatTimes::dispatch_backward_weights);
  }
  result.step = summarise_step(context, strategy, &RepeatTimes::step, &RankRecord::step);
  if (context.options.no_reuse) {
    result.step_no_reuse =
        summarise_step(context, strategy, &RepeatTimes::step_no_reuse, &RankRecord::step_no_reuse);
  }
  return result;
}

StrategyResult summarise_strategy(const RunContext& context, std::size_t strategy) {
  StrategyResult result;
  result.strategy = context.options.strategies[strategy];
  result.plan_us = times_of(context, strategy, &RepeatTimes::plan);
  result.dispatch_us = times_of(context, strategy, &RepeatTimes::dispatch);
  result.combine_us = times_of(context, strategy, &RepeatTimes::combine);
  result.plan_and_dispatch_us = times_of(context, strategy, &RepeatTimes::plan_and_dispatch);
  result.memcpy_us = times_of(context, strategy, &RepeatTimes::memcpy);
  if (context.options.rail_message && RailReference::exists(context.workload.topology)) {
    result.rail_message_us = times_of(context, strategy, &RepeatTimes::rail_message);
  }
  if (context.options.backward) result.backward = summarise_backward(context, strategy);
  for (std::size_t rank = 0; rank < context.ranks.size(); ++rank) {
    const RankRecord& record = context.ranks[rank].strategies[strategy];
    result.logical_bytes_dispatch +=
        static_cast<std::uint64_t>(context.counts.received[rank]) * context.workload.row_bytes();
    result.inter_node_rows_dispatch += record.summary.inter_node_rows_dispatch;
    result.inter_node_rows_combine += record.summary.inter_node_rows_combine;
    result.counted.metadata += record.counted.metadata;
    result.counted.dispatch += record.counted.dispatch;
    result.counted.combine += record.counted.combine;
    result.counted.control += record.counted.control;
    result.counted.combine_backward += record.counted.combine_backward;
    result.counted.dispatch_backward += record.counted.dispatch_backward;
    result.counted.grad_weights += record.counted.grad_weights;
    result.window_bytes += record.summary.window_bytes;
    result.pool_bytes += record.memory.pool;
    result.peak_bytes += record.memory.all();
    result.metadata_rounds = std::max(result.metadata_rounds, record.metadata_rounds);
    result.indices.add(record.indices);
  }
  const auto bound = static_cast<std::uint64_t>(context.counts.bound);
  result.bound_bytes_dispatch = bound * wire_row_bytes(context, wire_dispatch(context.options));
  result.bound_bytes_combine = bound * wire_row_bytes(context, wire_combine(context.options));
  check_rows(context, result);
  if (context.settings.link_bits_per_s > 0) {
    const LinkLoad load = fullest_link(context, strategy);
    result.link_utilisation_dispatch =
        wire_time_us(context.settings, load.dispatch) / result.dispatch_us.median;
    result.link_utilisation_combine =
        wire_time_us(context.settings, load.combine) / result.combine_us.median;
  }
  return result;
}

BaselineResult summarise_baseline(const RunContext& context, std::size_t baseline) {
  BaselineResult result;
  result.rows = kBaselines[baseline];
  result.counts_us = times_of(context, baseline, &BaselineTimes::counts);
  result.dispatch_us = times_of(context, baseline, &BaselineTimes::dispatch);
  result.combine_us = times_of(context, baseline, &BaselineTimes::combine);
  for (const RankRecords& rank : context.ranks) {
    result.peak_bytes += rank.baselines[baseline].buffer_bytes;
  }
  return result;
}

}  // namespace

void IndexRecord::add(const IndexRecord& other) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] += other.tokens[i];
    experts[i] += other.experts[i];
  }
  bytes += other.bytes;
  best_bytes += other.best_bytes;
  entropy_bytes += other.entropy_bytes;
}

Spread spread_of(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return {percentile(samples, 0.5), percentile(samples, 0.1), percentile(samples, 0.9)};
}

RunResult summarise(const RunContext& context) {
  RunResult result;
  for (std::size_t strategy = 0; strategy < context.options.strategies.size(); ++strategy) {
    result.strategies.push_back(summarise_strategy(context, strategy));
  }
  if (!context.options.baseline) return result;
  for (std::size_t baseline = 0; baseline < kBaselines.size(); ++baseline) {
    result.baselines.push_back(summarise_baseline(context, baseline));
  }
  return result;
}

}  // namespace ferry::bench
