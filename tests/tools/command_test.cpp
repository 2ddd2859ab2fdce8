// Runs the ferry binary: what it prints, where it prints it, and its exit codes.

#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tools/run_ferry.hpp"
#include "tools/trace_files.hpp"

namespace ferry::bench {
namespace {

using Json = nlohmann::json;
using tools::ferry;
using tools::json_lines;
using tools::Outcome;

/// A run that takes a moment: 2 x 2 ranks, few short rows.
const std::string kSmall =
    "bench --nodes 2 --ranks-per-node 2 --tokens 20 --hidden 96 --experts 8 --topk 3 --repeat 2 ";

TEST(Command, HelpAndVersionGoToStandardOutput) {
  const Outcome version = ferry("--version");
  EXPECT_EQ(version.code, 0);
  EXPECT_EQ(version.out.rfind("ferry 0.", 0), 0U) << version.out;
  const Outcome help = ferry("--help");
  EXPECT_EQ(help.code, 0);
  EXPECT_NE(help.out.find("bench"), std::string::npos);
  const Outcome bench_help = ferry("bench --help");
  EXPECT_EQ(bench_help.code, 0);
  for (const char* flag :
       {"--trace",  "--layer",          "--routing",      "--nodes",   "--ranks-per-node",
        "--tokens", "--hidden",         "--topk",         "--experts", "--dtype",
        "--wire",   "--strategy",       "--link-rate",    "--repeat",  "--seed",
        "--json",   "--fragment-bytes", "--range-tokens", "Examples:", "Exit codes:",
        "--mpi",    "--baseline",       "--backward",     "--no-reuse"}) {
    EXPECT_NE(bench_help.out.find(flag), std::string::npos) << flag;
  }
}

TEST(Command, JsonHasOneVerifiedObjectPerStrategy) {
  const Outcome outcome = ferry(kSmall + "--json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<Json> objects = json_lines(outcome.out);
  std::set<std::string> strategies;
  for (const Json& object : objects) {
    strategies.insert(object.at("strategy").get<std::string>());
    EXPECT_EQ(object.at("schema"), "ferry.bench/1");
    EXPECT_EQ(object.at("verified"), true);
    EXPECT_EQ(object.at("paced"), false);
    EXPECT_EQ(object.at("transport"), "threads");
    EXPECT_EQ(object.at("mpi"), nullptr);
    EXPECT_GE(object.at("peak_bytes"), object.at("pool_bytes").get<std::uint64_t>());
    EXPECT_EQ(object.at("num_nodes"), 2);
    EXPECT_EQ(object.at("num_ranks"), 4);
    EXPECT_EQ(object.at("num_tokens"), 80);
    EXPECT_EQ(object.at("num_topk"), 3);
    EXPECT_EQ(object.at("num_experts"), 8);
    EXPECT_EQ(object.at("hidden"), 96);
    EXPECT_EQ(object.at("wire_dispatch"), "bf16");
    EXPECT_EQ(object.at("metadata_rounds"), 1);
    EXPECT_EQ(object.at("logical_bytes_dispatch"), 80 * 3 * 96 * 2);
    EXPECT_GT(object.at("fragment_bytes"), 0);
    EXPECT_GT(object.at("range_tokens"), 0);
    EXPECT_FALSE(object.contains("link_utilisation"));
    for (const char* part : {"plan_us", "dispatch_us", "combine_us", "plan_and_dispatch_us"}) {
      const Json& spread = object.at(part);
      EXPECT_LE(spread.at("p10"), spread.at("median"));
      EXPECT_LE(spread.at("median"), spread.at("p90"));
      EXPECT_GT(spread.at("p10"), 0);
    }
  }
  EXPECT_EQ(strategies, (std::set<std::string>{"flat", "rank_dedup", "node_gather", "node_dedup"}));
}

TEST(Command, CountedBytesAreRowsPlusHeaders) {
  const Outcome outcome = ferry(kSmall + "--json --wire bf16,combine=f32 --link-rate 1gbit");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const Json& object : json_lines(outcome.out)) {
    const auto number = [&](const char* name) { return object.at(name).get<std::int64_t>(); };
    const std::string strategy = object.at("strategy");
    EXPECT_GE(number("inter_node_bytes_dispatch"), number("inter_node_rows_dispatch") * 96 * 2);
    EXPECT_GE(number("inter_node_bytes_combine"), number("inter_node_rows_combine") * 96 * 4);
    EXPECT_EQ(2 * number("inter_node_bytes_bound"), number("inter_node_bytes_bound_combine"));
    EXPECT_GE(number("inter_node_bytes_dispatch"), number("inter_node_bytes_bound")) << strategy;
    if (strategy == "node_dedup") {
      EXPECT_EQ(number("inter_node_rows_dispatch") * 96 * 2, number("inter_node_bytes_bound"));
    }
    if (strategy == "node_gather") {
      EXPECT_EQ(number("inter_node_rows_dispatch"), 80);
    }
    EXPECT_GT(number("index_bytes"), 0);
    EXPECT_GT(number("metadata_bytes"), number("index_bytes"));
    EXPECT_LE(number("index_bytes_best"), number("index_bytes"));
    EXPECT_LT(object.at("index_bytes_entropy"), number("index_bytes_best"));
    const auto best = static_cast<double>(number("index_bytes_best"));
    EXPECT_NEAR(object.at("index_regret").get<double>() * best, number("index_bytes"), 0.05);
    for (const char* list : {"index_tokens", "index_experts"}) {
      int messages = 0;
      for (const Json& count : object.at(list)) messages += count.get<int>();
      EXPECT_EQ(messages, 4) << list;  // one of each rank
    }
    EXPECT_EQ(object.at("paced"), true);
    EXPECT_GT(object.at("link_utilisation"), 0.0);
    EXPECT_LE(object.at("link_utilisation"), 1.05);
  }
}

TEST(Command, QuantisedRowsAreVerifiedAndCounted) {
  const Outcome outcome =
      ferry(kSmall + "--json --backward --wire fp8,combine=int8,dispatch_backward=fp8_e4m3fn");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const Json& object : json_lines(outcome.out)) {
    EXPECT_EQ(object.at("wire_dispatch"), "fp8_e4m3fn");
    EXPECT_EQ(object.at("wire_combine"), "int8");
    EXPECT_EQ(object.at("wire_combine_backward"), object.at("dtype"));
    EXPECT_EQ(object.at("wire_dispatch_backward"), "fp8_e4m3fn");
    EXPECT_EQ(object.at("inter_node_bytes_bound").get<std::int64_t>() % (96 + 4), 0);
    if (object.at("strategy") != "node_dedup") continue;
    EXPECT_EQ(object.at("inter_node_rows_dispatch").get<std::int64_t>() * (96 + 4),
              object.at("inter_node_bytes_bound"));
  }
}

TEST(Command, RowsOfVaryingSizeAreVerifiedAndCounted) {
  for (const char* const wire :
       {"int8,error=0.007,combine_backward=fp8,dispatch_backward=int8",
        "sparse_bf16,ratio=0.25,combine_backward=sparse_f16", "auto,error=0.01"}) {
    const Outcome outcome = ferry(kSmall + "--json --backward --wire " + wire);
    ASSERT_EQ(outcome.code, 0) << wire << ": " << outcome.err;
    for (const Json& object : json_lines(outcome.out)) {
      EXPECT_EQ(object.at("verified"), true) << wire;
    }
  }
  EXPECT_EQ(ferry(kSmall + "--wire bf16,error=0.1").code, 2);
}

TEST(Command, AStepNeedsOneRoundOfMetadataAndFourWithoutReuse) {
  const Outcome outcome = ferry(kSmall + "--json --backward --no-reuse");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<Json> objects = json_lines(outcome.out);
  ASSERT_EQ(objects.size(), 4U);
  for (const Json& object : objects) {
    EXPECT_EQ(object.at("step_metadata_rounds"), 1.0);
    EXPECT_EQ(object.at("step_no_reuse_metadata_rounds"), 4.0);
    EXPECT_LE(object.at("step_host_stalls"), 1.0);
    EXPECT_LE(object.at("step_no_reuse_host_stalls"), 4.0);
    const auto number = [&](const char* name) { return object.at(name).get<std::int64_t>(); };
    EXPECT_EQ(number("inter_node_bytes_dispatch_backward"), number("inter_node_bytes_combine"));
    EXPECT_GT(number("inter_node_bytes_combine_backward"), 0);
    EXPECT_GT(number("inter_node_bytes_grad_weights"), 0);
    for (const char* part : {"combine_backward_us", "combine_backward_weights_us",
                             "dispatch_backward_us", "step_us", "step_no_reuse_us"}) {
      EXPECT_GT(object.at(part).at("median"), 0) << part;
    }
    EXPECT_FALSE(object.contains("dispatch_backward_weights_us"));
  }
  const Outcome at_expert = ferry(kSmall + "--backward --weights at_expert --layout token_major");
  EXPECT_EQ(at_expert.code, 0) << at_expert.err;
  EXPECT_NE(at_expert.out.find("dispatch_backward"), std::string::npos);
  const Outcome alone = ferry(kSmall + "--no-reuse");
  EXPECT_EQ(alone.code, 2);
  EXPECT_NE(alone.err.find("--no-reuse: allowed only with --backward"), std::string::npos);
}

TEST(Command, TableNamesBestWhyAndNext) {
  const Outcome outcome = ferry(kSmall + "--strategy flat,node_dedup --link-rate 100mbit");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* text : {"flat ", "node_dedup ", "bound ", "paced to 100 Mbit/s",
                           "Why:  ", "Next: ", "vs flat", "rows/token", "2 nodes, 4 ranks"}) {
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text << "\n" << outcome.out;
  }
  EXPECT_EQ(outcome.out.find("rank_dedup"), std::string::npos);
  EXPECT_EQ(outcome.err, "");  // no progress line: standard error is no terminal here
}

TEST(Command, RunsARaggedGroupWithEmptyRanks) {
  const Outcome outcome = ferry(
      "bench --nodes 2 --ranks-per-node 2 --tokens 0,7,33,0 --hidden 7 --experts 3 --topk 2 "
      "--repeat 1 --dtype f32 --json --fragment-bytes 300 --range-tokens 5");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const Json& object : json_lines(outcome.out)) {
    EXPECT_EQ(object.at("tokens_per_rank"), (Json{0, 7, 33, 0}));
    EXPECT_EQ(object.at("fragment_bytes"), 300);
    EXPECT_EQ(object.at("range_tokens"), 5);
  }
  EXPECT_EQ(ferry("bench --nodes 2 --ranks-per-node 1 --tokens 0 --repeat 1").code, 0);
  EXPECT_EQ(ferry("bench --nodes 1 --ranks-per-node 1 --tokens 4 --hidden 1 --repeat 1").code, 0);
}

TEST(Command, ReadsATrace) {
  const tools::TemporaryDirectory directory;
  tools::write_small_trace(directory);
  const std::string trace =
      "bench --nodes 2 --ranks-per-node 1 --repeat 1 --trace '" + directory.path().string() + "' ";
  const Outcome outcome = ferry(trace + "--layer 1 --tokens 2 --json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json object = json_lines(outcome.out).front();
  EXPECT_EQ(object.at("routing"), "trace");
  EXPECT_EQ(object.at("trace"), directory.path().string());
  EXPECT_EQ(object.at("model"), "tiny");
  EXPECT_EQ(object.at("domain"), nullptr);
  EXPECT_EQ(object.at("layer"), 1);
  EXPECT_EQ(object.at("num_experts"), 4);
  EXPECT_EQ(object.at("hidden"), 16);
  EXPECT_EQ(object.at("tokens_per_rank"), (Json{2, 2}));
  EXPECT_NE(outcome.err.find("--tokens cuts the last sequence of 1 of 2 ranks"), std::string::npos)
      << outcome.err;
  EXPECT_NE(ferry(trace).out.find("trace of tiny: 6 tokens in 3 sequences"), std::string::npos);
  EXPECT_EQ(ferry(trace + "--layer 2").code, 2);
  EXPECT_EQ(ferry(trace + "--topk 2").code, 2);
}

TEST(Command, WrongUsageEndsWith2AndSaysWhatIsAllowed) {
  for (const char* arguments :
       {"", "fly", "bench --no-such-flag", "bench --nodes", "bench --nodes two",
        "bench --strategy best", "bench --dtype f64", "bench --link-rate fast", "bench --topk 65",
        "bench --topk 9 --experts 8", "bench --tokens 1,2", "bench --repeat 0", "bench --wire f8",
        "bench --routing zipf:x", "bench --hidden 0"}) {
    const Outcome outcome = ferry(arguments);
    EXPECT_EQ(outcome.code, 2) << arguments;
    EXPECT_EQ(outcome.out, "") << arguments;
    EXPECT_EQ(outcome.err.rfind("ferry: ", 0), 0U) << outcome.err;
  }
}

TEST(Command, VerificationNoticesEveryKindOfFaultAndEndsWith3) {
  const struct {
    const char* fault;
    const char* text;
  } cases[] = {{"row", "dispatched row"}, {"out", "combined row"}, {"bytes", "counted"}};
  for (const auto& one : cases) {
    const Outcome outcome =
        ferry(kSmall + "--strategy node_dedup --json --inject-fault " + one.fault);
    EXPECT_EQ(outcome.code, 3) << one.fault << outcome.err;
    EXPECT_NE(outcome.err.find("verification failed: node_dedup, repeat 1"), std::string::npos)
        << outcome.err;
    EXPECT_NE(outcome.err.find(one.text), std::string::npos) << outcome.err;
    const Json object = json_lines(outcome.out).at(0);
    EXPECT_EQ(object.at("verified"), false);
    EXPECT_FALSE(object.contains("dispatch_us"));
  }
}

TEST(Command, AnUnreadableTraceOrTooLittleMemoryEndsWith4) {
  const tools::TemporaryDirectory directory;
  const std::string trace = "bench --trace '" + directory.path().string() + "'";
  EXPECT_EQ(ferry(trace).code, 4);
  directory.write("meta.json", R"({"num_experts": 4})");
  const Outcome no_array = ferry(trace);
  EXPECT_EQ(no_array.code, 4);
  EXPECT_NE(no_array.err.find("topk_idx.npy"), std::string::npos) << no_array.err;
  const Outcome huge = ferry(
      "bench --nodes 1 --ranks-per-node 1 --tokens 100000 --hidden 1048576 "
      "--topk 64 --experts 64");
  EXPECT_EQ(huge.code, 4);
  EXPECT_NE(huge.err.find("GB are free"), std::string::npos) << huge.err;
}

}  // namespace
}  // namespace ferry::bench
