// The table says that it shows a bound, and of what, before any figure.
#include <utility>

#include <fmt/format.h>

#include "common/text.hpp"
#include "planner/print.hpp"
#include "planner/published.hpp"

namespace ferry::planner {
namespace {

std::string heading(const PlanReport& report) {
  const Scenario& scenario = report.scenario;
  const Model& model = scenario.model;
  const Cluster& cluster = scenario.cluster;
  const std::string routing =
      report.options.trace_directory.empty()
          ? fmt::format("{}, seed {}", scenario.routing_name, report.options.seed)
          : fmt::format("{}, layer {}", report.options.trace_directory, report.options.layer);
  std::string text = fmt::format(
      "{}: top-{} of {} experts, hidden {} {}; between nodes {} out, {} back\n"
      "{}: {}, {}; {:g} GB/s per {} between nodes, {:g} GB/s per rank inside\n"
      "{}; routing: {}\n",
      model.name, model.num_topk, model.num_experts, model.hidden, to_string(model.dtype),
      to_string(scenario.wire_dispatch), to_string(scenario.wire_combine), cluster.name,
      tools::counted(scenario.topology.num_nodes(), "node"),
      tools::counted(scenario.num_ranks(), "rank"), cluster.link_gb_per_s,
      to_string(cluster.link_per), cluster.intra_node_gb_per_s,
      tools::counted(scenario.num_tokens(), "token"), routing);
  for (const std::string& note : scenario.notes) text += fmt::format("note: {}\n", note);
  return text +
         "times are a BOUND from bandwidth alone: the fullest link at its full rate, no latency, "
         "no\n"
         "contention, no kernels, no planning; nothing was measured\n\n";
}

std::string bytes_of(const Flow& flow) {
  return fmt::format("{:.1f} / {:.1f}", flow.mean_bytes / 1e6,
                     static_cast<double>(flow.worst_bytes) / 1e6);
}

std::string bound_of(const CallEstimate& call) {
  if (call.bound_us() == 0) return "0 us";
  return fmt::format("{} {}", tools::duration(call.bound_us()),
                     call.limited_inside() ? "inside" : "link");
}

constexpr const char* kRow = "{:<12} {:>13} {:>17} {:>17} {:>17} {:>15} {:>15}\n";

std::string row_of(const Scenario& scenario, const StrategyEstimate& estimate) {
  const auto tokens = static_cast<double>(scenario.num_tokens());
  const auto per_token = [&](const Flow& flow) {
    return tokens > 0 ? fmt::format("{:.3f}", static_cast<double>(flow.rows) / tokens) : "-";
  };
  return fmt::format(kRow, to_string(estimate.strategy),
                     fmt::format("{} / {}", per_token(estimate.dispatch.inter_node),
                                 per_token(estimate.combine.inter_node)),
                     bytes_of(estimate.dispatch.inter_node), bytes_of(estimate.combine.inter_node),
                     bytes_of(estimate.dispatch.intra_node), bound_of(estimate.dispatch),
                     bound_of(estimate.combine));
}

constexpr const char* kFigures = "{:<42} {:>9} {:>9} {:>14} {:>14}\n";

std::string value_of(const Published& one, double figure) {
  return one.unit == Unit::us ? tools::duration(figure) : fmt::format("{:.1f} GB/s", figure);
}

std::string figure_of(const Scenario& scenario, const StrategyEstimate& estimate,
                      const Published& one) {
  const auto bounds = [&](Inside inside) {
    const double out = bound_like(scenario, estimate, one, Call::dispatch, inside);
    const double back = bound_like(scenario, estimate, one, Call::combine, inside);
    return std::pair(value_of(one, out), value_of(one, back));
  };
  const auto [out, back] = bounds(Inside::expert_major);
  const auto [out_once, back_once] = bounds(Inside::token_major);
  return fmt::format(kFigures, one.what, "dispatch", value_of(one, one.dispatch), out, out_once) +
         fmt::format(kFigures, fmt::format("  {} tokens per rank", one.tokens_per_rank), "combine",
                     value_of(one, one.combine), back, back_once) +
         fmt::format("  {}\n", one.source);
}

std::string published_block(const PlanReport& report) {
  const std::vector<Published> published = published_for(report.scenario);
  std::string figures;
  for (const StrategyEstimate& estimate : report.estimates) {
    if (estimate.strategy != Strategy::node_dedup) continue;
    for (const Published& one : published) figures += figure_of(report.scenario, estimate, one);
  }
  if (figures.empty()) return "";
  std::string text = "\n";
  text += fmt::format(kFigures, "published, beside bounds of node_dedup", "", "published",
                      "per expert", "per rank");
  text += figures;
  return text +
         "GB/s per rank are logical: rows that stay on their home node count, too. Bounds in the "
         "published\nformats; a row goes inside a node once per expert, as above, or once per "
         "rank, "
         "as DeepEP sends it\n";
}

}  // namespace

std::string to_table(const PlanReport& report) {
  std::string text = heading(report);
  text += fmt::format(kRow, "strategy", "rows/token", "MB out", "MB back", "MB inside", "dispatch",
                      "combine");
  text += fmt::format(kRow, "", "out / back", "mean / worst", "mean / worst", "mean / worst",
                      "at least", "at least");
  for (const StrategyEstimate& estimate : report.estimates) {
    text += row_of(report.scenario, estimate);
  }
  text +=
      "\nrows/token, MB out and back: what crosses between nodes; MB inside: rows that dispatch "
      "writes to\nother ranks of the node, and combine reads back. MB per rank: the mean, and the "
      "most that one rank\nsends or receives. Behind each time: the link that sets it\n";
  text += published_block(report);
  return text + fmt::format("\nsources: {}: {}\n         {}: {}\n", report.scenario.model.name,
                            report.scenario.model.source, report.scenario.cluster.name,
                            report.scenario.cluster.source);
}

}  // namespace ferry::planner
