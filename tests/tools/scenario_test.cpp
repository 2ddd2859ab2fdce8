// What is planned: models, traces, and which of them go together.

#include "planner/scenario.hpp"

#include <gtest/gtest.h>

#include "common/failures.hpp"
#include "tools/trace_files.hpp"

namespace ferry::planner {
namespace {

PlanFlags flags_of(const std::string& model) {
  PlanFlags flags;
  flags.model = model;
  flags.cluster = "a100";
  flags.tokens = std::string("8");
  return flags;
}

std::string refusal(const PlanFlags& flags) {
  try {
    make_scenario(parse_plan_flags(flags));
  } catch (const tools::UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Scenario, TakesTheClustersRanksAndTheModelsRouting) {
  for (const Model& model : models()) {
    const Scenario scenario = make_scenario(parse_plan_flags(flags_of(model.name)));
    EXPECT_EQ(scenario.num_ranks(), 16);
    EXPECT_EQ(scenario.num_tokens(), 16 * 8);
    EXPECT_EQ(scenario.wire_dispatch, WireFormat::bf16);
    EXPECT_TRUE(scenario.as_model_routes);
    EXPECT_EQ(scenario.routing_name, model.name == "deepseek-v3" ? "group:8,4" : "uniform");
    EXPECT_EQ(scenario.routing.front().num_topk, model.num_topk);
    EXPECT_NE(model.source.find("config.json"), std::string::npos);
  }
}

TEST(Scenario, ATraceSaysWhatIsRouted) {
  const tools::TemporaryDirectory directory;
  tools::write_small_trace(directory);
  PlanFlags flags = flags_of("");
  flags.tokens = "";
  flags.trace_directory = directory.path().string();
  flags.ranks_per_node = 1;
  flags.layer = 1;
  const Scenario scenario = make_scenario(parse_plan_flags(flags));
  EXPECT_EQ(scenario.model.name, "tiny");
  EXPECT_EQ(scenario.model.hidden, 16);
  EXPECT_EQ(scenario.num_tokens(), 6);
  EXPECT_EQ(scenario.routing_name, "trace");
  EXPECT_FALSE(scenario.as_model_routes);
  EXPECT_EQ(scenario.notes.size(), 1U);

  flags.model = "mixtral-8x7b";
  EXPECT_NE(refusal(flags).find("num_experts = 4, but --model mixtral-8x7b has 8"),
            std::string::npos);
  flags.model = "";
  flags.layer = 2;
  EXPECT_NE(refusal(flags).find("has the layers 0..1"), std::string::npos);
  flags.layer = 0;
  flags.routing = "uniform";
  EXPECT_NE(refusal(flags).find("--trace decides the routing"), std::string::npos);
  flags.routing = "";
  directory.write("meta.json", R"({"num_experts": 4, "sequence_lengths": [6]})");
  EXPECT_NE(refusal(flags).find("names no hidden size"), std::string::npos);
}

TEST(Scenario, RefusalsNameFlagValueAndWhatIsAllowed) {
  PlanFlags flags = flags_of("gpt-4");
  EXPECT_NE(refusal(flags).find("--model gpt-4: no such model; allowed: deepseek-v3, deep"),
            std::string::npos);
  flags = flags_of("");
  EXPECT_NE(refusal(flags).find("--model is missing"), std::string::npos);
  flags = flags_of("mixtral-8x7b");
  flags.cluster = "";
  EXPECT_NE(refusal(flags).find("--cluster is missing"), std::string::npos);
  flags = flags_of("mixtral-8x7b");
  flags.layer = 1;
  EXPECT_NE(refusal(flags).find("only a trace has layers"), std::string::npos);
  flags = flags_of("mixtral-8x7b");
  flags.num_nodes = 200;
  EXPECT_NE(refusal(flags).find("--nodes times --ranks-per-node 1600: allowed: 1..1024"),
            std::string::npos);
  flags = flags_of("mixtral-8x7b");
  flags.routing = "khot:9";
  EXPECT_NE(refusal(flags).find("9 hot experts of 8"), std::string::npos);
  flags = flags_of("mixtral-8x7b");
  flags.wire = "f8";
  EXPECT_NE(refusal(flags).find("--wire f8: no such format"), std::string::npos);
}

}  // namespace
}  // namespace ferry::planner
