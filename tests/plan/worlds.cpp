// Random worlds. Ranks, experts and tokens are few, so that coincidences (two sources on one rail
// rank, an empty node, a token with all its slots on one expert) come up often.

#include "worlds.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace ferry::test {
namespace {

using Random = std::mt19937_64;

int pick(Random& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1));
}
bool chance(Random& random, int percent) { return pick(random, 1, 100) <= percent; }

void make_topology(Random& random, World& world) {
  static const std::vector<std::vector<int>> kSizes{
      {1},       {8}, {4, 4}, {2, 2, 2, 2}, {3, 5},    {1, 1, 1, 1, 1, 1, 1, 1},
      {1, 2, 4}, {2}, {1, 1}, {3},          {2, 1, 2}, {5, 2}};
  const auto& sizes = kSizes[static_cast<std::size_t>(pick(random, 0, 11))];
  for (std::size_t node = 0; node < sizes.size(); ++node) {
    world.node_of_rank.insert(world.node_of_rank.end(), static_cast<std::size_t>(sizes[node]),
                              static_cast<int>(node));
  }
  if (chance(random, 40)) {
    std::shuffle(world.node_of_rank.begin(), world.node_of_rank.end(), random);
  }
  if (chance(random, 40)) {
    for (int rank = 0; rank < world.num_ranks(); ++rank) {
      world.socket_of_rank.push_back(pick(random, 0, 1));
    }
  }
}

void make_placement(Random& random, World& world) {
  const int num_ranks = world.num_ranks();
  const int num_experts = pick(random, 1, 3 * num_ranks + 2);
  const int kind = pick(random, 0, 2);
  for (int expert = 0; expert < num_experts; ++expert) {
    if (kind == 0) {
      world.rank_of_expert.push_back(expert * num_ranks / num_experts);
    } else if (kind == 1) {
      world.rank_of_expert.push_back(pick(random, 0, num_ranks - 1));
    } else {  // a few ranks hold all
      world.rank_of_expert.push_back(pick(random, 0, std::min(2, num_ranks - 1)));
    }
  }
}

void make_routing(Random& random, World& world) {
  const int num_experts = static_cast<int>(world.rank_of_expert.size());
  const int kind = pick(random, 0, 5);  // 0: all to expert 0, 1: no tokens at all
  world.num_topk = chance(random, 5) ? 64 : pick(random, 1, 8);
  const int percent_none = chance(random, 50) ? 0 : pick(random, 1, 100);
  for (int rank = 0; rank < world.num_ranks(); ++rank) {
    const int num_tokens = kind == 1 || chance(random, 20) ? 0 : pick(random, 1, 40);
    std::vector<std::int64_t> ids;
    std::vector<float> weights;
    for (int at = 0; at < num_tokens * world.num_topk; ++at) {
      int id = kind == 0 ? 0 : pick(random, 0, num_experts - 1);
      if (chance(random, percent_none)) id = -1;
      ids.push_back(id);
      weights.push_back(chance(random, 5) ? 0.0F : static_cast<float>(pick(random, 1, 999)) / 977);
    }
    world.topk_idx.push_back(std::move(ids));
    world.topk_weights.push_back(std::move(weights));
  }
}

}  // namespace

std::vector<Routing> World::routing() const {
  std::vector<Routing> result;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    result.push_back(Routing::of(num_tokens(rank), num_topk, topk_idx[at], topk_weights[at]));
  }
  return result;
}

std::string World::describe() const {
  std::vector<int> tokens;
  for (int rank = 0; rank < num_ranks(); ++rank) tokens.push_back(num_tokens(rank));
  return fmt::format("nodes {}, sockets {}, experts {}, num_topk {}, tokens {}", node_of_rank,
                     socket_of_rank, rank_of_expert, num_topk, tokens);
}

World random_world(std::uint64_t seed) {
  Random random(seed);
  World world;
  make_topology(random, world);
  make_placement(random, world);
  make_routing(random, world);
  return world;
}

std::vector<std::int64_t> uniform_ids(const UniformRouting& routing, std::uint64_t seed) {
  Random random(seed);
  const int group_size = routing.num_experts / routing.num_groups;
  std::vector<int> groups(static_cast<std::size_t>(routing.num_groups));
  std::iota(groups.begin(), groups.end(), 0);
  std::vector<int> experts;
  std::vector<std::int64_t> ids;
  for (int token = 0; token < routing.num_tokens; ++token) {
    std::shuffle(groups.begin(), groups.end(), random);
    experts.clear();
    for (int group = 0; group < routing.groups_per_token; ++group) {
      for (int at = 0; at < group_size; ++at) {
        experts.push_back(groups[static_cast<std::size_t>(group)] * group_size + at);
      }
    }
    for (int slot = 0; slot < routing.num_topk; ++slot) {  // the first steps of a shuffle
      const int other = pick(random, slot, static_cast<int>(experts.size()) - 1);
      std::swap(experts[static_cast<std::size_t>(slot)], experts[static_cast<std::size_t>(other)]);
      ids.push_back(experts[static_cast<std::size_t>(slot)]);
    }
  }
  return ids;
}

}  // namespace ferry::test
