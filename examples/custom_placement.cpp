// What you learn: how to place experts by hand, unevenly, and what that does to the traffic. Two
// nodes of two ranks, eight experts; experts e and e + 4 are chosen together, so a map that keeps
// them on one node saves crossings. Both placements give the same sums.
// Run it: build/release/bin/custom_placement

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "ferry/ferry.hpp"

namespace {

constexpr std::int64_t kHidden = 64, kNumTokens = 64;

struct Seen {
  std::uintmax_t expert_rows = 0, crossed_rows = 0, crossed_bytes = 0;  // crossed nodes, both ways
};

// Half of a node's tokens are about its first topic, every fourth about one of the other node's.
int topic_of(int node, std::int64_t token) {
  return token % 4 == 3 ? 2 * (1 - node) : 2 * node + (token % 4 == 1 ? 1 : 0);
}

Seen run_layer(ferry::Transport& transport, const ferry::Placement& placement) {
  std::vector<std::int32_t> topk_idx;
  for (std::int64_t token = 0; token < kNumTokens; ++token) {
    const int topic = topic_of(transport.node(), token);
    topk_idx.insert(topk_idx.end(), {topic, topic + 4});
  }
  std::vector<float> x(kNumTokens * kHidden, 1.0F + transport.rank()), out(x.size());
  ferry::Exchange exchange(transport, placement, {.hidden = kHidden, .dtype = ferry::DType::f32});
  const std::span<const std::int32_t> ids(topk_idx);
  const ferry::Plan plan = exchange.plan(ferry::Routing::of(kNumTokens, 2, ids));
  const ferry::ExpertRows rows =
      exchange.dispatch(plan, {x.data(), ferry::DType::f32, kNumTokens, kHidden});
  for (std::size_t i = 0; i < plan.local_experts().size(); ++i) {  // expert e multiplies by e + 1
    for (std::int64_t r = plan.expert_offsets()[i]; r < plan.expert_offsets()[i + 1]; ++r) {
      auto* const row = reinterpret_cast<float*>(rows.matrix().row(r));
      for (int c = 0; c < kHidden; ++c) row[c] *= static_cast<float>(plan.local_experts()[i] + 1);
    }
  }
  exchange.combine(plan, rows.matrix(), {out.data(), ferry::DType::f32, kNumTokens, kHidden});
  const ferry::PlanSummary& sent = plan.summary();
  const std::uintmax_t bytes = transport.counters().payload_bytes;
  bool good = bytes == sent.inter_node_bytes_dispatch + sent.inter_node_bytes_combine;
  for (std::size_t i = 0; i < out.size(); ++i) {  // ((topic + 1) + (topic + 5)) / 2
    const int topic = topic_of(transport.node(), static_cast<std::int64_t>(i) / kHidden);
    good = good && out[i] == x[i] * static_cast<float>(topic + 3);
  }
  if (!good) throw std::runtime_error("custom_placement: sums or bytes are wrong");
  return {static_cast<std::uintmax_t>(plan.num_rows()),
          sent.inter_node_rows_dispatch + sent.inter_node_rows_combine, bytes};
}

std::uintmax_t show(const char* name, const ferry::Placement& placement) {
  std::vector<Seen> of_rank(4);
  ferry::threads::run({.nodes = 2, .ranks_per_node = 2}, [&](ferry::Transport& transport) {
    of_rank[static_cast<std::size_t>(transport.rank())] = run_layer(transport, placement);
  });
  Seen all;
  std::printf("%-11s expert rows of ranks 0..3:", name);
  for (const Seen& seen : of_rank) {
    std::printf(" %3ju", seen.expert_rows);
    all.crossed_rows += seen.crossed_rows, all.crossed_bytes += seen.crossed_bytes;
  }
  std::printf("; between nodes: %3ju rows, %ju bytes\n", all.crossed_rows, all.crossed_bytes);
  return all.crossed_rows;
}

}  // namespace

int main() {
  const std::uintmax_t before = show("contiguous:", ferry::Placement::contiguous(8, 4));
  // Rank of each expert: 0 and 2 are busy and have a rank for themselves; ranks 1 and 3 hold three.
  const auto by_hand = ferry::Placement::from_map({0, 1, 2, 3, 1, 1, 3, 3});
  return show("by hand:", by_hand) * 4 == before ? 0 : 1;  // only every fourth token still crosses
}
