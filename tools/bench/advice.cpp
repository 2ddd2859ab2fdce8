// Thresholds are few and stated: what is within 5 % counts as equal, and a link that is busy for
// 70 % of the time counts as the limit.
#include "bench/advice.hpp"

#include <algorithm>
#include <iterator>
#include <optional>

#include <fmt/format.h>

namespace ferry::bench {
namespace {

constexpr double kEqual = 1.05;
constexpr double kLinkIsLimit = 0.7;
constexpr double kPlanIsLarge = 0.3;

std::uint64_t bytes_between_nodes(const StrategyResult& result) {
  return result.counted.dispatch + result.counted.combine;
}

/// What the best is compared with: flat where it ran, else the slowest.
const StrategyResult& rival_of(const StrategyResult& best,
                               const std::vector<StrategyResult>& results) {
  const StrategyResult* rival = &results.front();
  for (const StrategyResult& result : results) {
    if (result.strategy == Strategy::flat && &result != &best) return result;
    if (result.total_us() > rival->total_us()) rival = &result;
  }
  return *rival;
}

double link_share(const StrategyResult& result) {
  return std::max(result.link_utilisation_dispatch, result.link_utilisation_combine);
}

std::string link_words(const RunContext& context, const StrategyResult& result) {
  if (context.settings.link_bits_per_s == 0) {
    if (!context.settings.mpi.empty()) {
      return "what bytes cost is up to the links between the machines, whose rate is not known "
             "here";
    }
    return "links are not paced here, so bytes between nodes cost no more than copies in memory";
  }
  return fmt::format(
      "its fullest link was busy for {:.0f} % of dispatch and {:.0f} % of combine, so {}",
      100 * result.link_utilisation_dispatch, 100 * result.link_utilisation_combine,
      link_share(result) >= kLinkIsLimit ? "time follows bytes"
                                         : "latency and copying count more than bytes");
}

std::string bytes_words(const StrategyResult& best, const StrategyResult& rival) {
  const auto best_bytes = static_cast<double>(bytes_between_nodes(best));
  const auto rival_bytes = static_cast<double>(bytes_between_nodes(rival));
  if (rival_bytes == 0) return "nothing crosses between nodes, so only fixed costs differ";
  return fmt::format(
      "it sends {:.2f} times the bytes of {} between nodes ({:.2f} MB against "
      "{:.2f} MB, out and back)",
      best_bytes / rival_bytes, to_string(rival.strategy), best_bytes / 1e6, rival_bytes / 1e6);
}

/// The part in which the best gains most on its rival: "dispatch (8.4 against 16.8 ms)".
std::string largest_gain(const StrategyResult& best, const StrategyResult& rival) {
  struct Part {
    std::string_view name;
    double best_us;
    double rival_us;
  };
  const Part parts[] = {{"plan", best.plan_us.median, rival.plan_us.median},
                        {"dispatch", best.dispatch_us.median, rival.dispatch_us.median},
                        {"combine", best.combine_us.median, rival.combine_us.median}};
  const Part& gain = *std::max_element(
      std::begin(parts), std::end(parts),
      [](const Part& a, const Part& b) { return a.rival_us - a.best_us < b.rival_us - b.best_us; });
  return fmt::format("{} ({:.2f} against {:.2f} ms)", gain.name, gain.best_us / 1e3,
                     gain.rival_us / 1e3);
}

/// The part of a row that it would no longer take in one byte per element, scales counted in.
double quantised_saves(const RunContext& context, WireFormat now) {
  const auto bytes = [&](WireFormat wire) {
    return static_cast<double>(
        wire_row_bytes(wire, context.workload.shape.hidden, context.options.wire.block_columns));
  };
  return is_quantised(now) ? 0 : 1 - bytes(WireFormat::int8) / bytes(now);
}

/// Quantised rows, where they would save some of the bytes between nodes.
std::optional<std::string> quantised_words(const RunContext& context, const StrategyResult& best) {
  const double out = quantised_saves(context, wire_dispatch(context.options));
  const double back = quantised_saves(context, wire_combine(context.options));
  const double saved = out * static_cast<double>(best.counted.dispatch) +
                       back * static_cast<double>(best.counted.combine);
  const auto all = static_cast<double>(bytes_between_nodes(best));
  if (saved <= (kEqual - 1) * all) return std::nullopt;
  const bool both_ways = out > 0 && back > 0;
  return fmt::format(
      "--wire {}fp8 or int8: the link is the limit, and {} would be {:.0f} % fewer bytes between "
      "nodes; fp8 changes a value by at most 1/16 of itself or 1/458752 of the largest of its {} "
      "columns, int8 by 1/254 of that",
      both_ways ? ""
      : out > 0 ? "dispatch="
                : "combine=",
      both_ways ? "quantised rows both ways"
      : out > 0 ? "quantised rows out"
                : "quantised sums back",
      100 * saved / all, context.options.wire.block_columns);
}

double plan_share(const StrategyResult& result) {
  return result.plan_us.median / result.total_us();
}

}  // namespace

const StrategyResult& best_of(const std::vector<StrategyResult>& results) {
  return *std::min_element(
      results.begin(), results.end(),
      [](const StrategyResult& a, const StrategyResult& b) { return a.total_us() < b.total_us(); });
}

std::string why_best(const RunContext& context, const std::vector<StrategyResult>& results) {
  const StrategyResult& best = best_of(results);
  const std::string_view name = to_string(best.strategy);
  if (context.workload.topology.num_nodes() == 1) {
    return fmt::format(
        "{} has the smallest total, but on one node nothing crosses a link and all "
        "strategies make the same copies",
        name);
  }
  const StrategyResult& rival = rival_of(best, results);
  if (&rival == &best) {
    return fmt::format("only {} ran; {}", name, link_words(context, best));
  }
  const double faster = rival.total_us() / best.total_us();
  const std::string_view rival_name = to_string(rival.strategy);
  if (faster < kEqual) {
    return fmt::format("{} and {} are within 5 %: {}; {}", name, rival_name,
                       bytes_words(best, rival), link_words(context, best));
  }
  return fmt::format("{} is {:.2f} times as fast as {}, most of it in {}: {}; {}", name, faster,
                     rival_name, largest_gain(best, rival), bytes_words(best, rival),
                     link_words(context, best));
}

std::string what_next(const RunContext& context, const std::vector<StrategyResult>& results) {
  const StrategyResult& best = best_of(results);
  const BenchOptions& options = context.options;
  const int num_nodes = context.workload.topology.num_nodes();
  if (!context.settings.mpi.empty() && !options.baseline) {
    return "--baseline alltoallv, to see what packing by hand and MPI_Alltoallv cost here";
  }
  if (!context.settings.mpi.empty() && context.settings.link_bits_per_s == 0) {
    return num_nodes == 1
               ? "more machines, to see what crossing nodes costs"
               : "--repeat and --tokens as in your training, and the strategies one by one";
  }
  if (num_nodes == 1) {
    return "--nodes 2 --link-rate 1gbit, to see what crossing nodes costs";
  }
  if (context.settings.link_bits_per_s == 0) {
    return "--link-rate with the rate of your network (for example 25gbit), so that bytes between "
           "nodes cost what they will cost you";
  }
  if (plan_share(best) > kPlanIsLarge) {
    return fmt::format(
        "more --tokens, or replaying plans: planning is {:.0f} % "
        "of the total of {}",
        100 * plan_share(best), to_string(best.strategy));
  }
  const bool wide_out = element_bytes(wire_dispatch(options)) > 2;
  const bool wide_back = element_bytes(wire_combine(options)) > 2;
  if (link_share(best) >= kLinkIsLimit && (wide_out || wide_back)) {
    return fmt::format(
        "--wire bf16: {} cross as f32 and the link is the limit; bf16 halves those "
        "bytes, at one rounding",
        wide_out && wide_back ? "rows both ways"
        : wide_out            ? "rows out"
                              : "sums back");
  }
  if (link_share(best) < kLinkIsLimit) {
    return fmt::format(
        "more --tokens or a smaller --range-tokens (now {}): the fullest link was "
        "busy for only {:.0f} % of the time",
        context.settings.range_tokens, 100 * link_share(best));
  }
  if (auto words = quantised_words(context, best)) return *words;
  const auto sent = static_cast<double>(best.counted.dispatch);
  const auto bound = static_cast<double>(best.bound_bytes_dispatch);
  const std::string limit =
      fmt::format("the link is the limit and dispatch sends {:.2f} times the bound already",
                  bound > 0 ? sent / bound : 1.0);
  if (!context.settings.mpi.empty()) return fmt::format("a faster network: {}", limit);
  if (num_nodes == 2) {
    return fmt::format("a faster --link-rate, to see from which rate on copies count: {}", limit);
  }
  return fmt::format("fewer, larger nodes (--nodes {} --ranks-per-node {}): {}",
                     (num_nodes + 1) / 2, 2 * options.ranks_per_node, limit);
}

}  // namespace ferry::bench
