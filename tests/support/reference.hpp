#pragma once
// The oracle: what dispatch and combine must give, computed the slow and obvious way from the
// routing of all ranks. It shares nothing with the library but the plain types that describe the
// input. Values are FP32 numbers that the dtype of the rows can hold exactly.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ferry/dtype.hpp"
#include "ferry/options.hpp"
#include "ferry/placement.hpp"
#include "ferry/routing.hpp"
#include "ferry/topology.hpp"

namespace ferry::support {

/// What results depend on besides routing and rows.
struct Group {
  Topology topology{};
  Placement placement{};
  std::int64_t hidden = 0;
  DType dtype = DType::f32;
  Strategy strategy = Strategy::node_dedup;
  DType wire_dispatch = DType::f32;  ///< written out here: the oracle knows no default
  DType wire_combine = DType::f32;
};

/// The numbers: what a rank's tokens hold, and what an expert makes of a row. `values` have
/// Group::hidden elements; an expert may be given one span twice (in place).
struct Model {
  std::function<void(int rank, std::int64_t token, std::span<float> values)> token;
  std::function<void(int expert, std::span<const float> row, std::span<float> values)> expert;
};

/// Which (expert, source rank, token) a row of an expert rank is.
struct RowOrigin {
  int expert = -1;
  int source = -1;
  std::int64_t token = -1;
  bool operator==(const RowOrigin&) const = default;
};

class Reference {
 public:
  /// Requires: routing[r] is that of rank r; what the views show stays alive.
  Reference(Group group, Model model, std::vector<Routing> routing);

  const Group& group() const { return group_; }
  const Routing& routing(int rank) const { return routing_[rank]; }

  /// The rows of a rank's window: by expert, then source rank, then token.
  std::vector<RowOrigin> rows_of(int rank) const;
  /// Values of one of those rows as they arrive.
  void row(const RowOrigin& origin, std::span<float> values) const;
  /// Values of out[token] on `home`.
  void out(int home, std::int64_t token, std::span<float> values) const;

 private:
  Group group_;
  Model model_;
  std::vector<Routing> routing_;
};

}  // namespace ferry::support
