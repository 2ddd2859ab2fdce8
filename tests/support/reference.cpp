// The oracle: what dispatch and combine must give, bit for bit, straight from the routing. Slow,
// short, and sharing no code with the library.

#include "support/reference.hpp"

#include <optional>

#include "support/numbers.hpp"

namespace ferry::support {
namespace {

struct Term {
  int expert;
  float weight;
};

// Experts of a token at their first slots; an expert named again adds its weight there.
std::vector<Term> terms_of(const Routing& routing, std::int64_t token) {
  std::vector<Term> terms;
  for (int slot = 0; slot < routing.num_topk; ++slot) {
    const auto expert = static_cast<int>(routing.expert(token, slot));
    if (expert < 0) continue;
    bool named_before = false;
    for (Term& term : terms) {
      if (term.expert != expert) continue;
      term.weight += routing.weight(token, slot);
      named_before = true;
    }
    if (!named_before) terms.push_back({expert, routing.weight(token, slot)});
  }
  return terms;
}

// A sum that starts from its first term; nothing was added while it has no value.
using Sum = std::optional<std::vector<float>>;

void add(Sum& sum, const Sum& term) {
  if (!sum) {
    sum = term;
  } else if (term) {
    for (std::size_t i = 0; i < sum->size(); ++i) (*sum)[i] += (*term)[i];
  }
}

void cross(DType wire, Sum& sum) {
  if (sum) round_values(wire, *sum);
}

}  // namespace

Reference::Reference(Group group, Model model, std::vector<Routing> routing)
    : group_(std::move(group)), model_(std::move(model)), routing_(std::move(routing)) {}

std::vector<RowOrigin> Reference::rows_of(int rank) const {
  std::vector<RowOrigin> rows;
  for (int expert = 0; expert < group_.placement.num_experts(); ++expert) {
    if (group_.placement.rank_of(expert) != rank) continue;
    for (int source = 0; source < group_.topology.num_ranks(); ++source) {
      for (std::int64_t token = 0; token < routing_[source].num_tokens; ++token) {
        bool named = false;
        for (int slot = 0; slot < routing_[source].num_topk; ++slot) {
          named = named || routing_[source].expert(token, slot) == expert;
        }
        if (named) rows.push_back({expert, source, token});
      }
    }
  }
  return rows;
}

void Reference::row(const RowOrigin& origin, std::span<float> values) const {
  model_.token(origin.source, origin.token, values);
  if (!group_.topology.same_node(origin.source, group_.placement.rank_of(origin.expert))) {
    round_values(group_.wire_dispatch, values);
    round_values(group_.dtype, values);
  }
}

void Reference::out(int home, std::int64_t token, std::span<float> values) const {
  const std::vector<Term> terms = terms_of(routing_[home], token);
  const int home_node = group_.topology.node_of(home);
  const bool flat = group_.strategy == Strategy::flat;
  const bool per_rank = group_.strategy == Strategy::rank_dedup;

  // w * y of one expert, the product rounded to FP32. With flat, y itself has crossed.
  const auto weighted = [&](const Term& term, bool crossed) {
    std::vector<float> y(values.size());
    row({term.expert, home, token}, y);
    model_.expert(term.expert, y, y);
    if (crossed && flat) round_values(group_.wire_combine, y);
    for (float& value : y) value *= term.weight;
    return y;
  };

  Sum total;
  for (int node = 0; node < group_.topology.num_nodes(); ++node) {
    Sum of_node;
    if (node == home_node) {
      for (const Term& term : terms) {
        const int holder = group_.placement.rank_of(term.expert);
        if (group_.topology.node_of(holder) == node) add(of_node, weighted(term, false));
      }
    } else {
      for (const int rank : group_.topology.ranks_of(node)) {
        Sum of_rank;
        for (const Term& term : terms) {
          if (group_.placement.rank_of(term.expert) == rank) add(of_rank, weighted(term, true));
        }
        if (per_rank) cross(group_.wire_combine, of_rank);
        add(of_node, of_rank);
      }
      if (!per_rank && !flat) cross(group_.wire_combine, of_node);
    }
    add(total, of_node);
  }
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = total ? (*total)[i] : 0.0F;
  round_values(group_.dtype, values);
}

}  // namespace ferry::support
