#pragma once
// The oracle: what dispatch and combine must give, computed the slow and obvious way from the
// routing of all ranks. It shares nothing with the library but the plain types that describe the
// input. Values are FP32 numbers that the dtype of the rows can hold exactly.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "ferry/dtype.hpp"
#include "ferry/options.hpp"
#include "ferry/placement.hpp"
#include "ferry/routing.hpp"
#include "ferry/topology.hpp"
#include "ferry/wire_format.hpp"

namespace ferry::support {

/// What results depend on besides routing and rows.
struct Group {
  Topology topology{};
  Placement placement{};
  std::int64_t hidden = 0;
  DType dtype = DType::f32;
  Strategy strategy = Strategy::node_dedup;
  WireFormat wire_dispatch = WireFormat::f32;  ///< written out here: the oracle knows no default
  WireFormat wire_combine = WireFormat::f32;
  Layout layout = Layout::expert_major;
  WeightMode weights = WeightMode::at_combine;
  std::int64_t row_alignment = 1;
  std::int64_t extra_bytes = 0;
  bool row_sources = false;  ///< asked for; some modes have them anyway
  std::int64_t wire_block_columns = 128;
  bool gradients = false;  ///< rows are gradients, which f16 between nodes lets overflow
  float max_relative_error = 0;
  float wire_sparse_ratio = 1;
  /// Unset: as on the way forward, or the dtype where that is quantised.
  std::optional<WireFormat> wire_combine_backward{};
  std::optional<WireFormat> wire_dispatch_backward{};
};

/// The numbers: what a rank's tokens hold, and what an expert makes of a row. `values` have
/// Group::hidden elements; an expert may be given one span twice (in place).
struct Model {
  std::function<void(int rank, std::int64_t token, std::span<float> values)> token;
  std::function<void(int expert, std::span<const float> row, std::span<float> values)> expert;
  /// The extra bytes of a token; only asked for where the group has some.
  std::function<void(int rank, std::int64_t token, std::span<std::byte> bytes)> extra{};
};

/// Which (expert, source rank, token) a row of a window is. Rows of token_major have no expert,
/// alignment rows nothing at all.
struct RowOrigin {
  int expert = -1;
  int source = -1;
  std::int64_t token = -1;
  bool is_alignment() const { return source < 0; }
  bool operator==(const RowOrigin&) const = default;
};

/// An expert that a token names, at the first slot that does; the weight is summed over all slots
/// that do, in their order, and is 1 where nobody applies weights.
struct Term {
  int expert = -1;
  int slot = -1;
  float weight = 0;
};

class Reference {
 public:
  /// Requires: routing[r] is that of rank r; what the views show stays alive.
  Reference(Group group, Model model, std::vector<Routing> routing);

  const Group& group() const { return group_; }
  const Routing& routing(int rank) const { return routing_[rank]; }

  /// The rows of a rank's window. expert_major: by expert, then source rank, then token, with
  /// alignment rows after the rows of each expert. token_major: by source rank, then token.
  std::vector<RowOrigin> rows_of(int rank) const;
  /// Values of one of those rows as they have come, before they are rounded to the dtype; 0 in an
  /// alignment row.
  void arrived(int rank, const RowOrigin& origin, std::span<float> values) const;
  /// Values of one of those rows as they stand in the window; 0 in an alignment row.
  void row(int rank, const RowOrigin& origin, std::span<float> values) const;
  /// What the caller hands to combine for one of those rows; 0 for an alignment row.
  void output(int rank, const RowOrigin& origin, std::span<float> values) const;
  /// Extra bytes of one of those rows; 0 in an alignment row.
  void extra(const RowOrigin& origin, std::span<std::byte> bytes) const;
  /// The experts of `rank` that a token names, slots ascending; of all ranks with rank -1.
  std::vector<Term> terms(int source, std::int64_t token, int rank = -1) const;
  /// Values of out[token] on `home`.
  void out(int home, std::int64_t token, std::span<float> values) const;

 private:
  using Values = std::vector<float>;

  void cross_nodes(WireFormat format, WireFormat escalated, std::span<float> values) const;
  void cross_home(std::span<float> values) const {
    cross_nodes(group_.wire_combine, WireFormat::bf16, values);
  }
  bool crosses(int home, int rank) const { return !group_.topology.same_node(home, rank); }
  Values expert_output(const Term& term, int home, std::int64_t token) const;
  Values term_at_home(const Term& term, int home, std::int64_t token) const;
  Values row_output(std::span<const Term> terms, int home, std::int64_t token) const;
  std::optional<Values> sum_of_rank(int rank, int home, std::int64_t token) const;
  std::optional<Values> sum_of_node(int node, int home, std::int64_t token) const;

  int holder(int expert) const { return group_.placement.rank_of(expert); }

  Group group_;
  Model model_;
  std::vector<Routing> routing_;
};

}  // namespace ferry::support
