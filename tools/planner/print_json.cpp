// Fields and their order are those of docs/metrics.md. Fields are added to a schema version, never
// renamed or removed.
#include <nlohmann/json.hpp>

#include "common/text.hpp"
#include "planner/print.hpp"
#include "planner/published.hpp"

namespace ferry::planner {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const Model& model) {
  return {{"name", model.name},
          {"hidden", model.hidden},
          {"num_experts", model.num_experts},
          {"num_topk", model.num_topk},
          {"num_groups", model.num_groups},
          {"groups_per_token", model.groups_per_token},
          {"dtype", to_string(model.dtype)},
          {"source", model.source}};
}

Json json_of(const Cluster& cluster) {
  return {{"name", cluster.name},
          {"ranks_per_node", cluster.ranks_per_node},
          {"link_gb_per_s", cluster.link_gb_per_s},
          {"link_per", to_string(cluster.link_per)},
          {"intra_node_gb_per_s", cluster.intra_node_gb_per_s},
          {"source", cluster.source}};
}

Json json_of(const Flow& flow) {
  return {{"rows", flow.rows},
          {"bytes", flow.bytes},
          {"mean_bytes", tools::rounded(flow.mean_bytes)},
          {"worst_bytes", flow.worst_bytes},
          {"worst_rank", flow.worst_rank},
          {"bound_us", tools::rounded(flow.bound_us)}};
}

Json json_of(const Scenario& scenario, const StrategyEstimate& estimate, Call which) {
  const CallEstimate& call = call_of(estimate, which);
  const double logical = logical_gb_per_s(scenario, estimate, which, call.bound_us());
  return {{"bound_us", tools::rounded(call.bound_us())},
          {"limited_by", call.limited_inside() ? "intra_node" : "inter_node"},
          {"logical_gb_per_s", tools::ratio(logical)},
          {"inter_node", json_of(call.inter_node)},
          {"intra_node", json_of(call.intra_node)}};
}

Json json_of(const Scenario& scenario, const StrategyEstimate& estimate, const Published& one) {
  const auto bound = [&](Call call, Inside inside) {
    return tools::ratio(bound_like(scenario, estimate, one, call, inside));
  };
  return {{"what", one.what},
          {"tokens_per_rank", one.tokens_per_rank},
          {"unit", to_string(one.unit)},
          {"dispatch", one.dispatch},
          {"combine", one.combine},
          {"dispatch_element_bytes", one.dispatch_element_bytes},
          {"combine_element_bytes", one.combine_element_bytes},
          {"bound_dispatch", bound(Call::dispatch, Inside::expert_major)},
          {"bound_combine", bound(Call::combine, Inside::expert_major)},
          {"bound_dispatch_token_major", bound(Call::dispatch, Inside::token_major)},
          {"bound_combine_token_major", bound(Call::combine, Inside::token_major)},
          {"source", one.source}};
}

}  // namespace

std::string to_json(const PlanReport& report, const StrategyEstimate& estimate) {
  const Scenario& scenario = report.scenario;
  const PlanOptions& options = report.options;
  const bool traced = !options.trace_directory.empty();
  Json tokens_per_rank = Json::array();
  for (const support::RoutingData& rank : scenario.routing) {
    tokens_per_rank.push_back(rank.num_tokens);
  }
  Json json = {{"schema", "ferry.plan/1"},
               {"strategy", to_string(estimate.strategy)},
               {"is_bound", true},
               {"model", json_of(scenario.model)},
               {"cluster", json_of(scenario.cluster)},
               {"num_nodes", scenario.topology.num_nodes()},
               {"num_ranks", scenario.num_ranks()},
               {"num_tokens", scenario.num_tokens()},
               {"tokens_per_rank", tokens_per_rank},
               {"routing", scenario.routing_name},
               {"trace", traced ? Json(options.trace_directory) : Json()},
               {"layer", traced ? Json(options.layer) : Json()},
               {"seed", options.seed},
               {"wire_dispatch", to_string(scenario.wire_dispatch)},
               {"wire_combine", to_string(scenario.wire_combine)},
               {"wire_combine_backward", to_string(scenario.wire_combine_backward)},
               {"wire_dispatch_backward", to_string(scenario.wire_dispatch_backward)},
               {"wire_block_columns", scenario.wire_block_columns},
               {"fragment_bytes", kFragmentBytes},
               {"range_tokens", report.range_tokens}};
  json["dispatch"] = json_of(scenario, estimate, Call::dispatch);
  json["combine"] = json_of(scenario, estimate, Call::combine);
  json["intra_node_token_major"] = json_of(estimate.intra_node_token_major);
  json["published"] = Json::array();
  if (estimate.strategy == Strategy::node_dedup) {
    for (const Published& one : published_for(scenario)) {
      json["published"].push_back(json_of(scenario, estimate, one));
    }
  }
  return tools::line_of(json);
}

}  // namespace ferry::planner
