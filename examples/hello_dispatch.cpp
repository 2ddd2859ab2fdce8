// What you learn: how tokens go to their experts and come back, in one process and without any
// set-up. Two nodes of two ranks; four experts, one per rank; each expert multiplies by its number.
// Run it: build/release/bin/hello_dispatch, or as four processes:
//         mpirun -n 4 build/release/bin/hello_dispatch

#include <cstdint>
#include <cstdio>
#include <span>
#include <stdexcept>
#include <vector>

#include "ferry/ferry.hpp"

namespace {

constexpr std::int64_t kHidden = 8;
constexpr std::int64_t kNumTokens = 3;
constexpr int kNumTopk = 2;

float* row(const ferry::Matrix& matrix, std::int64_t index) {
  return reinterpret_cast<float*>(matrix.row(index));
}

void body(ferry::Transport& transport) {
  const int rank = transport.rank();
  ferry::Exchange exchange(transport, ferry::Placement::contiguous(4, 4),
                           {.hidden = kHidden, .dtype = ferry::DType::f32});

  // The router's decision: the second token has only one expert, the third has none (-1).
  const std::vector<std::int32_t> topk_idx = {0, 3, rank, -1, -1, -1};
  const std::vector<float> topk_weights = {0.5F, 0.25F, 1.0F, 0.0F, 0.0F, 0.0F};
  const ferry::Routing routing = ferry::Routing::of(
      kNumTokens, kNumTopk, std::span<const std::int32_t>(topk_idx), topk_weights);
  const std::vector<float> x(kNumTokens * kHidden, static_cast<float>(rank + 1));
  std::vector<float> out(x.size());

  const ferry::Plan plan = exchange.plan(routing);  // the only exchange of counts and ids
  const ferry::ExpertRows rows =
      exchange.dispatch(plan, {x.data(), ferry::DType::f32, kNumTokens, kHidden});

  // The experts: rows of each local expert stand together. Write y where combine reads it in place.
  const ferry::OutputRows y = exchange.output(plan);
  for (std::size_t i = 0; i < plan.local_experts().size(); ++i) {
    const auto factor = static_cast<float>(plan.local_experts()[i] + 1);
    for (std::int64_t r = plan.expert_offsets()[i]; r < plan.expert_offsets()[i + 1]; ++r) {
      for (std::int64_t c = 0; c < kHidden; ++c) {
        row(y.matrix(), r)[c] = factor * row(rows.matrix(), r)[c];
      }
    }
  }

  exchange.combine(plan, y.matrix(), {out.data(), ferry::DType::f32, kNumTokens, kHidden});

  // Token 0 went to experts 0 and 3 (factors 1 and 4) with weights 0.5 and 0.25.
  const float value = static_cast<float>(rank + 1);
  if (out[0] != 1.5F * value || out[kHidden] != value * value || out[2 * kHidden] != 0.0F) {
    throw std::runtime_error("hello_dispatch: the sums are wrong");
  }
  std::printf("rank %d on node %d: %lld rows came; token 0: %g -> %g\n", rank, transport.node(),
              static_cast<long long>(plan.num_rows()), static_cast<double>(value),
              static_cast<double>(out[0]));
}

}  // namespace

int main() {
  ferry::launch::run({.topology = ferry::Topology::uniform(2, 2)}, body);
  return 0;
}
