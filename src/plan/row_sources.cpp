// Where rows come from: see row_sources.hpp.

#include "plan/row_sources.hpp"

namespace ferry::plan {
namespace {

/// Calls visit(source, place of the token in the membership, entry, local expert) for every entry
/// that is on this rank.
template <typename Visit>
void for_each_local_entry(const RowContext& context, const Visit& visit) {
  const int first = context.experts.first_column(context.rank);
  const int count = static_cast<int>(context.experts.experts_of_rank(context.rank).size());
  for (std::size_t source = 0; source < context.of_sources.size(); ++source) {
    const Membership& membership = *context.of_sources[source];
    for (std::size_t i = 0; i < membership.tokens.size(); ++i) {
      for (std::uint32_t e = membership.entry_begin[i]; e < membership.entry_begin[i + 1]; ++e) {
        const int local = membership.columns[e] - first;
        if (local >= 0 && local < count) visit(source, i, e, local);
      }
    }
  }
}

}  // namespace

RowSources expert_major_sources(const RowContext& context,
                                std::span<const std::int64_t> expert_offsets) {
  const auto num_rows = static_cast<std::size_t>(expert_offsets.back());
  RowSources result;
  result.rank.assign(num_rows, -1);
  result.token.assign(num_rows, -1);
  result.slot.assign(num_rows, -1);
  result.weight.assign(num_rows, 0);
  std::vector<std::int64_t> next(expert_offsets.begin(), expert_offsets.end());
  for_each_local_entry(
      context, [&](std::size_t source, std::size_t i, std::uint32_t entry, int local) {
        const Membership& membership = *context.of_sources[source];
        const auto row = static_cast<std::size_t>(next[static_cast<std::size_t>(local)]++);
        result.rank[row] = static_cast<std::int32_t>(source);
        result.token[row] = membership.tokens[i];
        result.slot[row] = membership.slots[entry];
        result.weight[row] = membership.weights[entry];
      });
  return result;
}

TokenRows token_major_rows(const RowContext& context, int num_topk) {
  const auto topk = static_cast<std::size_t>(num_topk);
  TokenRows result;
  result.expert_counts.assign(context.experts.experts_of_rank(context.rank).size(), 0);
  for_each_local_entry(
      context, [&](std::size_t source, std::size_t i, std::uint32_t entry, int local) {
        const Membership& membership = *context.of_sources[source];
        RowSources& rows = result.sources;
        const auto rank = static_cast<std::int32_t>(source);
        if (rows.rank.empty() || rows.rank.back() != rank ||
            rows.token.back() != membership.tokens[i]) {
          rows.rank.push_back(rank);
          rows.token.push_back(membership.tokens[i]);
          result.topk_idx.resize(rows.rank.size() * topk, -1);
          result.topk_weights.resize(rows.rank.size() * topk, 0);
        }
        const std::size_t at = (rows.rank.size() - 1) * topk + membership.slots[entry];
        result.topk_idx[at] = local;
        result.topk_weights[at] = membership.weights[entry];
        ++result.expert_counts[static_cast<std::size_t>(local)];
      });
  return result;
}

}  // namespace ferry::plan
