// Lanes and home targets of random worlds, item by item against the oracle.

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "plan/weight_places.hpp"
#include "planned.hpp"

namespace ferry::test {
namespace {

const plan::LanePair* find_lane(const std::vector<plan::LanePair>& lanes, int peer) {
  for (const plan::LanePair& pair : lanes) {
    if (pair.dispatch.peer == peer) return &pair;
  }
  return nullptr;
}

void check_ranges(const plan::Lane& lane, std::uint64_t num_tokens, std::uint64_t range_tokens) {
  ASSERT_EQ(lane.num_ranges(), (num_tokens + range_tokens - 1) / range_tokens);
  ASSERT_EQ(lane.range_begin.front(), 0U);
  ASSERT_EQ(lane.range_begin.back(), lane.tokens.size());
  for (std::size_t range = 0; range < lane.num_ranges(); ++range) {
    for (std::uint32_t at = lane.range_begin[range]; at < lane.range_begin[range + 1]; ++at) {
      ASSERT_EQ(lane.tokens[at] / range_tokens, range);
    }
  }
}

void check_source_end(const plan::Lane& lane, const std::vector<OracleItem>& items, bool weights) {
  ASSERT_EQ(lane.tokens.size(), items.size());
  ASSERT_TRUE(lane.targets.empty());
  // How many targets there are is known; gather's lane of all tokens goes out only.
  if (!lane.target_begin.empty()) {
    ASSERT_EQ(lane.target_begin.size(), items.size() + 1);
    for (std::size_t at = 0; at < items.size(); ++at) {
      ASSERT_EQ(lane.target_begin[at + 1] - lane.target_begin[at], items[at].targets.size());
    }
  }
  ASSERT_EQ(lane.weights.size(), weights ? items.size() : 0);
  for (std::size_t at = 0; at < items.size(); ++at) {
    ASSERT_EQ(lane.tokens[at], static_cast<std::uint32_t>(items[at].token));
    if (weights) {
      ASSERT_EQ(lane.weights[at], items[at].targets.front().weight);
    }
  }
}

void check_landing_end(const Planned& planned, const plan::Lane& lane, int node,
                       const std::vector<OracleItem>& items) {
  ASSERT_EQ(lane.tokens.size(), items.size());
  ASSERT_EQ(lane.target_begin.size(), items.size() + 1);
  ASSERT_EQ(lane.target_begin.back(), lane.targets.size());
  ASSERT_TRUE(lane.weights.empty());
  for (std::size_t at = 0; at < items.size(); ++at) {
    ASSERT_EQ(lane.tokens[at], static_cast<std::uint32_t>(items[at].token));
    std::vector<OracleTarget> targets;
    for (std::uint32_t i = lane.target_begin[at]; i < lane.target_begin[at + 1]; ++i) {
      targets.push_back(as_oracle(planned, node, lane.targets[i]));
    }
    ASSERT_EQ(targets, items[at].targets) << "token " << items[at].token;
  }
}

/// Items of the way out with the targets of the way back: gather sends tokens without any.
std::vector<OracleItem> items_out(const Oracle& oracle, std::pair<int, int> lane) {
  std::vector<OracleItem> items = oracle.out.at(lane);
  const auto back = oracle.back.find(lane);
  if (back == oracle.back.end()) return items;
  for (OracleItem& item : items) {
    for (const OracleItem& with_targets : back->second) {
      if (item.targets.empty() && with_targets.token == item.token) item = with_targets;
    }
  }
  return items;
}

void check_pair(const Planned& planned, int source, int landing) {
  const plan::RankPlan& from = planned.plans[static_cast<std::size_t>(source)];
  const plan::RankPlan& to = planned.plans[static_cast<std::size_t>(landing)];
  const plan::LanePair* out = find_lane(from.outgoing, landing);
  const plan::LanePair* in = find_lane(to.landing, source);
  const bool crosses = planned.oracle.out.contains({source, landing});
  ASSERT_EQ(out != nullptr, crosses) << source << " -> " << landing;
  ASSERT_EQ(in != nullptr, crosses) << source << " -> " << landing;
  if (!crosses) return;
  SCOPED_TRACE(fmt::format("lane {} -> {}", source, landing));

  const plan::StrategyInfo& strategy = plan::info(from.strategy);
  const bool weights = strategy.unit == plan::RowUnit::token_expert;
  const int node = planned.topology.node_of(landing);
  const std::vector<OracleItem> items = items_out(planned.oracle, {source, landing});
  check_source_end(out->dispatch, items, weights);
  check_landing_end(planned, in->dispatch, node, items);
  ASSERT_EQ(out->combine.size(), strategy.sends_every_token ? 1U : 0U);
  ASSERT_EQ(in->combine.size(), out->combine.size());
  const auto found = planned.oracle.back.find({source, landing});
  const auto back = found == planned.oracle.back.end() ? std::vector<OracleItem>{} : found->second;
  check_source_end(out->back(), back, weights);
  check_landing_end(planned, in->back(), node, back);
  for (const plan::Lane* lane : {&out->dispatch, &out->back(), &in->dispatch, &in->back()}) {
    check_ranges(*lane, from.num_tokens, from.range_tokens);
  }
  ASSERT_EQ(out->dispatch.range_begin, in->dispatch.range_begin);
  ASSERT_EQ(out->back().range_begin, in->back().range_begin);
  ASSERT_EQ(out->values.range_begin, in->values.range_begin);
  ASSERT_EQ(out->values.peer, landing);
  ASSERT_EQ(in->values.peer, source);
  ASSERT_EQ(out->values.range_begin.back(), in->back().targets.size());
  ASSERT_EQ(out->back().peer, landing);
  ASSERT_EQ(in->back().peer, source);
}

TEST(PlanProperty, both_ends_of_every_lane_hold_the_items_of_the_oracle) {
  for_each_world([](const Planned& planned) {
    const int num_ranks = planned.world.num_ranks();
    for (int source = 0; source < num_ranks; ++source) {
      for (int landing = 0; landing < num_ranks; ++landing) {
        ASSERT_NO_FATAL_FAILURE(check_pair(planned, source, landing));
      }
    }
    for (const plan::RankPlan& plan : planned.plans) {
      std::vector<std::pair<int, int>> out;
      for (const auto& pair : plan.outgoing) {
        out.emplace_back(planned.topology.node_of(pair.dispatch.peer), pair.dispatch.peer);
      }
      ASSERT_TRUE(std::is_sorted(out.begin(), out.end()));
      ASSERT_TRUE(std::is_sorted(
          plan.landing.begin(), plan.landing.end(),
          [](const auto& a, const auto& b) { return a.dispatch.peer < b.dispatch.peer; }));
    }
  });
}

/// (token, expert) of every number that comes home to a rank, in the order of its list.
std::vector<std::pair<int, int>> numbers_of(const Planned& planned, const plan::RankPlan& plan) {
  std::vector<std::pair<int, int>> numbers;
  for (int token = 0; token < static_cast<int>(plan.num_tokens); ++token) {
    const auto found = planned.oracle.home.find({plan.rank, token});
    if (found == planned.oracle.home.end()) continue;
    for (const OracleTarget& target : found->second) numbers.emplace_back(token, target.expert);
  }
  for (const plan::LanePair& pair : plan.outgoing) {
    const auto back = planned.oracle.back.find({plan.rank, pair.dispatch.peer});
    if (back == planned.oracle.back.end()) continue;
    for (const OracleItem& item : back->second) {
      for (const OracleTarget& target : item.targets) {
        numbers.emplace_back(item.token, target.expert);
      }
    }
  }
  return numbers;
}

TEST(PlanProperty, gradients_of_weights_find_their_slots) {
  for_each_world([](const Planned& planned) {
    const std::vector<Routing> routing = planned.world.routing();
    for (const plan::RankPlan& plan : planned.plans) {
      const Routing& own = routing[static_cast<std::size_t>(plan.rank)];
      std::vector<std::int32_t> experts;
      for (std::int64_t token = 0; token < own.num_tokens; ++token) {
        for (int slot = 0; slot < own.num_topk; ++slot) {
          experts.push_back(static_cast<std::int32_t>(own.expert(token, slot)));
        }
      }
      const std::vector<std::int64_t> places = plan::weight_places(
          {experts, own.num_topk}, {planned.topology, planned.experts}, plan);
      const std::vector<std::pair<int, int>> numbers = numbers_of(planned, plan);
      ASSERT_EQ(plan::value_begins(plan, 1).back(), static_cast<std::int64_t>(numbers.size()));
      ASSERT_EQ(places.size(), experts.size());
      for (std::size_t at = 0; at < places.size(); ++at) {
        if (experts[at] < 0) {
          ASSERT_EQ(places[at], -1);
          continue;
        }
        const std::pair<int, int> wanted{static_cast<int>(at) / own.num_topk, experts[at]};
        ASSERT_EQ(numbers[static_cast<std::size_t>(places[at])], wanted) << "rank " << plan.rank;
      }
    }
  });
}

TEST(PlanProperty, home_targets_are_in_slot_order) {
  for_each_world([](const Planned& planned) {
    for (const plan::RankPlan& plan : planned.plans) {
      ASSERT_EQ(plan.home_begin.size(), plan.num_tokens + 1);
      ASSERT_EQ(plan.home_begin.back(), plan.home_targets.size());
      for (std::size_t token = 0; token < plan.num_tokens; ++token) {
        std::vector<OracleTarget> targets;
        for (std::uint32_t i = plan.home_begin[token]; i < plan.home_begin[token + 1]; ++i) {
          targets.push_back(
              as_oracle(planned, planned.topology.node_of(plan.rank), plan.home_targets[i]));
        }
        const auto found = planned.oracle.home.find({plan.rank, static_cast<int>(token)});
        const bool none = found == planned.oracle.home.end();
        ASSERT_EQ(targets, none ? std::vector<OracleTarget>{} : found->second);
      }
    }
  });
}

}  // namespace
}  // namespace ferry::test
