// ferry plan from the outside: its table, its JSON, its exit codes, and its bytes against those
// that ferry bench counts.

#include <gtest/gtest.h>

#include "tools/run_ferry.hpp"
#include "tools/trace_files.hpp"

namespace ferry::tools {
namespace {

using Json = nlohmann::json;

TEST(PlanCommand, TheTableCallsItselfABoundAndNamesItsSources) {
  const Outcome outcome = ferry("plan --model deepseek-v3 --cluster h800 --nodes 2 --tokens 256");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* text :
       {"BOUND", "flat ", "rank_dedup ", "node_gather ", "node_dedup ", "rows/token",
        "h800: 2 nodes, 16 ranks; 50 GB/s per rank between nodes", "routing: group:8,4",
        "DeepEP V1, FP8 out, BF16 back", "43.0 GB/s", "sources: deepseek-v3: https://",
        "h800: https://", " inside", " link"}) {
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text << "\n" << outcome.out;
  }
  EXPECT_EQ(outcome.err, "");
  const Outcome other = ferry("plan --model qwen3-235b --cluster a100 --tokens 64 --wire f32");
  EXPECT_EQ(other.code, 0);
  EXPECT_EQ(other.out.find("published"), std::string::npos) << other.out;
  EXPECT_NE(other.out.find("f32 out, f32 back"), std::string::npos) << other.out;
}

TEST(PlanCommand, JsonHasOneObjectPerStrategy) {
  const Outcome outcome =
      ferry("plan --model deepseek-v3 --cluster h100 --nodes 2 --tokens 128 --seed 3 --json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<Json> objects = json_lines(outcome.out);
  ASSERT_EQ(objects.size(), 4U);
  for (const Json& object : objects) {
    EXPECT_EQ(object.at("schema"), "ferry.plan/1");
    EXPECT_EQ(object.at("is_bound"), true);
    EXPECT_EQ(object.at("model").at("num_groups"), 8);
    EXPECT_EQ(object.at("cluster").at("link_per"), "rank");
    EXPECT_EQ(object.at("num_ranks"), 16);
    EXPECT_EQ(object.at("num_tokens"), 16 * 128);
    EXPECT_EQ(object.at("routing"), "group:8,4");
    EXPECT_EQ(object.at("seed"), 3);
    EXPECT_TRUE(object.at("trace").is_null());
    for (const char* call : {"dispatch", "combine"}) {
      const Json& inter = object.at(call).at("inter_node");
      const Json& intra = object.at(call).at("intra_node");
      EXPECT_GE(inter.at("worst_bytes"), inter.at("mean_bytes"));
      EXPECT_EQ(object.at(call).at("bound_us"),
                std::max(inter.at("bound_us").get<double>(), intra.at("bound_us").get<double>()));
      EXPECT_GT(object.at(call).at("logical_gb_per_s"), 0);
    }
    EXPECT_LE(object.at("intra_node_token_major").at("rows"),
              object.at("dispatch").at("intra_node").at("rows"));
    const bool is_deep_ep = object.at("strategy") == "node_dedup";
    ASSERT_EQ(object.at("published").size(), is_deep_ep ? 1U : 0U);
    if (!is_deep_ep) continue;
    EXPECT_EQ(object.at("published").at(0).at("dispatch"), 90);
    EXPECT_EQ(object.at("published").at(0).at("unit"), "logical_gb_per_s");
  }
  EXPECT_EQ(outcome.out, ferry("plan --model deepseek-v3 --cluster h100 --tokens 128 --seed 3 "
                               "--json --routing group:8,4 --ranks-per-node 8")
                             .out);
}

/// Rows and bytes between nodes by strategy must be those of the bench's line for the same flags.
void expect_same_bytes(const std::string& plan, const std::string& bench) {
  const Outcome planned = ferry("plan --json " + plan);
  const Outcome measured = ferry("bench --json --repeat 1 " + bench);
  ASSERT_EQ(planned.code, 0) << planned.err;
  ASSERT_EQ(measured.code, 0) << measured.err;
  const std::vector<Json> plans = json_lines(planned.out);
  const std::vector<Json> benches = json_lines(measured.out);
  ASSERT_EQ(plans.size(), benches.size());
  for (std::size_t at = 0; at < plans.size(); ++at) {
    const Json& ours = plans[at];
    const Json& theirs = benches[at];
    SCOPED_TRACE(ours.at("strategy").get<std::string>());
    EXPECT_EQ(ours.at("strategy"), theirs.at("strategy"));
    EXPECT_EQ(ours.at("fragment_bytes"), theirs.at("fragment_bytes"));
    EXPECT_EQ(ours.at("range_tokens"), theirs.at("range_tokens"));
    for (const std::string call : {"dispatch", "combine"}) {
      const Json& flow = ours.at(call).at("inter_node");
      EXPECT_EQ(flow.at("rows"), theirs.at("inter_node_rows_" + call));
      EXPECT_EQ(flow.at("bytes"), theirs.at("inter_node_bytes_" + call));
    }
  }
}

TEST(PlanCommand, PlansTheBytesThatABenchCounts) {
  const std::string same = "--nodes 3 --ranks-per-node 2 --tokens 90,0,64,5,70,33 --seed 5 ";
  const std::string wire = "--wire bf16,combine=f32 ";
  for (const std::string routing : {"uniform", "khot:3", "group:4,2"}) {
    SCOPED_TRACE(routing);
    const std::string flags = same + wire + "--routing " + routing;
    expect_same_bytes("--model gpt-oss-20b --cluster h800 " + flags,
                      "--experts 32 --topk 4 --hidden 2880 " + flags);
  }
  const std::string quantised = same + "--wire fp8,combine=int8,block=64 --routing uniform";
  expect_same_bytes("--model gpt-oss-20b --cluster h800 " + quantised,
                    "--experts 32 --topk 4 --hidden 2880 " + quantised);
  const TemporaryDirectory directory;
  write_small_trace(directory);
  const std::string trace =
      "--nodes 2 --ranks-per-node 1 --layer 1 --trace '" + directory.path().string() + "'";
  expect_same_bytes("--cluster h800 " + trace, trace);
}

TEST(PlanCommand, JsonHasTheFormatsOfAllCalls) {
  const std::string plan = "plan --model deepseek-v3 --cluster h800 --nodes 2 --tokens 8 --json ";
  const auto first_of = [&](const std::string& wire) {
    return json_lines(ferry(plan + wire).out).at(0);
  };
  const Json unset = first_of("--wire fp8");
  EXPECT_EQ(unset.at("wire_combine_backward"), "bf16");
  EXPECT_EQ(unset.at("wire_dispatch_backward"), "bf16");
  EXPECT_EQ(unset.at("wire_block_columns"), 128);
  const Json chosen = first_of("--wire fp8,combine_backward=f32,dispatch_backward=int8,block=64");
  EXPECT_EQ(chosen.at("wire_dispatch"), "fp8_e4m3fn");
  EXPECT_EQ(chosen.at("wire_combine"), "fp8_e4m3fn");
  EXPECT_EQ(chosen.at("wire_combine_backward"), "f32");
  EXPECT_EQ(chosen.at("wire_dispatch_backward"), "int8");
  EXPECT_EQ(chosen.at("wire_block_columns"), 64);
  // Longer rows forward make shorter ranges, those of gradients do not.
  EXPECT_EQ(chosen.at("range_tokens"), unset.at("range_tokens"));
  EXPECT_LT(first_of("--wire fp8,combine=f32").at("range_tokens"), unset.at("range_tokens"));
}

TEST(PlanCommand, SaysWhereSizesOfRowsAreNotKnown) {
  const std::string plan = "plan --model mixtral-8x7b --cluster h800 --nodes 2 --tokens 8 --wire ";
  const std::string most = "priced at the most that they may take";
  const std::string least = "priced at the least that they may take: those that are off by more";
  EXPECT_NE(ferry(plan + "sparse_bf16,ratio=0.05").out.find("note: sparse rows are " + most),
            std::string::npos);
  EXPECT_NE(ferry(plan + "combine=int8,error=0.02").out.find("note: quantised rows are " + least),
            std::string::npos);
  EXPECT_NE(ferry(plan + "int8,error=0.02 --json").err.find(least + " than 0.02"),
            std::string::npos);
  EXPECT_EQ(ferry(plan + "int8,combine_backward=sparse_f16").out.find("priced"), std::string::npos);
}

// Links of 50 GB/s for each rank, or of a node's 32 ranks.
TEST(PlanCommand, AutomaticFormatsFollowFromTheCluster) {
  const auto wire_of = [](const std::string& flags) {
    return json_lines(ferry("plan --model mixtral-8x7b --nodes 2 --tokens 8 --json --wire "
                            "auto,error=0.02 --cluster " +
                            flags)
                          .out)
        .at(0)
        .at("wire_dispatch");
  };
  EXPECT_EQ(wire_of("h800"), "bf16");
  const TemporaryDirectory directory;
  const std::filesystem::path file = directory.path() / "slow.json";
  std::ofstream(file) << R"({"name": "slow", "ranks_per_node": 8, "link_gb_per_s": 12.5,)"
                      << R"("link_per": "node", "intra_node_gb_per_s": 100})";
  EXPECT_EQ(wire_of("'" + file.string() + "'"), "int8");
}

TEST(PlanCommand, EndsWithTheExitCodesOfABench) {
  for (const char* arguments :
       {"plan", "plan --model deepseek-v3", "plan --cluster h800", "plan --no-such-flag",
        "plan --model x --cluster h800", "plan --model mixtral-8x7b --cluster nowhere",
        "plan --model mixtral-8x7b --cluster h800 --nodes 0",
        "plan --model mixtral-8x7b --cluster h800 --layer 1"}) {
    const Outcome outcome = ferry(arguments);
    EXPECT_EQ(outcome.code, 2) << arguments;
    EXPECT_EQ(outcome.out, "") << arguments;
    EXPECT_EQ(outcome.err.rfind("ferry: ", 0), 0U) << outcome.err;
  }
  EXPECT_NE(ferry("plan --no-such-flag").err.find("see ferry plan --help"), std::string::npos);
  const TemporaryDirectory directory;
  const std::string file = directory.write("cluster.json", R"({"ranks_per_node": 8})").string();
  EXPECT_EQ(ferry("plan --model mixtral-8x7b --cluster '" + file + "'").code, 4);
  EXPECT_EQ(ferry("plan --cluster h800 --trace '" + directory.path().string() + "'").code, 4);
  const Outcome huge = ferry(
      "plan --model deepseek-v3 --cluster h800 --nodes 128 "
      "--tokens 16777216");
  EXPECT_EQ(huge.code, 4);
  EXPECT_NE(huge.err.find("GB are free; fix: fewer --tokens"), std::string::npos) << huge.err;
}

TEST(PlanCommand, HelpNamesEveryFlag) {
  const Outcome help = ferry("plan --help");
  EXPECT_EQ(help.code, 0);
  for (const char* flag : {"--model", "--cluster", "--nodes", "--ranks-per-node", "--tokens",
                           "--trace", "--layer", "--routing", "--wire", "CALL=NAME",
                           "block=COLUMNS", "--seed", "--json", "Examples:", "Exit codes:"}) {
    EXPECT_NE(help.out.find(flag), std::string::npos) << flag;
  }
}

}  // namespace
}  // namespace ferry::tools
