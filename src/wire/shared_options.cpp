// Names of operations, and the comparison of options between ranks.

#include <fmt/format.h>

#include "wire/headers.hpp"

namespace ferry::wire {

std::string_view to_string(OpKind kind) {
  switch (kind) {
    case OpKind::plan: return "plan";
    case OpKind::dispatch: return "dispatch";
    case OpKind::combine: return "combine";
    case OpKind::combine_backward: return "combine_backward";
    case OpKind::dispatch_backward: return "dispatch_backward";
    case OpKind::gather: return "gather";
    case OpKind::combine_backward_weights: return "combine_backward with grad_weights";
    case OpKind::dispatch_backward_weights: return "dispatch_backward with grad_weights";
  }
  return "unknown";
}

std::optional<std::string> find_difference(const SharedOptions& a, int rank_a,
                                           const SharedOptions& b, int rank_b) {
  std::optional<std::string> difference;
  const auto compare = [&](std::string_view name, const auto& of_a, const auto& of_b,
                           const auto& to_text) {
    if (difference || of_a == of_b) return;
    difference = fmt::format("{} is {} on rank {} and {} on rank {}", name, to_text(of_a), rank_a,
                             to_text(of_b), rank_b);
  };
  const auto number = [](auto value) { return fmt::format("{}", value); };
  const auto hash = [](std::uint64_t value) { return fmt::format("{:#018x}", value); };
  const auto name_of = [](auto value) { return to_string(value); };

  // What a user sets comes first; hashes, which only say that something differs, come last.
  compare("hidden", a.hidden, b.hidden, number);
  compare("dtype", a.dtype, b.dtype, name_of);
  compare("num_experts", a.num_experts, b.num_experts, number);
  compare("num_topk", a.num_topk, b.num_topk, number);
  compare("strategy", a.strategy, b.strategy, name_of);
  compare("layout", a.layout, b.layout, name_of);
  compare("weights", a.weights, b.weights, name_of);
  compare("row_alignment", a.row_alignment, b.row_alignment, number);
  compare("extra_bytes", a.extra_bytes, b.extra_bytes, number);
  compare("row_sources", a.row_sources, b.row_sources, number);
  compare("wire_dispatch", a.wire_dispatch, b.wire_dispatch, name_of);
  compare("wire_combine", a.wire_combine, b.wire_combine, name_of);
  compare("wire_combine_backward", a.wire_combine_backward, b.wire_combine_backward, name_of);
  compare("wire_dispatch_backward", a.wire_dispatch_backward, b.wire_dispatch_backward, name_of);
  compare("wire_block_columns", a.wire_block_columns, b.wire_block_columns, number);
  compare("max_relative_error", a.max_relative_error, b.max_relative_error, number);
  compare("wire_sparse_ratio", a.wire_sparse_ratio, b.wire_sparse_ratio, number);
  compare("fragment_bytes", a.fragment_bytes, b.fragment_bytes, number);
  compare("range_tokens", a.range_tokens, b.range_tokens, number);
  compare("ranges_in_flight", a.ranges_in_flight, b.ranges_in_flight, number);
  compare("checksum_payload", a.checksum_payload, b.checksum_payload, number);
  compare("placement_version", a.placement_version, b.placement_version, number);
  compare("topology_hash", a.topology_hash, b.topology_hash, hash);
  compare("placement_hash", a.placement_hash, b.placement_hash, hash);
  return difference;
}

}  // namespace ferry::wire
