// Sub-groups of ranks that are threads: a layer in each of several that overlap, their nodes, and
// how they end with the group that they are part of.

#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ferry/ferry.hpp"

namespace ferry::subgroups {
namespace {

constexpr std::int64_t kTokens = 3;
constexpr std::int64_t kHidden = 8;
constexpr int kNumTopk = 2;

/// Every expert adds its number of rank: out tells which ranks of `all` a token visited.
void run_layer(Transport& transport, int rank_in_all, const std::vector<int>& members) {
  const int size = transport.topology().num_ranks();
  ASSERT_EQ(size, static_cast<int>(members.size()));
  Exchange exchange(transport, Placement::contiguous(size, size),
                    {.hidden = kHidden, .dtype = DType::f32});
  std::vector<std::int32_t> ids;
  for (int token = 0; token < kTokens; ++token) {
    for (int slot = 0; slot < kNumTopk; ++slot) ids.push_back((token + slot) % size);
  }
  const std::vector<float> weights(ids.size(), 1.0F);
  const std::vector<float> x(kTokens * kHidden, 100.0F * static_cast<float>(rank_in_all));
  const Plan plan =
      exchange.plan(Routing::of(kTokens, kNumTopk, std::span<const std::int32_t>(ids), weights));
  const ExpertRows rows = exchange.dispatch(plan, {x.data(), DType::f32, kTokens, kHidden});
  for (std::int64_t row = 0; row < rows.num_rows(); ++row) {
    auto* const values = reinterpret_cast<float*>(rows.matrix().row(row));
    for (int i = 0; i < kHidden; ++i) values[i] += static_cast<float>(rank_in_all);
  }
  std::vector<float> out(x.size());
  exchange.combine(plan, rows.matrix(), {out.data(), DType::f32, kTokens, kHidden});
  for (int token = 0; token < kTokens; ++token) {
    // With one rank both slots name one expert: one row, whose weights are summed.
    float expected = 200.0F * static_cast<float>(rank_in_all);
    for (int slot = 0; slot < kNumTopk; ++slot) {
      expected += static_cast<float>(members[static_cast<std::size_t>((token + slot) % size)]);
    }
    EXPECT_EQ(out[static_cast<std::size_t>(token * kHidden)], expected) << "token " << token;
  }
}

void run_in(Transport& all, const std::vector<std::vector<int>>& lists) {
  for (const std::vector<int>& ranks : lists) {
    if (std::ranges::find(ranks, all.rank()) == ranks.end()) continue;
    const auto part = all.subgroup(ranks);
    EXPECT_EQ(ranks[static_cast<std::size_t>(part->rank())], all.rank());
    run_layer(*part, all.rank(), ranks);
  }
}

TEST(Subgroup, OverlappingOnesCarryTheirOwnRows) {
  for (const int nodes : {1, 2, 4}) {
    threads::run({.nodes = nodes, .ranks_per_node = 4 / nodes}, [](Transport& all) {
      run_in(all, {{0, 1}, {2, 3}, {0, 2}, {1, 3}, {3, 1, 0}, {2}, {0, 1}});
      run_layer(all, all.rank(), {0, 1, 2, 3});
    });
  }
}

TEST(Subgroup, SeveralLiveSideBySide) {
  threads::run({.nodes = 2, .ranks_per_node = 2}, [](Transport& all) {
    const int rank = all.rank();
    const std::vector<int> pair = rank < 2 ? std::vector{0, 1} : std::vector{2, 3};
    const std::vector<int> rail = rank % 2 == 0 ? std::vector{0, 2} : std::vector{1, 3};
    const auto ep = all.subgroup(pair);
    const auto dp = all.subgroup(rail);
    const auto ep_again = all.subgroup(pair);
    run_layer(*dp, rank, rail);
    run_layer(*ep_again, rank, pair);
    run_layer(*ep, rank, pair);
    run_layer(all, rank, {0, 1, 2, 3});
  });
}

TEST(Subgroup, HasTheNodesOfItsRanks) {
  const Topology shape = Topology::from_map({0, 0, 1, 1, 2}, {0, 1, 0, 1, 0});
  threads::Options options;
  options.topology = shape;
  threads::run(options, [](Transport& all) {
    if (all.rank() == 0 || all.rank() == 2) return;
    const auto part = all.subgroup({4, 1, 3});
    // Rank 4 is alone on the last node, 1 on the first, 3 on the one in between.
    EXPECT_EQ(part->topology(), Topology::from_map({2, 0, 1}, {0, 1, 1}));
  });
}

TEST(Subgroup, SharesTheLinksOfItsNodes) {
  threads::run({.nodes = 2, .ranks_per_node = 1, .link_bits_per_s = 1e9}, [](Transport& all) {
    const auto part = all.subgroup({1, 0});
    EXPECT_TRUE(part->paced());
    run_layer(*part, all.rank(), {1, 0});
    EXPECT_GT(part->counters().payload_bytes, 0U);
  });
}

TEST(Subgroup, WrongListsAreRefused) {
  threads::run({.nodes = 1, .ranks_per_node = 2}, [](Transport& all) {
    const std::vector<std::vector<int>> wrong{
        {}, {0, 1, 2}, {-1, 0, 1}, {0, 1, 1}, {1 - all.rank()}};
    for (const std::vector<int>& ranks : wrong) {
      try {
        all.subgroup(ranks);
        ADD_FAILURE() << "a list of " << ranks.size() << " ranks was taken";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
        EXPECT_NE(std::string(error.what()).find("fix:"), std::string::npos) << error.what();
      }
    }
  });
}

// Rank 2 is in no sub-group of 0 and 1, and its failure must end their wait all the same.
TEST(Subgroup, EndsWithTheJob) {
  std::atomic<int> freed = 0;
  const auto body = [&](Transport& all) {
    if (all.rank() == 2) throw std::runtime_error("rank 2 has had enough");
    const auto part = all.subgroup({0, 1});
    try {
      if (all.rank() == 0) barrier(*part);  // rank 1 never comes
      if (all.rank() == 1) barrier(all);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::peer_failed) ++freed;
      throw;
    }
  };
  EXPECT_THROW(threads::run({.nodes = 1, .ranks_per_node = 3}, body), std::runtime_error);
  EXPECT_EQ(freed, 2);
}

TEST(Subgroup, ARankThatNeverComesIsNamed) {
  threads::run({.nodes = 2, .ranks_per_node = 1}, [](Transport& all) {
    if (all.rank() == 1) return;
    const auto part = all.subgroup({0, 1});
    set_limits(*part, {.deadline_s = 0.2});
    try {
      barrier(*part);
      ADD_FAILURE() << "a barrier of one of two ranks ended well";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::timeout);
      EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
    }
  });
}

TEST(World, RanksOfThreadsThatTheProgramMakes) {
  threads::World world({.nodes = 1, .ranks_per_node = 2});
  EXPECT_THROW(world.join(2), Error);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&world, rank] {
      const auto transport = world.join(rank);
      EXPECT_THROW(world.join(rank), Error) << "one rank twice";
      run_layer(*transport, rank, {0, 1});
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST(World, AbortFreesWaits) {
  auto world = std::make_unique<threads::World>(threads::Options{.ranks_per_node = 2});
  const auto transport = world->join(0);
  std::thread ender([&] { world->abort("enough"); });
  try {
    barrier(*transport);
    ADD_FAILURE() << "a barrier of one of two ranks ended well";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::peer_failed);
    EXPECT_STREQ(error.what(), "enough");
  }
  ender.join();
  world.reset();  // the transport keeps what it needs
  EXPECT_EQ(transport->aborted(), "enough");
}

}  // namespace
}  // namespace ferry::subgroups
