#pragma once
// Where the rows of one rank's window come from, read from the memberships of all ranks for its
// node. Only for callers that ask: the exchange itself needs none of it.

#include <cstdint>
#include <span>
#include <vector>

#include "ferry/row_sources.hpp"
#include "plan/experts.hpp"
#include "plan/membership.hpp"

namespace ferry::plan {

/// What names the rows of one rank.
struct RowContext {
  const ExpertIndex& experts;
  int rank = -1;
  /// Of every rank, for this rank's node; with slots. None is null.
  std::span<const Membership* const> of_sources;
};

/// Rows by (expert, source rank, token); `expert_offsets` as in the rank's plan.
RowSources expert_major_sources(const RowContext& context,
                                std::span<const std::int64_t> expert_offsets);

/// Rows by (source rank, token), with the local experts that each names.
struct TokenRows {
  RowSources sources;
  std::vector<std::int32_t> topk_idx;       ///< [rows x num_topk], -1 = none
  std::vector<float> topk_weights;          ///< [rows x num_topk], 0 = none
  std::vector<std::int64_t> expert_counts;  ///< rows that name each local expert
};
TokenRows token_major_rows(const RowContext& context, int num_topk);

}  // namespace ferry::plan
