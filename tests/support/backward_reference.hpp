#pragma once
// The oracle of the way back: what combine_backward and dispatch_backward must give, from the
// routing of all ranks and the oracle of the forward pass. Gradients are hashes like rows.

#include <cstdint>
#include <span>

#include "support/reference.hpp"

namespace ferry::support {

class BackwardReference {
 public:
  /// Gradients of outputs are rows of `seed`; what experts make of them and gradients of row
  /// weights are drawn from it, too. `factor`, a power of two, makes gradients of rows larger.
  BackwardReference(Reference forward, std::uint64_t seed, float factor = 1);
  const Reference& forward() const { return forward_; }

  /// The gradient of a rank's own output, before it goes anywhere.
  void grad_out(int rank, std::int64_t token, std::span<float> values) const;

  /// What combine_backward brings into row `origin` of a rank's window; 0 in an alignment row.
  void grad_y(int rank, const RowOrigin& origin, std::span<float> values) const;
  /// The gradient of a routing weight, with weights at combine or at the expert; 0 where the slot
  /// names no expert.
  float grad_weight(int home, std::int64_t token, int slot) const;

  /// What the caller hands to dispatch_backward for that row.
  void grad_row(int rank, const RowOrigin& origin, std::span<float> values) const;
  /// The gradient of the weight with which an expert multiplied a token.
  float grad_row_weight(int source, std::int64_t token, int expert) const;
  /// The sum of the gradients of a token's rows at home.
  void grad_x(int home, std::int64_t token, std::span<float> values) const;

 private:
  Reference forward_;
  std::uint64_t seed_;
  Reference grad_out_;   ///< its rows are gradients of outputs as they arrive
  Reference grad_rows_;  ///< its outputs are gradients of rows, its sums those at home
};

}  // namespace ferry::support
