// The table of clusters, and clusters from a file. A rate is what the source calls usable, or else
// the nominal one; the bound is no better than its rates.
#include "planner/clusters.hpp"

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "common/failures.hpp"
#include "common/flags.hpp"

namespace ferry::planner {
namespace {

using ParsedJson = nlohmann::json;

const std::array<Cluster, 4>& cluster_table() {
  static const std::array<Cluster, 4> kClusters{{
      // A 400 Gbit/s ConnectX-7 NIC per GPU and about 160 GB/s of NVLink, as DeepEP states them.
      {.name = "h800",
       .ranks_per_node = 8,
       .link_gb_per_s = 50,
       .intra_node_gb_per_s = 160,
       .source = "https://github.com/deepseek-ai/DeepEP/blob/main/docs/legacy.md (usable rates)"},
      // 400 Gbit/s NDR per GPU; 18 NVLink4 of 25 GB/s per direction.
      {.name = "h100",
       .ranks_per_node = 8,
       .link_gb_per_s = 50,
       .intra_node_gb_per_s = 450,
       .source = "https://github.com/ai-dynamo/aiconfigurator h100_sxm.yaml at 095f58a (nominal)"},
      // 200 Gbit/s HDR per GPU; 12 NVLink3 of 25 GB/s per direction.
      {.name = "a100",
       .ranks_per_node = 8,
       .link_gb_per_s = 25,
       .intra_node_gb_per_s = 300,
       .source = "https://github.com/ai-dynamo/aiconfigurator a100_sxm.yaml at 095f58a (nominal)"},
      // HCCS of 392 GB/s in both directions together: seven links, one to each other NPU of the
      // node, so a load that is not even over the node cannot reach the sum. 200 Gbit/s RoCE.
      {.name = "ascend-910b",
       .ranks_per_node = 8,
       .link_gb_per_s = 25,
       .intra_node_gb_per_s = 196,
       .source = "http://arthurchiao.art/blog/gpu-data-sheets/ (nominal HCCS); 200 Gbit/s RoCE per "
                 "NPU of the Atlas 800T A2"},
  }};
  return kClusters;
}

/// The fields of one file, each taken once, with what is wrong named by file and field.
class ClusterFile {
 public:
  explicit ClusterFile(const std::string& path) : path_(path) {
    std::ifstream stream(path, std::ios::binary);
    if (!stream) {
      throw tools::EnvironmentError(
          fmt::format("--cluster {}: cannot be read; fix: check its permissions", path));
    }
    json_ = ParsedJson::parse(stream, nullptr, false);
    if (!json_.is_object()) {
      refuse("is not a JSON object", "see docs/metrics.md for the fields, or check its commas");
    }
  }

  double rate(const char* field) {
    const ParsedJson value = take(field);
    if (!value.is_number() || !(value.get<double>() > 0) || !std::isfinite(value.get<double>())) {
      refuse(fmt::format("{} = {}; allowed: a number > 0, in GB/s of one direction", field,
                         value.dump()),
             "give the rate in units of 1e9 bytes per second");
    }
    return value.get<double>();
  }

  int count(const char* field) {
    const ParsedJson value = take(field);
    if (!value.is_number_integer() || value.get<std::int64_t>() < 1 ||
        value.get<std::int64_t>() > tools::kMaxRanks) {
      refuse(fmt::format("{} = {}; allowed: 1..{}", field, value.dump(), tools::kMaxRanks),
             "give the number of accelerators of one node");
    }
    return value.get<int>();
  }

  std::string text(const char* field, const std::string& if_none) {
    if (!json_.contains(field)) return if_none;
    const ParsedJson value = take(field);
    if (!value.is_string()) {
      refuse(fmt::format("{} = {}; allowed: a text", field, value.dump()), "put it in quotes");
    }
    return value.get<std::string>();
  }

  LinkPer link_per() {
    const std::string owner = text("link_per", "rank");
    if (owner == "rank") return LinkPer::rank;
    if (owner == "node") return LinkPer::node;
    refuse(fmt::format("link_per = \"{}\"; allowed: \"rank\", \"node\"", owner),
           "say whether each rank has link_gb_per_s to itself or the ranks of a node share it");
  }

  /// A field that nobody took is a typing error more often than a remark.
  void check_nothing_left() const {
    if (json_.empty()) return;
    refuse(fmt::format("there is no field {}; allowed: name, ranks_per_node, link_gb_per_s, "
                       "link_per, intra_node_gb_per_s, source",
                       json_.begin().key()),
           "correct its name, or put remarks into source");
  }

 private:
  ParsedJson take(const char* field) {
    if (!json_.contains(field)) {
      refuse(fmt::format("has no {}", field), "add it; docs/metrics.md says what it means");
    }
    ParsedJson value = json_.at(field);
    json_.erase(field);
    return value;
  }

  [[noreturn]] void refuse(const std::string& what, const std::string& fix) const {
    throw tools::EnvironmentError(fmt::format("--cluster {}: {}; fix: {}", path_, what, fix));
  }

  std::string path_;
  ParsedJson json_;
};

}  // namespace

std::string_view to_string(LinkPer link_per) {
  switch (link_per) {
    case LinkPer::rank: return "rank";
    case LinkPer::node: return "node";
  }
  return "unknown";
}

std::span<const Cluster> clusters() { return cluster_table(); }

Cluster cluster_of(const std::string& name_or_file) {
  std::string names;
  for (const Cluster& cluster : clusters()) {
    if (cluster.name == name_or_file) return cluster;
    names += cluster.name + ", ";
  }
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(name_or_file, ignored)) {
    throw tools::UsageError(
        fmt::format("--cluster {}: no such cluster and no such file; allowed: "
                    "{}or a JSON file; fix: see docs/metrics.md for its fields",
                    name_or_file, names));
  }
  ClusterFile file(name_or_file);
  Cluster cluster;
  cluster.name = file.text("name", std::filesystem::path(name_or_file).stem().string());
  cluster.ranks_per_node = file.count("ranks_per_node");
  cluster.link_gb_per_s = file.rate("link_gb_per_s");
  cluster.link_per = file.link_per();
  cluster.intra_node_gb_per_s = file.rate("intra_node_gb_per_s");
  cluster.source = file.text("source", name_or_file);
  file.check_nothing_left();
  return cluster;
}

}  // namespace ferry::planner
