// Topologies: shapes, refusals, and where rows of a source land.

#include "ferry/topology.hpp"

#include <gtest/gtest.h>

#include "ferry/error.hpp"

namespace ferry {
namespace {

std::string refusal(const std::vector<int>& nodes, const std::vector<int>& sockets = {}) {
  try {
    Topology::from_map(nodes, sockets);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "accepted";
}

TEST(Topology, uniform_and_sizes_and_map_agree) {
  const Topology uniform = Topology::uniform(2, 3);
  EXPECT_EQ(uniform, Topology::from_sizes({3, 3}));
  EXPECT_EQ(uniform, Topology::from_map({0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(uniform.num_ranks(), 6);
  EXPECT_EQ(uniform.num_nodes(), 2);
  EXPECT_EQ(uniform.node_of(3), 1);
  EXPECT_EQ(uniform.local_index(4), 1);
  EXPECT_TRUE(uniform.same_node(0, 2));
  EXPECT_FALSE(uniform.same_node(2, 3));
  EXPECT_EQ(Topology::single_node(5).num_nodes(), 1);
}

TEST(Topology, ranks_of_a_scattered_node_are_ascending) {
  const Topology scattered = Topology::from_map({1, 0, 1, 0, 1});
  EXPECT_EQ(scattered.ranks_of(0), (std::vector<int>{1, 3}));
  EXPECT_EQ(scattered.ranks_of(1), (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(scattered.local_index(4), 2);
  EXPECT_EQ(scattered.rail_rank(4, 0), 1);  // place 2 of 2 ranks wraps to place 0
  EXPECT_EQ(scattered.rail_rank(3, 1), 2);
  EXPECT_EQ(scattered.sources_landing_at(1), (std::vector<int>{0, 4}));
}

TEST(Topology, several_sources_of_a_larger_node_land_on_one_rank) {
  const Topology unequal = Topology::from_sizes({3, 5});
  EXPECT_EQ(unequal.rail_rank(3, 0), 0);
  EXPECT_EQ(unequal.rail_rank(6, 0), 0);
  EXPECT_EQ(unequal.rail_rank(7, 0), 1);
  EXPECT_EQ(unequal.sources_landing_at(0), (std::vector<int>{3, 6}));
  EXPECT_EQ(unequal.sources_landing_at(2), (std::vector<int>{5}));
  EXPECT_EQ(unequal.sources_landing_at(6), (std::vector<int>{}));  // nobody has place 3 there
}

TEST(Topology, rails_stay_on_the_socket) {
  //                                  rank  0  1  2  3  4  5  6  7
  const Topology blocks = Topology::from_map({0, 0, 0, 0, 1, 1, 1, 1}, {0, 0, 1, 1, 0, 0, 1, 1});
  EXPECT_EQ(blocks.rail_rank(0, 1), 4);
  EXPECT_EQ(blocks.rail_rank(3, 1), 7);
  const Topology mixed = Topology::from_map({0, 0, 0, 0, 1, 1, 1, 1}, {0, 1, 0, 1, 0, 0, 1, 1});
  EXPECT_EQ(mixed.rail_rank(0, 1), 4);
  EXPECT_EQ(mixed.rail_rank(2, 1), 5);
  EXPECT_EQ(mixed.rail_rank(1, 1), 6);
  EXPECT_EQ(mixed.rail_rank(3, 1), 7);
  EXPECT_EQ(mixed.rail_rank(5, 0), 2);
}

TEST(Topology, a_node_without_the_socket_takes_rows_anyway) {
  const Topology topology = Topology::from_map({0, 0, 0, 1, 1}, {0, 1, 1, 0, 0});
  EXPECT_EQ(topology.rail_rank(0, 1), 3);
  EXPECT_EQ(topology.rail_rank(1, 1), 4);
  EXPECT_EQ(topology.rail_rank(2, 1), 3);
}

TEST(Topology, describes_itself) {
  EXPECT_EQ(Topology::uniform(2, 4).describe(), "2 x 4");
  EXPECT_EQ(Topology::single_node(1).describe(), "1 x 1");
  EXPECT_EQ(Topology::from_sizes({3, 5}).describe(), "3 + 5");
}

TEST(Topology, hash_tells_maps_apart) {
  EXPECT_EQ(Topology::uniform(2, 2).hash(), Topology::from_sizes({2, 2}).hash());
  EXPECT_NE(Topology::uniform(2, 2).hash(), Topology::uniform(1, 4).hash());
  EXPECT_NE(Topology::uniform(2, 2).hash(), Topology::from_map({0, 1, 0, 1}).hash());
  EXPECT_NE(Topology::uniform(1, 2).hash(), Topology::from_map({0, 0}, {0, 1}).hash());
}

TEST(Topology, refuses_what_is_no_topology_and_says_why) {
  EXPECT_NE(refusal({}).find("0 ranks; allowed: 1.."), std::string::npos);
  EXPECT_NE(refusal({0, 2, 2}).find("node 1 has no rank"), std::string::npos);
  EXPECT_NE(refusal({0, 0, 7}).find("node_of_rank[2] = 7; allowed: 0..2"), std::string::npos);
  EXPECT_NE(refusal({0, -1}).find("node_of_rank[1] = -1"), std::string::npos);
  EXPECT_NE(refusal({0, 0}, {0}).find("socket_of_rank has 1 entries"), std::string::npos);
  EXPECT_NE(refusal({0, 0}, {0, -2}).find("socket_of_rank[1] = -2"), std::string::npos);
  EXPECT_THROW(Topology::uniform(0, 4), Error);
  EXPECT_THROW(Topology::uniform(4, -1), Error);
  EXPECT_THROW(Topology::uniform(65536, 65536), Error);
  EXPECT_THROW(Topology::from_sizes({3, 0}), Error);
  EXPECT_THROW(Topology::from_sizes({}), Error);
  EXPECT_THROW(Topology::single_node(0), Error);
}

}  // namespace
}  // namespace ferry
