// What the lists of a membership take, and how good the choice of their encodings is, on generated
// routing and on the traces that come with Ferry.

#include <cmath>
#include <filesystem>
#include <limits>

#include <gtest/gtest.h>

#include "index_replay.hpp"

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
    bits +=
        std::lgamma(membership.entry_begin[i + 1] - membership.entry_begin[i] + 1.0) / std::log(2);
  }
  return bits;
}

/// Of the lists for all other nodes, as the first plan of an exchange chooses them.
struct Lists {
  ListBytes bytes;
  double heat_entropy = 0;  ///< in bytes, as the next
  double order_entropy = 0;
};
Lists random_lists(const std::string& routing, int num_nodes, std::int64_t num_tokens) {
  const RouterShape router{.num_experts = 256, .num_topk = 8};
  const ReplayShape shape{.num_experts = 256, .num_nodes = num_nodes};
  const std::vector<std::int64_t> tokens{num_tokens};
  const auto data = generate_routing(parse_routing(routing), router, tokens, 11);
  Lists result;
  for (const plan::Membership& membership : remote(data.front(), shape)) {
    wire::MembershipHistory history;
    result.bytes += list_bytes(membership, shape, history);
    result.heat_entropy += heat_entropy(membership, shape.form().num_columns) / 8;
    result.order_entropy += order_entropy(membership) / 8;
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
      EXPECT_LE(random_lists("uniform", num_nodes, num_tokens).bytes.chosen,
                kMostOverEntropy * entropy)
          << num_nodes << " nodes, " << num_tokens << " tokens";
    }
  }
}

// Where a plan has few tokens whole bytes are what counts, of which each message has six at most.
TEST(IndexEncoding, FewTokensTakeWholeBytesMore) {
  for (const int num_nodes : {2, 4, 8, 16}) {
    for (const std::int64_t num_tokens : {1, 2, 8, 16}) {
      const ListBytes lists = random_lists("uniform", num_nodes, num_tokens).bytes;
      EXPECT_LE(lists.chosen, kMostOverEntropy * lists.entropy + 6 * (num_nodes - 1))
          << num_nodes << " nodes, " << num_tokens << " tokens";
    }
  }
}

TEST(IndexEncoding, GroupedRoutingTakesAtMostSixTenthsMoreThanItsEntropy) {
  for (const int num_nodes : {2, 4, 8}) {
    const double per_token =
        group_entropy(parse_routing("group:8,4"), {.num_experts = 256, .num_topk = 8}, num_nodes);
    EXPECT_LE(random_lists("group:8,4", num_nodes, 4096).bytes.chosen,
              kMostOverEntropy * per_token * 4096 * (num_nodes - 1) / 8)
        << num_nodes << " nodes";
  }
}

TEST(IndexEncoding, SkewedRoutingTakesAtMostSixTenthsMoreThanItsEntropy) {
  for (const int num_nodes : {2, 4, 8, 16}) {
    const Lists mild = random_lists("zipf:0.5", num_nodes, 4096);
    EXPECT_LE(mild.bytes.chosen, kMostOverEntropy * mild.heat_entropy) << num_nodes << " nodes";
    const Lists strong = random_lists("zipf:1", num_nodes, 4096);
    EXPECT_LE(strong.bytes.chosen, kMostOverEntropy * (strong.heat_entropy + strong.order_entropy))
        << num_nodes << " nodes";
  }
}

TEST(IndexEncoding, ReportedEntropyIsThatOfTheRouting) {
  for (const int num_nodes : {2, 8}) {
    const double uniform = 4096.0 * (num_nodes - 1) / 8 * set_entropy(256, 256 / num_nodes, 8);
    // Weights are in no order, so what is reported counts it.
    const double reported = random_lists("uniform", num_nodes, 4096).bytes.entropy;
    EXPECT_GT(reported, 0.99 * uniform);
    EXPECT_LT(reported, 1.25 * uniform);
  }
}

TEST(IndexEncoding, TheChoiceIsWithinATenthOfTheBestOnTheTraces) {
  constexpr std::int64_t kMostPlans = 40;
  for (const char* const domain : {"scripture", "speeches"}) {
    const Trace trace =
        Trace::load(std::filesystem::path(FERRY_DATA) / "traces" / "ferry_lm" / domain);
    for (int layer = 0; layer < trace.info().num_layers; ++layer) {
      const support::RoutingData all = layer_routing(trace, layer);
      for (const int num_nodes : {2, 4, 8, 16}) {
        for (const std::int64_t num_tokens : {1, 8, 64, 512}) {
          ListBytes lists;
          std::int64_t messages = 0;
          replay(all, {trace.info().num_experts, num_nodes}, num_tokens, kMostPlans,
                 [&](const ListBytes& of_message) {
                   lists += of_message;
                   ++messages;
                 });
          EXPECT_GE(messages, 6 * (num_nodes - 1));
          EXPECT_LE(lists.regret(), 1.1) << domain << ", layer " << layer << ", " << num_nodes
                                         << " nodes, " << num_tokens << " tokens";
        }
      }
    }
  }
}

}  // namespace
}  // namespace ferry::tools
