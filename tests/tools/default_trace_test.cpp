// The trace that comes with the command: where it is found, which flags take its place, and what is
// run, and said, where there is none.

#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "tools/ferry_folder.hpp"
#include "tools/run_ferry.hpp"

namespace ferry::tools {
namespace {

using Json = nlohmann::json;

/// Three sequences are enough for two ranks. No flag here says what is routed.
const std::string kTwoRanks =
    "bench --nodes 2 --ranks-per-node 1 --repeat 1 --strategy node_dedup ";
const std::string kFourRanks =
    "bench --nodes 2 --ranks-per-node 2 --repeat 1 --strategy node_dedup --hidden 16 ";

Json result_of(const Outcome& outcome) {
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  return outcome.code == 0 ? json_lines(outcome.out).at(0) : Json();
}

void expect_generated(const Json& object) {
  EXPECT_EQ(object.at("routing"), "uniform");
  for (const char* const field : {"trace", "model", "domain", "layer"}) {
    EXPECT_EQ(object.at(field), nullptr) << field;
  }
}

TEST(DefaultTrace, IsRunWhereNoFlagSaysWhatIsRouted) {
  const FerryFolder folder;
  folder.add_trace();
  const Outcome outcome = ferry_at(folder.program(), kTwoRanks + "--json");
  const Json object = result_of(outcome);
  EXPECT_EQ(object.at("routing"), "trace");
  EXPECT_EQ(object.at("trace"), folder.trace().string());
  EXPECT_EQ(object.at("model"), "tiny");
  EXPECT_EQ(object.at("domain"), "prose");
  EXPECT_EQ(object.at("layer"), 0);
  EXPECT_EQ(object.at("num_experts"), 4);
  EXPECT_EQ(object.at("tokens_per_rank"), (Json{2, 4}));
  EXPECT_EQ(object.at("hidden"), 2048);
  EXPECT_NE(outcome.err.find("rows have 2048 elements"), std::string::npos) << outcome.err;

  const Outcome table = ferry_at(folder.program(), kTwoRanks + "--layer 1 --hidden 32 --seed 5");
  EXPECT_EQ(table.code, 0) << table.err;
  for (const char* const text :
       {"routing: ferry_lm/scripture, which comes with ferry, layer 1", "hidden 32",
        "note: trace of tiny, prose: 6 tokens in 3 sequences"}) {
    EXPECT_NE(table.out.find(text), std::string::npos) << text << "\n" << table.out;
  }
  EXPECT_EQ(table.out.find("rows have 2048"), std::string::npos) << table.out;
  // What is named is taken as it is.
  const Outcome named =
      ferry_at(folder.program(), kTwoRanks + "--json --trace '" + folder.trace().string() + "'");
  EXPECT_EQ(result_of(named).at("hidden"), 16);
}

TEST(DefaultTrace, IsFoundFromTheProgramItselfWhereverThatIs) {
  const FerryFolder folder;
  folder.add_trace();
  const std::filesystem::path moved = folder.path() / "moved";
  std::filesystem::create_directory(moved);
  std::filesystem::rename(folder.path() / "bin", moved / "bin");
  std::filesystem::rename(folder.path() / "share", moved / "share");
  const std::filesystem::path link = folder.path() / "link";
  std::filesystem::create_symlink(moved / "bin" / "ferry", link);
  const std::filesystem::path place = moved / "share" / "ferry" / "traces" / "ferry_lm/scripture";
  const std::string flags = kTwoRanks + "--hidden 16 --json";
  EXPECT_EQ(result_of(ferry_at(link, flags)).at("trace"), place.string());
  const std::string on_path = "PATH='" + (moved / "bin").string() + "':$PATH";
  EXPECT_EQ(result_of(ferry_at("ferry", flags, on_path)).at("trace"), place.string());
}

TEST(DefaultTrace, GivesWayToEveryFlagThatSaysWhatIsRouted) {
  const FerryFolder folder;
  folder.add_trace();
  for (const std::string flag : {"--routing uniform", "--experts 8", "--topk 3", "--tokens 5"}) {
    SCOPED_TRACE(flag);
    const Outcome outcome = ferry_at(folder.program(), kTwoRanks + "--hidden 16 --json " + flag);
    expect_generated(result_of(outcome));
    EXPECT_EQ(outcome.err, "");
    EXPECT_EQ(ferry_at(folder.program(), kTwoRanks + "--layer 1 " + flag).code, 2);
  }
}

TEST(DefaultTrace, WhereItIsNotThereRoutingIsGeneratedAndTheOutputSaysSo) {
  const FerryFolder alone;
  const std::string said = "the trace that comes with ferry is not at " + alone.trace().string() +
                           ", so the routing is generated";
  const Outcome outcome = ferry_at(alone.program(), kFourRanks + "--json");
  expect_generated(result_of(outcome));
  EXPECT_NE(outcome.err.find(said), std::string::npos) << outcome.err;
  const Outcome table = ferry_at(alone.program(), kFourRanks);
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_NE(table.out.find("note: " + said), std::string::npos) << table.out;
  EXPECT_NE(table.out.find("routing: uniform, seed 1"), std::string::npos) << table.out;
  const Outcome layer = ferry_at(alone.program(), kFourRanks + "--layer 1");
  EXPECT_EQ(layer.code, 2);
  EXPECT_NE(layer.err.find("only a trace has layers"), std::string::npos) << layer.err;
  // A trace that is there, but no trace, is no reason to run something else.
  std::filesystem::create_directories(alone.trace());
  EXPECT_EQ(ferry_at(alone.program(), kFourRanks).code, 4);
}

TEST(DefaultTrace, WithFewerSequencesThanRanksRoutingIsGeneratedAndTheOutputSaysSo) {
  const FerryFolder folder;
  folder.add_trace();
  const Outcome outcome = ferry_at(folder.program(), kFourRanks + "--json");
  expect_generated(result_of(outcome));
  EXPECT_NE(outcome.err.find("too few sequences for 4 ranks, so the routing is generated"),
            std::string::npos)
      << outcome.err;
  const Outcome layer = ferry_at(folder.program(), kFourRanks + "--layer 1");
  EXPECT_EQ(layer.code, 2);
  EXPECT_NE(layer.err.find("--layer 1: the trace that comes with ferry has too few sequences"),
            std::string::npos)
      << layer.err;
}

}  // namespace
}  // namespace ferry::tools
