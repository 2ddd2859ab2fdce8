#pragma once
// FP32 numbers that come home to a rank's tokens during one call: gradients of its routing weights.
// plan/weight_places.hpp says how the list is ordered.

#include <cstdint>
#include <span>
#include <vector>

#include "exchange/lanes.hpp"
#include "exchange/operation.hpp"

namespace ferry::detail {

class HomeValues {
 public:
  explicit HomeValues(const Operation& operation);

  /// Numbers of the targets on the home node: theirs to fill.
  std::span<float> of_home() { return std::span(list_).first(begins_.front()); }
  /// Takes what has arrived. True when there was something.
  bool step(Operation& operation, KindFlow& flow);
  bool done() const { return receivers_.done(); }
  /// A rank whose numbers have not all come; -1 if none.
  int missing_rank() const { return receivers_.missing_rank(); }
  /// Gives each slot its number, 0 where it names no expert. Requires: done(), and of_home() filled
  void write(const Operation& operation, std::span<float> grad_weights) const;

 private:
  std::vector<std::int64_t> begins_;
  std::vector<float> list_;
  LaneReceivers receivers_;
};

}  // namespace ferry::detail
