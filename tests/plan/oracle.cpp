// The oracle, in the order of the definitions: terms of a token, rows, landing ranks, items.

#include "oracle.hpp"

#include <algorithm>
#include <set>

namespace ferry::test {
namespace {

std::size_t at(int value) { return static_cast<std::size_t>(value); }

/// Distinct experts of a token in the order of their first slots, repeats added up.
std::vector<OracleTarget> terms_of(const World& world, int source, int token) {
  std::vector<OracleTarget> terms;
  for (int slot = 0; slot < world.num_topk; ++slot) {
    const auto place = at(token * world.num_topk + slot);
    const auto expert = static_cast<int>(world.topk_idx[at(source)][place]);
    const float weight = world.topk_weights[at(source)][place];
    if (expert == -1) continue;
    const auto known = std::find_if(terms.begin(), terms.end(),
                                    [&](const OracleTarget& t) { return t.expert == expert; });
    if (known != terms.end()) {
      known->weight += weight;
    } else {
      terms.push_back({world.rank_of_expert[at(expert)], expert, weight, -1});
    }
  }
  return terms;
}

void number_rows(const World& world, Oracle& oracle) {
  std::map<int, std::set<std::tuple<int, int, int>>> rows_of_rank;
  for (int source = 0; source < world.num_ranks(); ++source) {
    for (int token = 0; token < world.num_tokens(source); ++token) {
      for (const OracleTarget& term : terms_of(world, source, token)) {
        rows_of_rank[term.rank].insert({term.expert, source, token});
      }
    }
  }
  for (const auto& [rank, rows] : rows_of_rank) {
    std::int64_t row = 0;
    for (const auto& key : rows) oracle.row[key] = row++;
  }
}

using Items = std::map<std::pair<int, int>, std::vector<OracleItem>>;

void add_term(Items& items, std::pair<int, int> lane, int token, const OracleTarget& term,
              bool own_item) {
  std::vector<OracleItem>& list = items[lane];
  if (own_item || list.empty() || list.back().token != token) list.push_back({token, {}});
  list.back().targets.push_back(term);
}

}  // namespace

int oracle_rail_rank(const World& world, int source, int node) {
  const auto socket = [&](int rank) {
    return world.socket_of_rank.empty() ? 0 : world.socket_of_rank[at(rank)];
  };
  const auto peers = [&](int on_node, bool same_socket) {
    std::vector<int> ranks;
    for (int rank = 0; rank < world.num_ranks(); ++rank) {
      if (world.node_of_rank[at(rank)] != on_node) continue;
      if (!same_socket || socket(rank) == socket(source)) ranks.push_back(rank);
    }
    return ranks;
  };
  const bool same_socket = !peers(node, true).empty();
  const std::vector<int> there = peers(node, same_socket);
  const std::vector<int> here = peers(world.node_of_rank[at(source)], same_socket);
  const auto place = std::find(here.begin(), here.end(), source) - here.begin();
  return there[static_cast<std::size_t>(place) % there.size()];
}

Oracle make_oracle(const World& world, std::string_view strategy) {
  Oracle oracle;
  number_rows(world, oracle);
  const bool to_rail = strategy == "node_dedup" || strategy == "node_gather";
  const int num_nodes = *std::max_element(world.node_of_rank.begin(), world.node_of_rank.end()) + 1;
  for (int source = 0; source < world.num_ranks(); ++source) {
    const int home = world.node_of_rank[at(source)];
    for (int token = 0; token < world.num_tokens(source); ++token) {
      if (strategy == "node_gather") {  // a row for every other node, wanted there or not
        for (int node = 0; node < num_nodes; ++node) {
          if (node == home) continue;
          oracle.out[{source, oracle_rail_rank(world, source, node)}].push_back({token, {}});
        }
      }
      std::vector<OracleTarget> terms = terms_of(world, source, token);
      for (OracleTarget& term : terms) term.row = oracle.row.at({term.expert, source, token});
      // Home tokens in slot order, all others by rank, then slot.
      for (const OracleTarget& term : terms) {
        if (world.node_of_rank[at(term.rank)] != home) continue;
        oracle.home[{source, token}].push_back(term);
        ++oracle.written[{source, term.rank}];
      }
      if (strategy != "flat") {
        std::stable_sort(terms.begin(), terms.end(),
                         [](const auto& a, const auto& b) { return a.rank < b.rank; });
      }
      for (const OracleTarget& term : terms) {
        const int node = world.node_of_rank[at(term.rank)];
        if (node == home) continue;
        const int landing = to_rail ? oracle_rail_rank(world, source, node) : term.rank;
        ++oracle.written[{landing, term.rank}];
        add_term(oracle.out, {source, landing}, token, term, strategy == "flat");
        add_term(oracle.back, {source, landing}, token, term, strategy == "flat");
      }
    }
  }
  return oracle;
}

}  // namespace ferry::test
