#pragma once
// A random program: several plans in flight on one exchange, their calls started in one drawn order
// on all ranks and waited for in an order of each rank. One call may be cancelled; then every call
// ends well or with that reason, and a fresh plan works.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "conformance/scenario.hpp"

namespace ferry::conformance {

/// One call of the program, on one of its layers.
struct SweepCall {
  enum class Kind : std::uint8_t { plan, dispatch, combine };
  Kind kind = Kind::plan;
  std::size_t layer = 0;
};

struct SweepCase {
  std::uint64_t seed = 1;
  ProgramOptions program;
  ExchangeOptions options;
  std::vector<Layer> layers;
  std::vector<SweepCall> calls;
  /// Layer that is run at the end, on its own, and whether its gradients follow.
  std::optional<Layer> last;
  Backward backward = Backward::none;

  /// Everything that was drawn, for a failure.
  std::string describe() const;
};

/// Everything is a function of the seed. Without `may_cancel` no call is cancelled.
SweepCase draw_case(std::uint64_t seed, bool may_cancel = true);

/// A small fixed program on a few ranks: plan, dispatch, combine, and the layer at the end.
SweepCase small_case(Strategy strategy, const Topology& topology);

/// Runs it. Faults are in the result's failures and hang.
ProgramResult run_case(const SweepCase& sweep);

}  // namespace ferry::conformance
