#pragma once
// What one node must know of one rank's routing: which tokens come, to which experts, with which
// weights. Made from the routing at home, sent once, decoded there.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/routing.hpp"
#include "plan/experts.hpp"

namespace ferry::plan {

/// Tokens of one source rank with at least one expert on one node, ascending, as compressed rows:
/// entries [entry_begin[i], entry_begin[i+1]) belong to tokens[i], in slot order. An expert that a
/// token names in several slots is one entry, at its first slot, with its weights summed in FP32
/// in slot order.
struct Membership {
  std::uint64_t num_tokens = 0;  ///< of the source, also those that do not come
  std::vector<std::uint32_t> tokens;
  std::vector<std::uint32_t> entry_begin{0};  ///< tokens.size() + 1 values
  std::vector<std::uint16_t> columns;         ///< expert, as its column on the node
  std::vector<float> weights;                 ///< one per entry
  std::vector<std::uint8_t> slots{};          ///< first slot of each entry; empty unless asked for

  std::size_t num_entries() const { return columns.size(); }
  bool operator==(const Membership&) const = default;
};
/// Bytes that it holds, used or not.
std::uint64_t memory_bytes(const Membership& membership);

/// What is wrong with a routing, as the text of an error; nothing when it may be used. Checks
/// shapes, ids (-1..num_experts-1) and weights (no NaN) of the first num_tokens rows, and names
/// rank, row, column, value, the allowed range and the fix.
std::optional<std::string> find_routing_error(const Routing& routing, int num_experts, int rank);

/// The memberships of one rank's routing for every node. Requires: find_routing_error found none.
std::vector<Membership> split_by_node(const Routing& routing, const ExpertIndex& experts,
                                      const Topology& topology, bool with_slots = false);

/// What split_by_node is asked for.
struct SplitForm {
  int num_nodes = 1;
  bool slots = false;
};
/// The same over memberships of an earlier plan, whose memory is used again.
void split_by_node(const Routing& routing, const ExpertIndex& experts, const SplitForm& form,
                   std::vector<Membership>& out);

/// The places of ranks in their node, per column of a node.
std::vector<std::uint16_t> local_ranks(const ExpertIndex& experts, const Topology& topology,
                                       int node);

/// The same tokens with one entry per (token, rank), ranks ascending; columns are places of ranks
/// in the node. What a plan for token_major rows is made of. `local_rank`: see local_ranks.
void group_by_rank(const Membership& membership, std::span<const std::uint16_t> local_rank,
                   Membership& grouped);

/// Rows (token, rank) that a membership brings. `local_rank`: see local_ranks.
std::uint64_t count_rank_rows(const Membership& membership,
                              std::span<const std::uint16_t> local_rank);

/// Rows per column that a membership brings.
std::vector<std::uint32_t> count_columns(const Membership& membership, int num_columns);

}  // namespace ferry::plan
