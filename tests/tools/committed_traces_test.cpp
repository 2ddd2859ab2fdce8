// The traces under data/traces: both domains are there and valid, in every layer; they are small,
// and the default one suits `ferry bench` as it stands.

#include <cstdint>
#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "tools/run_ferry.hpp"

namespace ferry::tools {
namespace {

using Json = nlohmann::json;

constexpr std::uintmax_t kMaxBytes = 1'000'000;  // of all traces together
constexpr int kFewestTokens = 128;               // of each rank, where no flag says anything
const std::filesystem::path kTraces = std::filesystem::path(FERRY_DATA) / "traces";

/// How many layers can be benched, each verified, and planned: all before the first refused one.
int check_layers(const std::string& domain) {
  const std::string trace = " --trace '" + (kTraces / "ferry_lm" / domain).string() + "' --layer ";
  for (int layer = 0;; ++layer) {
    SCOPED_TRACE(layer);
    const Outcome bench =
        ferry("bench --json --nodes 2 --ranks-per-node 2 --repeat 1 --strategy node_dedup" + trace +
              std::to_string(layer));
    if (layer > 0 && bench.code == 2) return layer;
    EXPECT_EQ(bench.code, 0) << bench.err;
    if (bench.code != 0) return layer;
    for (const Json& object : json_lines(bench.out)) {
      EXPECT_EQ(object.at("verified"), true);
      EXPECT_EQ(object.at("model"), "ferry_lm");
      EXPECT_EQ(object.at("domain"), domain);
    }
    const Outcome plan = ferry("plan --json --cluster h800" + trace + std::to_string(layer));
    EXPECT_EQ(plan.code, 0) << plan.err;
    if (plan.code != 0) return layer;
    EXPECT_EQ(json_lines(plan.out).at(0).at("num_tokens"),
              json_lines(bench.out).at(0).at("num_tokens"));
  }
}

TEST(CommittedTraces, AreThereAndValidInEveryLayer) {
  for (const std::string domain : {"scripture", "speeches"}) {
    SCOPED_TRACE(domain);
    const std::filesystem::path directory = kTraces / "ferry_lm" / domain;
    for (const char* const name : {"topk_idx.npy", "topk_weights.npy", "meta.json"}) {
      ASSERT_TRUE(std::filesystem::is_regular_file(directory / name)) << directory / name;
    }
    EXPECT_GE(check_layers(domain), 2);
  }
}

TEST(CommittedTraces, AreSmallAndDescribed) {
  std::uintmax_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(FERRY_DATA)) {
    if (!entry.is_regular_file()) continue;
    bytes += entry.file_size();
    if (entry.path().extension() != ".md") continue;
    EXPECT_EQ(content_of(entry.path()).find("TO_FILL"), std::string::npos)
        << entry.path() << " has a figure that is not filled in";
  }
  EXPECT_LE(bytes, kMaxBytes);
}

TEST(CommittedTraces, TheDefaultIsOneOfThemAndEnoughForTheDefaultRanks) {
  const Outcome outcome = ferry("bench --json --repeat 1 --strategy node_dedup");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json object = json_lines(outcome.out).at(0);
  ASSERT_TRUE(object.at("trace").is_string()) << outcome.err;
  EXPECT_TRUE(std::filesystem::equivalent(object.at("trace").get<std::string>(),
                                          kTraces / "ferry_lm" / "scripture"));
  EXPECT_EQ(object.at("num_ranks"), 8);
  EXPECT_EQ(object.at("hidden"), 2048);
  for (const Json& tokens : object.at("tokens_per_rank")) EXPECT_GE(tokens, kFewestTokens);
}

}  // namespace
}  // namespace ferry::tools
