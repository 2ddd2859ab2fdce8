// All of them send one row per (token, node), as node_dedup does, and then forward inside the node.
#include "planner/published.hpp"

#include <algorithm>
#include <array>

namespace ferry::planner {
namespace {

/// One byte, and a 4-byte scale for 128 elements.
constexpr double kFp8 = 1 + 4.0 / 128;
constexpr const char* kDeepEpV1 = "https://github.com/deepseek-ai/DeepEP/blob/main/docs/legacy.md";
constexpr const char* kDeepEpV2 = "https://github.com/deepseek-ai/DeepEP/blob/main/README.md";

Published deep_ep_v1(int num_nodes, double dispatch, double combine) {
  return {.model = "deepseek-v3",
          .cluster = "h800",
          .num_nodes = num_nodes,
          .tokens_per_rank = 4096,
          .dispatch_element_bytes = kFp8,
          .what = "DeepEP V1, FP8 out, BF16 back",
          .dispatch = dispatch,
          .combine = combine,
          .source = kDeepEpV1};
}

/// Published for "SM90" with ConnectX-7. Two nodes at 90 GB/s mean 217 GB/s per rank over NVLink,
/// more than an H800 has (200 nominal), so it is listed as H100.
Published deep_ep_v2(int num_nodes, double dispatch, double combine) {
  return {.model = "deepseek-v3",
          .cluster = "h100",
          .num_nodes = num_nodes,
          .tokens_per_rank = 8192,
          .dispatch_element_bytes = kFp8,
          .what = "DeepEP V2 on SM90, FP8 out, BF16 back",
          .dispatch = dispatch,
          .combine = combine,
          .source = kDeepEpV2};
}

const std::array<Published, 7>& published_table() {
  static const std::array<Published, 7> kPublished{{
      deep_ep_v1(2, 43, 43),
      deep_ep_v1(4, 58, 57),
      deep_ep_v1(8, 51, 50),
      deep_ep_v2(2, 90, 81),
      deep_ep_v2(4, 61, 61),
      // With 24 SMs: transmit + notify of dispatch and of combine.
      {.model = "deepseek-v3",
       .cluster = "h100",
       .num_nodes = 2,
       .tokens_per_rank = 4096,
       .dispatch_element_bytes = kFp8,
       .what = "DeepEP V1 in SGLang, FP8 out, BF16 back",
       .unit = Unit::us,
       .dispatch = 748.87 + 56.1,
       .combine = 1777 + 50.07,
       .source = "https://github.com/ai-dynamo/aiconfigurator at 095f58a (DeepEP normal, 2 nodes)"},
      // Its bytes per second times its time are 4096 tokens to 1.994 nodes: no group limit.
      {.model = "deepseek-v3",
       .cluster = "ascend-910b",
       .num_nodes = 2,
       .tokens_per_rank = 4096,
       .what = "DeepEP-Ascend, BF16 both ways, no group limit",
       .unit = Unit::us,
       .dispatch = 12495.23,
       .combine = 8864.13,
       .source = "https://github.com/sgl-project/sgl-kernel-npu/pull/296"},
  }};
  return kPublished;
}

}  // namespace

std::string_view to_string(Unit unit) {
  switch (unit) {
    case Unit::logical_gb_per_s: return "logical_gb_per_s";
    case Unit::us: return "us";
  }
  return "unknown";
}

std::vector<Published> published_for(const Scenario& scenario) {
  std::vector<Published> found;
  if (!scenario.as_model_routes) return found;
  const int num_nodes = scenario.topology.num_nodes();
  for (const Published& one : published_table()) {
    if (one.model != scenario.model.name || one.cluster != scenario.cluster.name) continue;
    if (one.num_nodes != num_nodes || one.ranks_per_node * num_nodes != scenario.num_ranks()) {
      continue;
    }
    const std::int64_t tokens = one.tokens_per_rank * scenario.num_ranks();
    if (one.unit == Unit::us && tokens != scenario.num_tokens()) continue;
    found.push_back(one);
  }
  return found;
}

double bound_like(const Scenario& scenario, const StrategyEstimate& estimate, const Published& one,
                  Call call, Inside inside) {
  const bool out = call == Call::dispatch;
  const CallEstimate& own = call_of(estimate, call);
  const Flow& rows_inside =
      inside == Inside::expert_major ? own.intra_node : estimate.intra_node_token_major;
  if (one.unit == Unit::logical_gb_per_s) {
    // Bytes over the time that the same bytes take: the element size cancels out.
    const double us = std::max(own.inter_node.bound_us, rows_inside.bound_us);
    return logical_gb_per_s(scenario, estimate, call, us);
  }
  const double element = out ? one.dispatch_element_bytes : one.combine_element_bytes;
  const std::int64_t hidden = scenario.model.hidden;
  const auto scaled = [&](const Flow& flow, WireFormat planned) {
    const std::uint64_t row_bytes = wire_row_bytes(planned, hidden, scenario.wire_block_columns);
    return flow.bound_us * element * static_cast<double>(hidden) / static_cast<double>(row_bytes);
  };
  return std::max(scaled(own.inter_node, out ? scenario.wire_dispatch : scenario.wire_combine),
                  scaled(rows_inside, wire_format_of(scenario.model.dtype)));
}

}  // namespace ferry::planner
