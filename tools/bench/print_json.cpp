// Fields and their order are those of docs/metrics.md. Fields are added to a schema version, never
// renamed or removed.
#include <nlohmann/json.hpp>

#include "bench/print.hpp"
#include "common/text.hpp"

namespace ferry::bench {
namespace {

using Json = nlohmann::ordered_json;

Json spread(const Spread& values) {
  return {{"median", tools::rounded(values.median)},
          {"p10", tools::rounded(values.p10)},
          {"p90", tools::rounded(values.p90)}};
}

Json what_was_run(const RunContext& context, std::optional<Strategy> strategy) {
  const BenchOptions& options = context.options;
  const RunSettings& settings = context.settings;
  const Workload& workload = context.workload;
  std::vector<std::int64_t> tokens_per_rank;
  for (const support::RoutingData& rank : workload.routing) {
    tokens_per_rank.push_back(rank.num_tokens);
  }
  const std::optional<TraceSource>& trace = workload.trace;
  return {
      {"schema", "ferry.bench/1"},
      {"strategy", strategy ? Json(to_string(*strategy)) : Json()},
      {"transport", settings.transport},
      {"mpi", settings.mpi.empty() ? Json() : Json(settings.mpi)},
      {"one_clock", settings.one_clock},
      {"paced", settings.paced},
      {"link_bits_per_s", settings.link_bits_per_s > 0 ? Json(settings.link_bits_per_s) : Json()},
      {"burst_bytes", settings.burst_bytes},
      {"num_nodes", workload.topology.num_nodes()},
      {"num_ranks", workload.num_ranks()},
      {"num_tokens", workload.num_tokens()},
      {"tokens_per_rank", tokens_per_rank},
      {"hidden", workload.shape.hidden},
      {"num_topk", workload.num_topk},
      {"num_experts", workload.placement.num_experts()},
      {"dtype", to_string(workload.shape.dtype)},
      {"layout", to_string(options.layout)},
      {"weights", to_string(options.weights)},
      {"wire_dispatch", to_string(wire_dispatch(options))},
      {"wire_combine", to_string(wire_combine(options))},
      {"wire_combine_backward", to_string(wire_combine_backward(options))},
      {"wire_dispatch_backward", to_string(wire_dispatch_backward(options))},
      {"wire_block_columns", options.wire.block_columns},
      {"max_relative_error", options.wire.filled_in(options.dtype).max_relative_error},
      {"wire_sparse_ratio", options.wire.sparse_ratio},
      {"routing", workload.routing_name},
      {"trace", trace ? Json(trace->directory) : Json()},
      {"model", trace ? Json(trace->model) : Json()},
      {"domain", trace && !trace->domain.empty() ? Json(trace->domain) : Json()},
      {"layer", trace ? Json(trace->layer) : Json()},
      {"seed", options.seed},
      {"repeat", options.repeat},
      {"fragment_bytes", settings.fragment_bytes},
      {"range_tokens", settings.range_tokens}};
}

/// Times, memory and speed-ups; both baselines name their fields alike.
void add_baseline(Json& json, const StrategyResult& ours, const BaselineResult& baseline) {
  const std::string name(to_string(baseline.rows));
  json[name + "_counts_us"] = spread(baseline.counts_us);
  json[name + "_dispatch_us"] = spread(baseline.dispatch_us);
  json[name + "_combine_us"] = spread(baseline.combine_us);
  json[name + "_peak_bytes"] = baseline.peak_bytes;
  json["speedup_vs_" + name] = tools::ratio(baseline.speedup(ours));
  json["speedup_vs_" + name + "_in_two"] = tools::ratio(baseline.speedup_in_two(ours));
  json["speedup_vs_" + name + "_replay"] = tools::ratio(baseline.speedup_on_replay(ours));
}

/// Messages by the encoding of one of their lists.
Json messages(const std::array<std::uint64_t, kListEncodings.size()>& by_encoding) {
  Json json = Json::object();
  for (const ListEncoding encoding : kListEncodings) {
    const std::uint64_t count = by_encoding[static_cast<std::size_t>(encoding)];
    if (count > 0) json[std::string(to_string(encoding))] = count;
  }
  return json;
}

void add_indices(Json& json, const IndexRecord& indices) {
  json["index_bytes"] = indices.bytes;
  json["index_bytes_best"] = indices.best_bytes;
  json["index_bytes_entropy"] = tools::rounded(indices.entropy_bytes);
  json["index_regret"] = tools::ratio(static_cast<double>(indices.bytes) /
                                      static_cast<double>(indices.best_bytes));
  json["index_tokens"] = messages(indices.tokens);
  json["index_experts"] = messages(indices.experts);
}

void add_step(Json& json, const std::string& name, const StepResult& step) {
  json[name + "_us"] = spread(step.us);
  json[name + "_metadata_rounds"] = tools::ratio(step.metadata_rounds);
  json[name + "_host_stalls"] = tools::ratio(step.host_stalls);
  json[name + "_stall_us"] = tools::rounded(step.stall_us);
}

void add_backward(Json& json, const StrategyResult& result) {
  const BackwardResult& backward = *result.backward;
  const double forward_us = result.dispatch_us.median + result.combine_us.median;
  json["combine_backward_us"] = spread(backward.combine_backward_us);
  json["dispatch_backward_us"] = spread(backward.dispatch_backward_us);
  if (backward.combine_backward_weights_us) {
    json["combine_backward_weights_us"] = spread(*backward.combine_backward_weights_us);
  }
  if (backward.dispatch_backward_weights_us) {
    json["dispatch_backward_weights_us"] = spread(*backward.dispatch_backward_weights_us);
  }
  json["backward_vs_forward"] = tools::ratio(backward.rows_us() / forward_us);
  json["backward_weights_vs_forward"] = tools::ratio(backward.weights_us() / forward_us);
  json["inter_node_bytes_combine_backward"] = result.counted.combine_backward;
  json["inter_node_bytes_dispatch_backward"] = result.counted.dispatch_backward;
  json["inter_node_bytes_grad_weights"] = result.counted.grad_weights;
  add_step(json, "step", backward.step);
  if (!backward.step_no_reuse) return;
  add_step(json, "step_no_reuse", *backward.step_no_reuse);
  json["speedup_by_reuse"] =
      tools::ratio(backward.step_no_reuse->us.median / backward.step.us.median);
}

}  // namespace

std::string to_json(const RunContext& context, const StrategyResult& result,
                    const std::vector<BaselineResult>& baselines) {
  Json json = what_was_run(context, result.strategy);
  json["verified"] = true;
  json["plan_us"] = spread(result.plan_us);
  json["dispatch_us"] = spread(result.dispatch_us);
  json["combine_us"] = spread(result.combine_us);
  json["plan_and_dispatch_us"] = spread(result.plan_and_dispatch_us);
  json["memcpy_us"] = tools::rounded(result.memcpy_us.median);
  json["memcpy_us_p10"] = tools::rounded(result.memcpy_us.p10);
  json["memcpy_us_p90"] = tools::rounded(result.memcpy_us.p90);
  json["dispatch_vs_memcpy"] = tools::ratio(result.dispatch_vs_memcpy());
  json["combine_vs_memcpy"] = tools::ratio(result.combine_vs_memcpy());
  json["logical_bytes_dispatch"] = result.logical_bytes_dispatch;
  json["inter_node_rows_dispatch"] = result.inter_node_rows_dispatch;
  json["inter_node_rows_combine"] = result.inter_node_rows_combine;
  json["inter_node_bytes_dispatch"] = result.counted.dispatch;
  json["inter_node_bytes_combine"] = result.counted.combine;
  json["inter_node_bytes_bound"] = result.bound_bytes_dispatch;
  json["inter_node_bytes_bound_combine"] = result.bound_bytes_combine;
  json["metadata_bytes"] = result.counted.metadata;
  add_indices(json, result.indices);
  json["control_bytes"] = result.counted.control;
  json["metadata_rounds"] = result.metadata_rounds;
  json["window_bytes"] = result.window_bytes;
  json["pool_bytes"] = result.pool_bytes;
  json["peak_bytes"] = result.peak_bytes;
  if (result.rail_message_us) {
    json["rail_message_us"] = spread(*result.rail_message_us);
    json["vs_rail_message"] = tools::ratio(result.total_us() / result.rail_message_us->median);
    json["vs_rail_message_in_two"] =
        tools::ratio(result.total_in_two_us() / result.rail_message_us->median);
  }
  if (result.backward) add_backward(json, result);
  for (const BaselineResult& baseline : baselines) add_baseline(json, result, baseline);
  if (context.settings.link_bits_per_s > 0) {
    json["link_utilisation"] = tools::ratio(result.link_utilisation());
    json["link_utilisation_dispatch"] = tools::ratio(result.link_utilisation_dispatch);
    json["link_utilisation_combine"] = tools::ratio(result.link_utilisation_combine);
  }
  return tools::line_of(json);
}

std::string to_json_failed(const RunContext& context, std::optional<Strategy> strategy,
                           const std::string& text) {
  Json json = what_was_run(context, strategy);
  json["verified"] = false;
  json["error"] = text;
  return tools::line_of(json);
}

}  // namespace ferry::bench
