// Routing of every rank from one layer of a trace.
#include "common/trace_routing.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "common/failures.hpp"

namespace ferry::tools {
namespace {

support::RoutingData take(const TraceLayer& layer, int num_topk, const TokenShare& share) {
  const std::int64_t begin = share.first_token * num_topk;
  const std::int64_t end = begin + share.num_tokens * num_topk;
  support::RoutingData data{share.num_tokens, num_topk, {}, {}};
  data.topk_idx.assign(layer.topk_idx.begin() + begin, layer.topk_idx.begin() + end);
  if (!layer.topk_weights.empty()) {
    data.topk_weights.assign(layer.topk_weights.begin() + begin, layer.topk_weights.begin() + end);
  }
  return data;
}

std::vector<std::string> notes_of(const TraceInfo& info, const std::vector<TokenShare>& shares) {
  int num_cut = 0;
  std::int64_t total = 0;
  std::int64_t least = shares.front().num_tokens;
  std::int64_t most = least;
  for (const TokenShare& share : shares) {
    num_cut += share.cut ? 1 : 0;
    total += share.num_tokens;
    least = std::min(least, share.num_tokens);
    most = std::max(most, share.num_tokens);
  }
  const std::string each =
      least == most ? fmt::format("{}", most) : fmt::format("{} to {}", least, most);
  std::vector<std::string> notes = {
      fmt::format("trace of {}{}: {} tokens in {} sequences; whole sequences per rank, {} tokens "
                  "each, {} in all",
                  info.model, info.domain.empty() ? "" : ", " + info.domain, info.num_tokens,
                  info.sequence_lengths.size(), each, total)};
  if (num_cut > 0) {
    notes.push_back(fmt::format("--tokens cuts the last sequence of {} of {} ranks short", num_cut,
                                shares.size()));
  }
  return notes;
}

}  // namespace

TraceRouting share_out(const Trace& trace, int layer, const std::vector<std::int64_t>& limits) {
  const TraceInfo& info = trace.info();
  const std::vector<TokenShare> shares = split_sequences(info.sequence_lengths, limits);
  const TraceLayer values = trace.layer(layer);
  TraceRouting routing;
  for (const TokenShare& share : shares) {
    routing.ranks.push_back(take(values, info.num_topk, share));
  }
  routing.notes = notes_of(info, shares);
  return routing;
}

void check_layer(const std::string& trace_directory, int layer) {
  if (!trace_directory.empty() || layer == 0) return;
  throw UsageError(fmt::format("--layer {}: only a trace has layers; fix: add --trace DIR", layer));
}

}  // namespace ferry::tools
