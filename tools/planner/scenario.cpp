// From options to the routing of every rank. Experts are placed in blocks.
#include "planner/scenario.hpp"

#include <fmt/format.h>

#include "common/failures.hpp"
#include "common/memory_check.hpp"
#include "common/trace_routing.hpp"

namespace ferry::planner {
namespace {

constexpr std::int64_t kDefaultTokens = 4096;
/// Per (token, slot): id and weight, the entry in a membership, and its share of one rank's plan.
constexpr std::uint64_t kBytesPerSlot = 40;

void check_fits(const Model& model, const tools::TraceInfo& info, const std::string& directory) {
  const auto check = [&](const char* what, std::int64_t of_trace, std::int64_t of_model) {
    if (of_trace == of_model) return;
    throw tools::UsageError(
        fmt::format("--trace {}: {} = {}, but --model {} has {}; fix: leave out --model, or name "
                    "the model that "
                    "the trace is of",
                    directory, what, of_trace, model.name, of_model));
  };
  check("num_experts", info.num_experts, model.num_experts);
  check("num_topk", info.num_topk, model.num_topk);
  if (info.hidden != 0) check("hidden", info.hidden, model.hidden);
}

Model model_of_trace(const tools::TraceInfo& info, const std::string& directory) {
  if (info.hidden == 0) {
    throw tools::UsageError(
        fmt::format("--trace {}: its meta.json names no hidden size; fix: add "
                    "hidden to it, or name the model with --model",
                    directory));
  }
  Model model;
  model.name = info.model;
  model.hidden = info.hidden;
  model.num_experts = info.num_experts;
  model.num_topk = info.num_topk;
  model.source = directory;
  return model;
}

void take_trace(const PlanOptions& options, const tools::Trace& trace, Scenario& scenario) {
  tools::TraceRouting shared = tools::share_out(
      trace, options.layer, tools::tokens_per_rank(options.tokens, options.num_ranks(), -1));
  scenario.routing = std::move(shared.ranks);
  scenario.notes = std::move(shared.notes);
  scenario.routing_name = "trace";
}

void generate(const PlanOptions& options, Scenario& scenario) {
  const Model& model = scenario.model;
  const tools::RoutingPattern pattern = options.pattern.value_or(model.routing());
  tools::check_pattern(pattern, model.shape());
  const std::vector<std::int64_t> tokens =
      tools::tokens_per_rank(options.tokens, options.num_ranks(), kDefaultTokens);
  std::uint64_t slots = 0;
  for (const std::int64_t count : tokens) {
    slots += static_cast<std::uint64_t>(count) * static_cast<std::uint64_t>(model.num_topk);
  }
  tools::check_memory(slots * kBytesPerSlot, "fewer --tokens or fewer ranks");
  scenario.routing = tools::generate_routing(pattern, model.shape(), tokens, options.seed);
  scenario.routing_name = tools::to_string(pattern);
  scenario.as_model_routes = pattern == model.routing();
}

/// Rows whose size depends on their values, which a plan does not see.
void note_varying_rows(const tools::WireFormats& wires, std::vector<std::string>& notes) {
  const auto either = [&](bool (*is)(WireFormat)) {
    return is(*wires.dispatch) || is(*wires.combine);
  };
  if (either([](WireFormat wire) { return is_sparse(wire); })) {
    notes.emplace_back(
        "sparse rows are priced at the most that they may take, as dense rows: fewer bytes may "
        "cross, in less time than the bound says");
  }
  if (wires.max_relative_error > 0 && either([](WireFormat wire) { return is_quantised(wire); })) {
    notes.push_back(
        fmt::format("quantised rows are priced at the least that they may take: those that are off "
                    "by more than {:g} cross in 16 bits",
                    wires.max_relative_error));
  }
}

}  // namespace

std::int64_t Scenario::num_tokens() const {
  std::int64_t sum = 0;
  for (const support::RoutingData& rank : routing) sum += rank.num_tokens;
  return sum;
}

Scenario make_scenario(const PlanOptions& options) {
  std::optional<tools::Trace> trace;
  if (!options.trace_directory.empty()) trace = tools::Trace::load(options.trace_directory);
  const Model model = options.model.empty() ? model_of_trace(trace->info(), options.trace_directory)
                                            : model_of(options.model);
  if (trace) check_fits(model, trace->info(), options.trace_directory);
  const tools::WireFormats wires = options.wire.filled_in(model.dtype);
  Scenario scenario{.model = model,
                    .cluster = options.cluster,
                    .topology = Topology::uniform(options.num_nodes, options.ranks_per_node),
                    .placement = Placement::contiguous(model.num_experts, options.num_ranks()),
                    .wire_dispatch = *wires.dispatch,
                    .wire_combine = *wires.combine,
                    .wire_combine_backward = *wires.combine_backward,
                    .wire_dispatch_backward = *wires.dispatch_backward,
                    .wire_block_columns = wires.block_columns,
                    .routing = {},
                    .routing_name = {},
                    .notes = {}};
  if (trace) {
    take_trace(options, *trace, scenario);
  } else {
    generate(options, scenario);
  }
  note_varying_rows(wires, scenario.notes);
  return scenario;
}

}  // namespace ferry::planner
