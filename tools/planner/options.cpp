// Every refusal says which flag, which value, what is allowed and what to do.
#include "planner/options.hpp"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "common/failures.hpp"
#include "common/trace_routing.hpp"

namespace ferry::planner {

void add_plan_flags(CLI::App& command, PlanFlags& flags) {
  const auto add = [&command](const char* group, const char* name, auto& value, const char* help) {
    return command.add_option(name, value, help)->group(group);
  };
  constexpr const char* kWhat = "What is exchanged";
  add(kWhat, "--model", flags.model,
      "deepseek-v3, deepseek-v2-lite, qwen3-235b, mixtral-8x7b or gpt-oss-20b")
      ->type_name("NAME");
  add(kWhat, "--trace", flags.trace_directory,
      "routing trace of a real model: topk_idx.npy, meta.json; default: routing generated as the\n"
      "model routes")
      ->type_name("DIR");
  add(kWhat, "--layer", flags.layer, "layer of the trace")->capture_default_str();
  add(kWhat, "--routing", flags.routing,
      "instead of the model's routing: uniform, zipf:S, khot:K or group:G,M, as in ferry bench")
      ->type_name("PATTERN");
  add(kWhat, "--tokens", flags.tokens,
      "tokens per rank, or a comma list with one count per rank; default 4096, or the whole trace")
      ->type_name("T");
  add(kWhat, "--seed", flags.seed, "of generated routing")->capture_default_str();

  constexpr const char* kWhere = "Where";
  add(kWhere, "--cluster", flags.cluster,
      "h800, h100, a100, ascend-910b, or a JSON file with the same fields; docs/metrics.md")
      ->type_name("NAME|FILE");
  add(kWhere, "--nodes", flags.num_nodes, "nodes (ranks of a node share memory)")
      ->capture_default_str();
  add(kWhere, "--ranks-per-node", flags.ranks_per_node,
      "ranks of each node; default: the cluster's");
  add(kWhere, "--wire", flags.wire, tools::kWireHelp)->type_name("NAME");
  command.add_flag("--json", flags.json, "one JSON object per line and strategy; docs/metrics.md")
      ->group("How it is told");
}

PlanOptions parse_plan_flags(const PlanFlags& flags) {
  if (flags.model.empty() && flags.trace_directory.empty()) {
    throw tools::UsageError(
        "--model is missing; fix: name a model, for example --model "
        "deepseek-v3, or give --trace DIR");
  }
  if (flags.cluster.empty()) {
    throw tools::UsageError(
        "--cluster is missing; fix: name a cluster, for example --cluster h800, "
        "or give a JSON file");
  }
  if (!flags.trace_directory.empty() && !flags.routing.empty()) {
    throw tools::UsageError("--trace decides the routing; fix: leave out --routing");
  }
  tools::check_layer(flags.trace_directory, flags.layer);
  PlanOptions options;
  options.cluster = cluster_of(flags.cluster);
  options.model = flags.model;
  options.num_nodes = flags.num_nodes;
  options.ranks_per_node = flags.ranks_per_node.value_or(options.cluster.ranks_per_node);
  tools::check_ranks(options.num_nodes, options.ranks_per_node);
  options.tokens = tools::parse_tokens(flags.tokens, options.num_ranks());
  options.trace_directory = flags.trace_directory;
  options.layer = flags.layer;
  if (!flags.routing.empty()) options.pattern = tools::parse_routing(flags.routing);
  options.wire = tools::parse_wire(flags.wire);
  options.wire.link_bytes_per_s_per_rank =
      options.cluster.link_gb_per_s * 1e9 /
      (options.cluster.link_per == LinkPer::node ? options.ranks_per_node : 1);
  options.seed = flags.seed;
  return options;
}

}  // namespace ferry::planner
