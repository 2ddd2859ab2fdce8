// What the lists of a membership take, and how good the choice of their encodings is, on generated
// routing and on the traces that come with Ferry.

#include <cmath>
#include <filesystem>
#include <map>

#include <gtest/gtest.h>

#include "common/generator.hpp"
#include "common/trace.hpp"
#include "plan/experts.hpp"
#include "wire/membership_choice.hpp"

namespace ferry::tools {
namespace {

double log2_choose(double of, double count) {
  if (count > of) return -std::numeric_limits<double>::infinity();
  return (std::lgamma(of + 1) - std::lgamma(count + 1) - std::lgamma(of - count + 1)) / std::log(2);
}

/// log2 of the chance that `drawn` of `of` things, of which `marked` are marked, have `count` of
/// those.
double log2_hypergeometric(double of, double marked, double drawn, double count) {
  return log2_choose(marked, count) + log2_choose(of - marked, drawn - count) -
         log2_choose(of, drawn);
}

/// Bits that say which of `columns` columns a token names, if any, where it names num_topk of `of`
/// experts at random: how many they are, and which.
double set_entropy(int of, int columns, int num_topk) {
  double bits = 0;
  for (int count = std::max(0, num_topk - of + columns); count <= std::min(columns, num_topk);
       ++count) {
    const double log2_chance = log2_hypergeometric(of, columns, num_topk, count);
    bits += std::exp2(log2_chance) * (log2_choose(columns, count) - log2_chance);
  }
  return bits;
}

/// The same where the experts are those of some groups, drawn at random, once it is known how many
/// of them are on the node: less than what must be sent.
double group_entropy(const RoutingPattern& pattern, const RouterShape& shape, int num_nodes) {
  const int group = shape.num_experts / pattern.num_groups;
  const int of_node = pattern.num_groups / num_nodes;
  double bits = 0;
  for (int here = 0; here <= std::min(of_node, pattern.groups_per_token); ++here) {
    const double log2_chance =
        log2_hypergeometric(pattern.num_groups, of_node, pattern.groups_per_token, here);
    bits += std::exp2(log2_chance) *
            set_entropy(group * pattern.groups_per_token, group * here, shape.num_topk);
  }
  return bits;
}

/// What tells apart memberships whose columns are named as often as here.
double heat_entropy(const plan::Membership& membership, int num_columns) {
  const auto tokens = static_cast<double>(membership.tokens.size());
  double bits = log2_choose(static_cast<double>(membership.num_tokens), tokens);
  for (const std::uint32_t count : plan::count_columns(membership, num_columns)) {
    bits += log2_choose(tokens, count);
  }
  return bits;
}

/// What tells apart the orders in which the tokens may name their columns.
double order_entropy(const plan::Membership& membership) {
  double bits = 0;
  for (std::size_t i = 0; i < membership.tokens.size(); ++i) {
    bits += std::lgamma(membership.entry_begin[i + 1] - membership.entry_begin[i] + 1.0) /
            std::log(2);
  }
  return bits;
}

/// Memberships for every node but the first, one rank's on each of `num_nodes` nodes.
std::vector<plan::Membership> remote(const support::RoutingData& routing, int num_experts,
                                     int num_nodes) {
  const Topology topology = Topology::uniform(num_nodes, 1);
  auto split = plan::split_by_node(
      routing.view(), plan::ExpertIndex(topology, Placement::contiguous(num_experts, num_nodes)),
      topology);
  split.erase(split.begin());
  return split;
}

/// Bytes of the lists for all other nodes, as the first plan of an exchange chooses them.
struct ListBytes {
  double chosen = 0;
  double heat_entropy = 0;
  double order_entropy = 0;
  double reported_entropy = 0;
};
ListBytes list_bytes(const std::string& routing, int num_nodes, std::int64_t num_tokens) {
  const RouterShape shape{.num_experts = 256, .num_topk = 8};
  const std::vector<std::int64_t> tokens{num_tokens};
  const auto data = generate_routing(parse_routing(routing), shape, tokens, 11);
  const wire::MembershipForm form{.num_columns = shape.num_experts / num_nodes};
  ListBytes result;
  for (const plan::Membership& membership : remote(data.front(), shape.num_experts, num_nodes)) {
    result.chosen += static_cast<double>(wire::index_bytes(
        membership, form, wire::choose_encoding(membership, form, {})));
    result.heat_entropy += heat_entropy(membership, form.num_columns) / 8;
    result.order_entropy += order_entropy(membership) / 8;
    result.reported_entropy += wire::index_entropy_bits(membership, form) / 8;
  }
  return result;
}

constexpr double kMostOverEntropy = 1.6;

// Of 256 experts 8 for each token. Their weights are in no order, so the order of a token's experts
// must be sent; it counts for nothing in these entropies all the same, but in the last.
TEST(IndexEncoding, RandomRoutingTakesAtMostSixTenthsMoreThanItsEntropy) {
  for (const int num_nodes : {2, 4, 8, 16}) {
    for (const std::int64_t num_tokens : {64, 512, 4096}) {
      const double entropy = static_cast<double>(num_tokens) * (num_nodes - 1) / 8 *
                             set_entropy(256, 256 / num_nodes, 8);
      EXPECT_LE(list_bytes("uniform", num_nodes, num_tokens).chosen, kMostOverEntropy * entropy)
          << num_nodes << " nodes, " << num_tokens << " tokens";
    }
  }
}

TEST(IndexEncoding, GroupedRoutingTakesAtMostSixTenthsMoreThanItsEntropy) {
  for (const int num_nodes : {2, 4, 8}) {
    const double per_token =
        group_entropy(parse_routing("group:8,4"), {.num_experts = 256, .num_topk = 8}, num_nodes);
    EXPECT_LE(list_bytes("group:8,4", num_nodes, 4096).chosen,
              kMostOverEntropy * per_token * 4096 * (num_nodes - 1) / 8)
        << num_nodes << " nodes";
  }
}

TEST(IndexEncoding, SkewedRoutingTakesAtMostSixTenthsMoreThanItsEntropy) {
  for (const int num_nodes : {2, 4, 8, 16}) {
    const ListBytes mild = list_bytes("zipf:0.5", num_nodes, 4096);
    EXPECT_LE(mild.chosen, kMostOverEntropy * mild.heat_entropy) << num_nodes << " nodes";
    const ListBytes strong = list_bytes("zipf:1", num_nodes, 4096);
    EXPECT_LE(strong.chosen, kMostOverEntropy * (strong.heat_entropy + strong.order_entropy))
        << num_nodes << " nodes";
  }
}

TEST(IndexEncoding, ReportedEntropyIsThatOfTheRouting) {
  for (const int num_nodes : {2, 8}) {
    const double uniform = 4096.0 * (num_nodes - 1) / 8 * set_entropy(256, 256 / num_nodes, 8);
    // Weights are in no order, so what is reported counts it.
    const ListBytes bytes = list_bytes("uniform", num_nodes, 4096);
    EXPECT_GT(bytes.reported_entropy, 0.99 * uniform);
    EXPECT_LT(bytes.reported_entropy, 1.25 * uniform);
  }
}

/// Chosen over best bytes of a trace's layer, in plans of num_tokens tokens one after the other.
double regret(const TraceLayer& layer, const TraceInfo& info, int num_nodes,
              std::int64_t num_tokens) {
  const wire::MembershipForm form{.num_columns = info.num_experts / num_nodes};
  std::vector<wire::MembershipHistory> histories(static_cast<std::size_t>(num_nodes - 1));
  double chosen = 0;
  double best = 0;
  const auto num_topk = static_cast<std::size_t>(info.num_topk);
  for (std::int64_t first = 0; first + num_tokens <= std::min<std::int64_t>(
                                                        info.num_tokens, 40 * num_tokens);
       first += num_tokens) {
    const auto begin = static_cast<std::ptrdiff_t>(first) * info.num_topk;
    const auto size = static_cast<std::ptrdiff_t>(num_tokens) * info.num_topk;
    support::RoutingData data{.num_tokens = num_tokens, .num_topk = info.num_topk, .topk_idx = {},
                              .topk_weights = {}};
    data.topk_idx.assign(layer.topk_idx.begin() + begin, layer.topk_idx.begin() + begin + size);
    data.topk_weights.assign(layer.topk_weights.begin() + begin,
                             layer.topk_weights.begin() + begin + size);
    const auto memberships = remote(data, info.num_experts, num_nodes);
    for (std::size_t node = 0; node < memberships.size(); ++node) {
      const plan::Membership& own = memberships[node];
      const auto bytes = [&](wire::IndexEncoding encoding) {
        return static_cast<double>(wire::index_bytes(own, form, encoding));
      };
      chosen += bytes(wire::choose_encoding(own, form, histories[node]));
      best += bytes(wire::best_encoding(own, form));
      histories[node].learn(own);
    }
  }
  EXPECT_GT(best, static_cast<double>(num_topk));
  return chosen / best;
}

TEST(IndexEncoding, TheChoiceIsWithinATenthOfTheBestOnTheTraces) {
  for (const char* const domain : {"scripture", "speeches"}) {
    const Trace trace =
        Trace::load(std::filesystem::path(FERRY_DATA) / "traces" / "ferry_lm" / domain);
    for (int layer = 0; layer < trace.info().num_layers; ++layer) {
      const TraceLayer rows = trace.layer(layer);
      for (const int num_nodes : {2, 4, 8, 16}) {
        for (const std::int64_t num_tokens : {1, 8, 64, 512}) {
          EXPECT_LE(regret(rows, trace.info(), num_nodes, num_tokens), 1.1)
              << domain << ", layer " << layer << ", " << num_nodes << " nodes, " << num_tokens
              << " tokens";
        }
      }
    }
  }
}

}  // namespace
}  // namespace ferry::tools
