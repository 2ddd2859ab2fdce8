// From flags to a printed plan.
#include "planner/command.hpp"

#include <cstdio>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "plan/strategies.hpp"
#include "planner/estimate.hpp"
#include "planner/print.hpp"
#include "planner/scenario.hpp"

namespace ferry::planner {

CLI::App& add_command(CLI::App& app, PlanFlags& flags) {
  CLI::App* command = app.add_subcommand(
      "plan", "Bound the time of every strategy on a cluster, from the plans of all its ranks");
  add_plan_flags(*command, flags);
  command->footer(
      "Examples:\n"
      "  ferry plan --model deepseek-v3 --cluster h800 --nodes 8\n"
      "  ferry plan --model gpt-oss-20b --cluster a100 --trace traces/gpt_oss_20b/law --layer 3\n"
      "  ferry plan --model qwen3-235b --cluster my_cluster.json --nodes 4 --json\n\n"
      "Exit codes: 0 ok; 2 usage; 4 environment (unreadable trace or cluster file, too little\n"
      "memory). docs/metrics.md defines every figure and the fields of a cluster file.");
  return *command;
}

void run_command(const PlanFlags& flags) {
  const PlanOptions options = parse_plan_flags(flags);
  const Scenario scenario = make_scenario(options);
  const Estimator estimator(scenario);
  PlanReport report{options, scenario, estimator.range_tokens(), {}};
  for (const plan::StrategyInfo& strategy : plan::strategies()) {
    report.estimates.push_back(estimator.estimate(strategy.id));
  }
  if (!flags.json) {
    fmt::print("{}", to_table(report));
    return;
  }
  for (const std::string& note : scenario.notes) fmt::print(stderr, "ferry: note: {}\n", note);
  for (const StrategyEstimate& estimate : report.estimates) {
    fmt::print("{}\n", to_json(report, estimate));
  }
}

}  // namespace ferry::planner
