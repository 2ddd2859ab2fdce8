// The table says what was measured, on what, and whether links were slowed, before any figure.
#include <optional>
#include <string_view>

#include <fmt/format.h>

#include "bench/advice.hpp"
#include "bench/print.hpp"
#include "common/default_trace.hpp"
#include "common/text.hpp"

namespace ferry::bench {
namespace {

std::string rate(double bits_per_s) {
  if (bits_per_s >= 1e9) return fmt::format("{:g} Gbit/s", bits_per_s / 1e9);
  return fmt::format("{:g} Mbit/s", bits_per_s / 1e6);
}

std::string links_of(const RunSettings& settings) {
  if (settings.paced) {
    return fmt::format("links paced to {} per node", rate(settings.link_bits_per_s));
  }
  if (settings.link_bits_per_s > 0) {
    return fmt::format("links of a lab, {} per node", rate(settings.link_bits_per_s));
  }
  return settings.mpi.empty() ? "links not paced, as fast as memory" : "links as MPI finds them";
}

std::string routing_of(const RunContext& context) {
  const Workload& workload = context.workload;
  if (!workload.trace) {
    return fmt::format("{}, seed {}", workload.routing_name, context.options.seed);
  }
  const TraceSource& trace = *workload.trace;
  if (!trace.by_default) return fmt::format("{}, layer {}", trace.directory, trace.layer);
  return fmt::format("{}, which comes with ferry, layer {}", tools::kDefaultTrace, trace.layer);
}

std::string heading(const RunContext& context) {
  const BenchOptions& options = context.options;
  const Workload& workload = context.workload;
  const RunSettings& settings = context.settings;
  std::string text = fmt::format(
      "{}, {} ({}; {})\n"
      "{}, top-{} of {} experts, hidden {} {}; between nodes {} out, {} back\n"
      "rows {}, weights {}; routing: {}\n",
      tools::counted(workload.topology.num_nodes(), "node"),
      tools::counted(workload.num_ranks(), "rank"),
      settings.mpi.empty() ? settings.transport : settings.mpi, links_of(settings),
      tools::counted(workload.num_tokens(), "token"), workload.num_topk,
      workload.placement.num_experts(), workload.shape.hidden, to_string(workload.shape.dtype),
      to_string(wire_dispatch(options)), to_string(wire_combine(options)),
      to_string(options.layout), to_string(options.weights), routing_of(context));
  for (const std::string& note : workload.notes) text += fmt::format("note: {}\n", note);
  if (!settings.one_clock) {
    text += "ranks have different clocks: a time is the longest of the ranks' own durations\n";
  }
  if (!settings.mpi.empty()) {
    text += fmt::format("between nodes: fragments of {} bytes, ranges of {}\n",
                        settings.fragment_bytes, tools::counted(settings.range_tokens, "token"));
  }
  return text + fmt::format(
                    "medians of {} after a warm-up; every row, every sum and every "
                    "byte count was verified\n\n",
                    tools::counted(options.repeat, "repeat"));
}

std::string memcpy_ratios(const StrategyResult& result) {
  if (result.logical_bytes_dispatch == 0) return "-";
  return fmt::format("{:.2f}x / {:.2f}x", result.dispatch_vs_memcpy(), result.combine_vs_memcpy());
}

std::optional<double> flat_total_us(const std::vector<StrategyResult>& results) {
  for (const StrategyResult& result : results) {
    if (result.strategy == Strategy::flat) return result.total_us();
  }
  return std::nullopt;
}

constexpr const char* kRow = "{:<12} {:>10} {:>9} {:>9} {:>10} {:>10} {:>10} {:>10} {:>8} {:>16}\n";

std::string row_of(const RunContext& context, const StrategyResult& result,
                   std::optional<double> flat_us) {
  const auto tokens = static_cast<double>(context.workload.num_tokens());
  const double rows = static_cast<double>(result.inter_node_rows_dispatch);
  return fmt::format(
      kRow, to_string(result.strategy), tokens > 0 ? fmt::format("{:.3f}", rows / tokens) : "-",
      tools::megabytes(static_cast<double>(result.counted.dispatch)),
      tools::megabytes(static_cast<double>(result.counted.combine)),
      tools::duration(result.plan_us.median), tools::duration(result.dispatch_us.median),
      tools::duration(result.combine_us.median), tools::duration(result.total_us()),
      flat_us ? fmt::format("{:.2f}x", *flat_us / result.total_us()) : "-", memcpy_ratios(result));
}

constexpr const char* kBaselineRow = "{:<20} {:>10} {:>10} {:>10} {:>10} {:>9}{}\n";

/// One line per baseline, then how many times as fast each strategy is, whole / on replay.
std::string baselines_of(const RunContext& context, const RunResult& result) {
  if (result.baselines.empty()) return "";
  std::string names;
  for (const StrategyResult& ours : result.strategies) {
    names += fmt::format(" {:>15}", to_string(ours.strategy));
  }
  std::string text = fmt::format(kBaselineRow, "baseline", "counts", "dispatch", "combine", "total",
                                 "MB peak", names);
  for (const BaselineResult& baseline : result.baselines) {
    std::string speedups;
    for (const StrategyResult& ours : result.strategies) {
      speedups += fmt::format(" {:>15}", fmt::format("{:.2f}x / {:.2f}x", baseline.speedup(ours),
                                                     baseline.speedup_on_replay(ours)));
    }
    text += fmt::format(
        kBaselineRow, to_string(baseline.rows), tools::duration(baseline.counts_us.median),
        tools::duration(baseline.dispatch_us.median), tools::duration(baseline.combine_us.median),
        tools::duration(baseline.total_us()),
        tools::megabytes(static_cast<double>(baseline.peak_bytes)), speedups);
  }
  std::string peaks;
  for (const StrategyResult& ours : result.strategies) {
    peaks += fmt::format(" {:>15}", tools::megabytes(static_cast<double>(ours.peak_bytes)));
  }
  text += fmt::format(kBaselineRow, "MB peak of ours", "", "", "", "", "", peaks);
  return text + fmt::format(
                    "alltoallv: MPI_Alltoallv of {} with pack and unpack, one row per (token, "
                    "expert); rank_rows: per (token, rank)\nunder a strategy: baseline / ours, "
                    "whole and on replay (without counts, without plan)\n\n",
                    context.settings.mpi);
}

std::string rail_messages_of(const std::vector<StrategyResult>& results) {
  std::string parts;
  for (const StrategyResult& ours : results) {
    if (!ours.rail_message_us) continue;
    parts += fmt::format("{}{} {:.2f}x", parts.empty() ? "" : ", ", to_string(ours.strategy),
                         ours.total_us() / ours.rail_message_us->median);
  }
  if (parts.empty()) return "";
  return fmt::format(
      "ours / one message per node of the same bytes and a barrier of the node: {}\n\n", parts);
}

std::string steps_text(const StepResult& step) {
  return fmt::format("{} ({:g} rounds of metadata, {:.1f} stalls, {})",
                     tools::duration(step.us.median), step.metadata_rounds, step.host_stalls,
                     tools::duration(step.stall_us));
}

constexpr const char* kBackwardRow = "{:<12} {:>17} {:>17} {:>14}  {}\n";

/// The way back and a whole step of each strategy.
std::string backward_of(const std::vector<StrategyResult>& results) {
  if (!results.front().backward) return "";
  std::string text = fmt::format(kBackwardRow, "strategy", "combine_backward", "dispatch_backward",
                                 "vs forward", "whole step");
  for (const StrategyResult& ours : results) {
    const BackwardResult& backward = *ours.backward;
    const double forward_us = ours.dispatch_us.median + ours.combine_us.median;
    const auto with = [](const Spread& rows, const std::optional<Spread>& weights) {
      const std::string alone = tools::duration(rows.median);
      return weights ? fmt::format("{} / {}", alone, tools::duration(weights->median)) : alone;
    };
    std::string step = steps_text(backward.step);
    if (backward.step_no_reuse) {
      step +=
          fmt::format("; planned anew each time {}, {:.2f}x", steps_text(*backward.step_no_reuse),
                      backward.step_no_reuse->us.median / backward.step.us.median);
    }
    text += fmt::format(kBackwardRow, to_string(ours.strategy),
                        with(backward.combine_backward_us, backward.combine_backward_weights_us),
                        with(backward.dispatch_backward_us, backward.dispatch_backward_weights_us),
                        fmt::format("{:.2f} / {:.2f}", backward.rows_us() / forward_us,
                                    backward.weights_us() / forward_us),
                        step);
  }
  return text +
         "where two figures stand, the second is with gradients of weights; vs forward: both "
         "backward operations / dispatch + combine; whole step: plan, forward, backward\n\n";
}

}  // namespace

std::string to_table(const RunContext& context, const RunResult& result) {
  const std::vector<StrategyResult>& results = result.strategies;
  std::string text = heading(context);
  text += fmt::format(kRow, "strategy", "rows/token", "MB out", "MB back", "plan", "dispatch",
                      "combine", "total", "vs flat", "vs memcpy");
  const std::optional<double> flat_us = flat_total_us(results);
  for (const StrategyResult& strategy : results) text += row_of(context, strategy, flat_us);
  const auto tokens = static_cast<double>(context.workload.num_tokens());
  const auto bound = static_cast<double>(context.counts.bound);
  text += fmt::format("{:<12} {:>10} {:>9} {:>9}\n", "bound",
                      tokens > 0 ? fmt::format("{:.3f}", bound / tokens) : "-",
                      tools::megabytes(static_cast<double>(results.front().bound_bytes_dispatch)),
                      tools::megabytes(static_cast<double>(results.front().bound_bytes_combine)));
  text += fmt::format(
      "\nrows/token and MB: what crosses between nodes, all ranks together; bound: one row per "
      "(token, node)\nvs flat: total of flat / total; vs memcpy: memcpy of the received rows "
      "({}) / dispatch, / combine\n\n",
      tools::duration(results.front().memcpy_us.median));
  text += backward_of(results);
  text += baselines_of(context, result);
  text += rail_messages_of(results);
  return text + "Why:  " + why_best(context, results) + "\nNext: " + what_next(context, results) +
         "\n";
}

}  // namespace ferry::bench
