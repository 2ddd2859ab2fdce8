// The oracle: what dispatch and combine must give, bit for bit, straight from the routing. Slow,
// short, and sharing no code with the library.

#include "support/reference.hpp"

#include <algorithm>

#include "support/numbers.hpp"
#include "support/wire_numbers.hpp"

namespace ferry::support {
namespace {

// A sum that starts from its first term; nothing was added while it has no value.
using Sum = std::optional<std::vector<float>>;

void add(Sum& sum, const Sum& term) {
  if (!sum) {
    sum = term;
  } else if (term) {
    for (std::size_t i = 0; i < sum->size(); ++i) (*sum)[i] += (*term)[i];
  }
}

void scale(std::vector<float>& values, float factor) {
  for (float& value : values) value *= factor;
}

}  // namespace

Reference::Reference(Group group, Model model, std::vector<Routing> routing)
    : group_(std::move(group)), model_(std::move(model)), routing_(std::move(routing)) {}

std::vector<Term> Reference::terms(int source, std::int64_t token, int rank) const {
  const Routing& routing = routing_[source];
  std::vector<Term> terms;
  for (int slot = 0; slot < routing.num_topk; ++slot) {
    const auto expert = static_cast<int>(routing.expert(token, slot));
    if (expert < 0 || (rank >= 0 && holder(expert) != rank)) continue;
    const auto named = std::find_if(terms.begin(), terms.end(),
                                    [&](const Term& term) { return term.expert == expert; });
    if (named == terms.end()) {
      terms.push_back({expert, slot, routing.weight(token, slot)});
    } else {
      named->weight += routing.weight(token, slot);
    }
  }
  if (group_.weights == WeightMode::none) {
    for (Term& term : terms) term.weight = 1;
  }
  return terms;
}

std::vector<RowOrigin> Reference::rows_of(int rank) const {
  std::vector<RowOrigin> rows;
  // One row for each token with a slot whose expert is among those that count.
  const auto append_tokens = [&](int as_expert, const auto& counts) {
    for (int source = 0; source < group_.topology.num_ranks(); ++source) {
      const Routing& routing = routing_[source];
      for (std::int64_t token = 0; token < routing.num_tokens; ++token) {
        bool named = false;
        for (int slot = 0; slot < routing.num_topk; ++slot) {
          named = named || counts(static_cast<int>(routing.expert(token, slot)));
        }
        if (named) rows.push_back({as_expert, source, token});
      }
    }
  };
  if (group_.layout == Layout::token_major) {
    append_tokens(-1, [&](int expert) { return expert >= 0 && holder(expert) == rank; });
    return rows;
  }
  for (int expert = 0; expert < group_.placement.num_experts(); ++expert) {
    if (holder(expert) != rank) continue;
    append_tokens(expert, [&](int named) { return named == expert; });
    while (static_cast<std::int64_t>(rows.size()) % group_.row_alignment != 0) rows.push_back({});
  }
  return rows;
}

void Reference::arrived(int rank, const RowOrigin& origin, std::span<float> values) const {
  std::fill(values.begin(), values.end(), 0.0F);
  if (origin.is_alignment()) return;
  model_.token(origin.source, origin.token, values);
  if (!crosses(origin.source, rank)) return;
  const bool f16 = group_.dtype == DType::f16;
  cross_nodes(group_.wire_dispatch, f16 ? WireFormat::f16 : WireFormat::bf16, values);
  if (!f16 || group_.gradients) return;
  // What was the largest f16 may have been rounded up, to a number that f16 does not have.
  for (float& value : values) {
    if (std::isfinite(value)) value = std::clamp(value, -65504.0F, 65504.0F);
  }
}

void Reference::row(int rank, const RowOrigin& origin, std::span<float> values) const {
  arrived(rank, origin, values);
  round_values(group_.dtype, values);
}

void Reference::cross_nodes(WireFormat format, WireFormat escalated,
                            std::span<float> values) const {
  cross({.format = format,
         .block_columns = group_.wire_block_columns,
         .gradients = group_.gradients,
         .max_relative_error = group_.max_relative_error,
         .escalated = escalated,
         .sparse_ratio = group_.wire_sparse_ratio},
        values);
}

void Reference::extra(const RowOrigin& origin, std::span<std::byte> bytes) const {
  std::fill(bytes.begin(), bytes.end(), std::byte{0});
  if (!origin.is_alignment()) model_.extra(origin.source, origin.token, bytes);
}

// What the expert itself computes.
Reference::Values Reference::expert_output(const Term& term, int home, std::int64_t token) const {
  Values y(static_cast<std::size_t>(group_.hidden));
  row(holder(term.expert), {term.expert, home, token}, y);
  model_.expert(term.expert, y, y);
  return y;
}

// What the caller hands to combine for one row: the output of its only expert, or the sum of those
// of its experts. Weights at the expert are the caller's; it rounds once, at the end.
Reference::Values Reference::row_output(std::span<const Term> terms, int home,
                                        std::int64_t token) const {
  Sum y;
  for (const Term& term : terms) {
    Values of_expert = expert_output(term, home, token);
    if (group_.weights == WeightMode::at_expert) scale(of_expert, term.weight);
    add(y, of_expert);
  }
  round_values(group_.dtype, *y);
  return *y;
}

void Reference::output(int rank, const RowOrigin& origin, std::span<float> values) const {
  std::fill(values.begin(), values.end(), 0.0F);
  if (origin.is_alignment()) return;
  std::vector<Term> named = terms(origin.source, origin.token, rank);
  if (origin.expert >= 0) {
    std::erase_if(named, [&](const Term& term) { return term.expert != origin.expert; });
  }
  const Values y = row_output(named, origin.source, origin.token);
  std::copy(y.begin(), y.end(), values.begin());
}

// The term of one expert in the sum. With flat, y itself has crossed.
Reference::Values Reference::term_at_home(const Term& term, int home, std::int64_t token) const {
  Values y = row_output(std::span(&term, 1), home, token);
  const bool flat = group_.strategy == Strategy::flat;
  if (flat && crosses(home, holder(term.expert))) cross_home(y);
  if (group_.weights == WeightMode::at_combine) scale(y, term.weight);
  return y;
}

std::optional<Reference::Values> Reference::sum_of_rank(int rank, int home,
                                                        std::int64_t token) const {
  Sum sum;
  const std::vector<Term> named = terms(home, token, rank);
  if (group_.layout == Layout::token_major) {
    if (!named.empty()) sum = row_output(named, home, token);
  } else {
    for (const Term& term : named) add(sum, term_at_home(term, home, token));
  }
  const bool partial_crosses = crosses(home, rank) && group_.strategy == Strategy::rank_dedup;
  if (sum && partial_crosses) cross_home(*sum);
  return sum;
}

std::optional<Reference::Values> Reference::sum_of_node(int node, int home,
                                                        std::int64_t token) const {
  Sum sum;
  const bool is_home = node == group_.topology.node_of(home);
  if (is_home && group_.layout == Layout::expert_major) {
    for (const Term& term : terms(home, token)) {
      if (!crosses(home, holder(term.expert))) add(sum, term_at_home(term, home, token));
    }
    return sum;
  }
  for (const int rank : group_.topology.ranks_of(node)) add(sum, sum_of_rank(rank, home, token));
  const bool one_partial =
      group_.strategy == Strategy::node_gather || group_.strategy == Strategy::node_dedup;
  if (sum && !is_home && one_partial) cross_home(*sum);
  return sum;
}

void Reference::out(int home, std::int64_t token, std::span<float> values) const {
  Sum total;
  for (int node = 0; node < group_.topology.num_nodes(); ++node) {
    add(total, sum_of_node(node, home, token));
  }
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = total ? (*total)[i] : 0.0F;
  round_values(group_.dtype, values);
}

}  // namespace ferry::support
