// What you learn: how to compute while rows travel. start_dispatch returns at once; the caller
// works in slices, each the shared expert on one of its tokens, and calls progress() after each.
// Two nodes of one rank each; the link is slowed to 200 Mbit/s so that there is time to use.
// Run it: build/release/bin/overlap

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "ferry/ferry.hpp"

namespace {

constexpr int kHidden = 1024, kNumTokens = 512;

double now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

// One slice, of about 100 us, because progress() should be called that often. Every value ends as
// 2, whatever it started from.
void shared_expert(const float* x, float* y) {
  for (int c = 0; c < kHidden; ++c) {
    y[c] = x[c];
    for (int step = 0; step < 300; ++step) y[c] = 0.5F * y[c] + 1.0F;
  }
}

void body(ferry::Transport& transport) {
  const int rank = transport.rank();
  ferry::Exchange exchange(transport, ferry::Placement::contiguous(2, 2),
                           {.hidden = kHidden, .dtype = ferry::DType::f32});
  const std::vector<std::int32_t> topk_idx(kNumTokens, 1 - rank);  // the other node's expert
  std::vector<float> data(kNumTokens * kHidden, static_cast<float>(rank + 1));
  std::vector<float> shared(data.size()), out(data.size());
  const ferry::Matrix x{data.data(), ferry::DType::f32, kNumTokens, kHidden};
  const ferry::Plan plan =
      exchange.plan(ferry::Routing::of(kNumTokens, 1, std::span<const std::int32_t>(topk_idx)));
  const auto slice = [&](int token) {
    shared_expert(&data[token * kHidden], &shared[token * kHidden]);
  };
  // One after the other, for comparison. The barrier makes the ranks start together.
  ferry::barrier(transport);
  const double began_ms = now_ms();
  (void)exchange.dispatch(plan, x);
  const double dispatched_ms = now_ms();
  for (int token = 0; token < kNumTokens; ++token) slice(token);
  const double computed_ms = now_ms();

  // Both at once, on the same plan.
  ferry::barrier(transport);
  const double both_began_ms = now_ms();
  ferry::Pending<ferry::ExpertRows> pending = exchange.start_dispatch(plan, x);
  int overlapped = 0;
  for (int token = 0; token < kNumTokens; ++token) {
    slice(token);
    if (!pending.progress()) ++overlapped;  // rows were still on their way after this slice
  }
  const ferry::ExpertRows rows = pending.wait();
  const double both_ms = now_ms() - both_began_ms;
  exchange.combine(plan, rows.matrix(), {out.data(), ferry::DType::f32, kNumTokens, kHidden});
  if (out != data || shared != std::vector<float>(shared.size(), 2.0F)) {
    throw std::runtime_error("overlap: the sums are wrong");
  }
  std::printf(
      "rank %d: dispatch %.1f ms, then shared expert %.1f ms; both at once %.1f ms; "
      "%d of %d slices overlapped\n",
      rank, dispatched_ms - began_ms, computed_ms - dispatched_ms, both_ms, overlapped, kNumTokens);
}

}  // namespace

int main() {
  ferry::threads::run({.nodes = 2, .ranks_per_node = 1, .link_bits_per_s = 2e8}, body);
  return 0;
}
