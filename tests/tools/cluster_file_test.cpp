// Clusters: the table, and files with the same fields.

#include "planner/clusters.hpp"

#include <gtest/gtest.h>

#include "common/failures.hpp"
#include "tools/trace_files.hpp"

namespace ferry::planner {
namespace {

std::string refusal(const std::string& json) {
  const tools::TemporaryDirectory directory;
  try {
    cluster_of(directory.write("cluster.json", json).string());
  } catch (const tools::EnvironmentError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Cluster, EveryEntryOfTheTableHasRatesAndASource) {
  EXPECT_EQ(clusters().size(), 4U);
  for (const Cluster& cluster : clusters()) {
    EXPECT_EQ(cluster_of(cluster.name).source, cluster.source);
    EXPECT_EQ(cluster.ranks_per_node, 8);
    EXPECT_GT(cluster.link_gb_per_s, 0);
    EXPECT_GT(cluster.intra_node_gb_per_s, cluster.link_gb_per_s);
    EXPECT_NE(cluster.source.find("http"), std::string::npos);
  }
}

TEST(Cluster, ReadsAFile) {
  const tools::TemporaryDirectory directory;
  const auto path = directory.write("mine.json", R"({"ranks_per_node": 4, "link_gb_per_s": 12.5,
    "link_per": "node", "intra_node_gb_per_s": 20, "source": "data sheet"})");
  const Cluster cluster = cluster_of(path.string());
  EXPECT_EQ(cluster.name, "mine");
  EXPECT_EQ(cluster.ranks_per_node, 4);
  EXPECT_EQ(cluster.link_gb_per_s, 12.5);
  EXPECT_EQ(cluster.link_per, LinkPer::node);
  EXPECT_EQ(cluster.intra_node_gb_per_s, 20);
  EXPECT_EQ(cluster.source, "data sheet");

  const auto least = directory.write("least.json", R"({"name": "n", "ranks_per_node": 1,
    "link_gb_per_s": 1, "intra_node_gb_per_s": 1})");
  EXPECT_EQ(cluster_of(least.string()).name, "n");
  EXPECT_EQ(cluster_of(least.string()).link_per, LinkPer::rank);
  EXPECT_EQ(cluster_of(least.string()).source, least.string());
}

TEST(Cluster, RefusesAFileThatSaysSomethingElse) {
  const std::string rest = R"("intra_node_gb_per_s": 1, "link_gb_per_s": 1})";
  const struct {
    std::string json;
    const char* why;
  } cases[] = {
      {"[]", "is not a JSON object"},
      {"{", "is not a JSON object"},
      {"{" + rest, "has no ranks_per_node"},
      {R"({"ranks_per_node": 0, )" + rest, "ranks_per_node = 0; allowed: 1..1024"},
      {R"({"ranks_per_node": 2.5, )" + rest, "ranks_per_node = 2.5; allowed: 1..1024"},
      {R"({"ranks_per_node": 8, "link_gb_per_s": 1})", "has no intra_node_gb_per_s"},
      {R"({"ranks_per_node": 8, "link_gb_per_s": "1", "intra_node_gb_per_s": 1})",
       "link_gb_per_s = \"1\"; allowed: a number > 0"},
      {R"({"ranks_per_node": 8, "link_gb_per_s": -1, "intra_node_gb_per_s": 1})",
       "link_gb_per_s = -1; allowed: a number > 0"},
      {R"({"ranks_per_node": 8, "link_per": "switch", )" + rest,
       "link_per = \"switch\"; allowed: \"rank\", \"node\""},
      {R"({"ranks_per_node": 8, "name": 7, )" + rest, "name = 7; allowed: a text"},
      {R"({"ranks_per_node": 8, "link_gbps": 400, )" + rest, "there is no field link_gbps"},
  };
  for (const auto& one : cases) {
    const std::string text = refusal(one.json);
    EXPECT_NE(text.find(one.why), std::string::npos) << text;
    EXPECT_NE(text.find("cluster.json"), std::string::npos) << text;
    EXPECT_NE(text.find("; fix: "), std::string::npos) << text;
  }
}

TEST(Cluster, RefusesWhatIsNeitherANameNorAFile) {
  try {
    cluster_of("h900");
    FAIL();
  } catch (const tools::UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("allowed: h800, h100, a100, ascend-910b, or a JSON"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace ferry::planner
