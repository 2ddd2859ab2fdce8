// What a rank needs beyond its inputs, its outputs and its windows: at most 64 MiB, and 8 MiB per
// node, however many tokens it has. Measured as the most memory that the process ever had resident,
// so that nothing is missed between two looks; each case needs a process of its own.

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ferry/ferry.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kTokens = 4096;
constexpr std::int64_t kHidden = 1024;
constexpr int kTopk = 8;
constexpr int kExperts = 64;
constexpr int kLayers = 3;
constexpr std::int64_t kMiB = 1 << 20;

/// A line of /proc/self/status in bytes: VmRSS is resident now, VmHWM the most since it was reset.
std::int64_t status_bytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(name + ":", 0) == 0) return std::stoll(line.substr(name.size() + 1)) * 1024;
  }
  return -1;
}

void reset_most_resident() { std::ofstream("/proc/self/clear_refs") << "5"; }

/// Every page is written here, before the measurement.
struct RankData {
  std::vector<std::uint16_t> x;
  std::vector<std::uint16_t> out;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;

  explicit RankData(int rank)
      : x(kTokens * kHidden, 0x3F80), out(x.size(), 1), weights(kTokens * kTopk, 0.125F) {
    std::mt19937 draw(static_cast<std::uint32_t>(rank));
    for (std::int64_t i = 0; i < kTokens * kTopk; ++i) {
      ids.push_back(static_cast<std::int32_t>(draw() % kExperts));
    }
  }
};

void run_layer(Exchange& exchange, RankData& data) {
  const auto ids = std::span<const std::int32_t>(data.ids);
  const Plan plan = exchange.plan(Routing::of(kTokens, kTopk, ids, data.weights));
  const ExpertRows rows =
      exchange.dispatch(plan, {data.x.data(), DType::bf16, kTokens, kHidden, 0});
  exchange.combine(plan, rows.matrix(), {data.out.data(), DType::bf16, kTokens, kHidden, 0});
}

struct Nodes {
  int nodes;
  int ranks_per_node;
};

void expect_bounded_memory(const Nodes& nodes) {
  const int num_ranks = nodes.nodes * nodes.ranks_per_node;
  std::vector<RankData> of_rank;
  for (int rank = 0; rank < num_ranks; ++rank) of_rank.emplace_back(rank);
  std::vector<std::int64_t> windows(of_rank.size());
  reset_most_resident();
  const std::int64_t before = status_bytes("VmRSS");
  ASSERT_GT(before, 0) << "no VmRSS in /proc/self/status";

  threads::run({.nodes = nodes.nodes, .ranks_per_node = nodes.ranks_per_node}, [&](Transport& at) {
    RankData& data = of_rank[static_cast<std::size_t>(at.rank())];
    Exchange exchange(at, Placement::contiguous(kExperts, num_ranks),
                      {.hidden = kHidden, .dtype = DType::bf16});
    for (int layer = 0; layer < kLayers; ++layer) run_layer(exchange, data);
    // Windows count with all of their pages from here on.
    barrier(at);
    poison_free_slots(at, 0xFF);
    barrier(at);
    for (int layer = 0; layer < kLayers; ++layer) run_layer(exchange, data);
    windows[static_cast<std::size_t>(at.rank())] = static_cast<std::int64_t>(pool_bytes(at));
  });

  std::int64_t most = status_bytes("VmHWM") - before;
  for (const std::int64_t bytes : windows) most -= bytes;
  const std::int64_t allowed = (64 + 8 * nodes.nodes) * kMiB;
  testing::Test::RecordProperty("bytes_per_rank", std::to_string(most / num_ranks));
  EXPECT_LE(most / num_ranks, allowed);
  // Ranks have buffers at least: far below nothing, the windows were counted wrongly.
  EXPECT_GE(most / num_ranks, -kMiB);
}

TEST(RankMemory, OneNodeOfTwoRanks) { expect_bounded_memory({.nodes = 1, .ranks_per_node = 2}); }
TEST(RankMemory, TwoNodesOfTwoRanks) { expect_bounded_memory({.nodes = 2, .ranks_per_node = 2}); }
TEST(RankMemory, EightNodesOfOneRank) { expect_bounded_memory({.nodes = 8, .ranks_per_node = 1}); }

}  // namespace
}  // namespace ferry
