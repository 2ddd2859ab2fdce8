// The counts follow the definitions of the strategies word by word: distinct experts, ranks and
// nodes of each token. They share no code with the library's plans.
#include "bench/workload.hpp"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "bench/memory.hpp"
#include "common/default_trace.hpp"
#include "common/failures.hpp"
#include "common/flags.hpp"
#include "common/generator.hpp"
#include "common/trace_routing.hpp"

namespace ferry::bench {
namespace {

constexpr std::int64_t kDefaultTokens = 512;
constexpr std::int64_t kDefaultHidden = 2048;
constexpr int kDefaultTopk = 8;
constexpr int kDefaultExperts = 64;
constexpr std::size_t kNumStrategies = 4;

/// Elements of a row. A trace that was named says what its model has; the one that comes with the
/// command is of a model so small that its rows would show little of what large ones cost.
std::int64_t hidden_of(const BenchOptions& options, const tools::TraceInfo& info) {
  if (options.hidden) return *options.hidden;
  if (options.routing_by_default) return kDefaultHidden;
  if (info.hidden == 0) {
    throw tools::UsageError(
        fmt::format("--trace {}: its meta.json names no hidden size; fix: add "
                    "--hidden H",
                    options.trace_directory));
  }
  return info.hidden;
}

Workload from_trace(const BenchOptions& options) {
  const tools::Trace trace = tools::Trace::load(options.trace_directory);
  const tools::TraceInfo& info = trace.info();
  Workload workload{Topology::uniform(options.num_nodes, options.ranks_per_node),
                    Placement::contiguous(info.num_experts, options.num_ranks()),
                    {hidden_of(options, info), options.dtype},
                    info.num_topk,
                    {},
                    "trace",
                    TraceSource{options.trace_directory, info.model, info.domain, options.layer,
                                options.routing_by_default},
                    {}};
  tools::TraceRouting shared = tools::share_out(
      trace, options.layer, tools::tokens_per_rank(options.tokens, options.num_ranks(), -1));
  workload.routing = std::move(shared.ranks);
  workload.notes = std::move(shared.notes);
  if (options.routing_by_default && !options.hidden && info.hidden != 0) {
    workload.notes.push_back(
        fmt::format("rows have {} elements, as in large models, where those of this one have {}; "
                    "--hidden sets it",
                    kDefaultHidden, info.hidden));
  }
  return workload;
}

Workload generated(const BenchOptions& options) {
  const int num_experts = options.num_experts.value_or(kDefaultExperts);
  const int num_topk = options.num_topk.value_or(std::min(kDefaultTopk, num_experts));
  const tools::RouterShape shape{num_experts, num_topk};
  tools::check_pattern(options.pattern, shape);
  Workload workload{Topology::uniform(options.num_nodes, options.ranks_per_node),
                    Placement::contiguous(num_experts, options.num_ranks()),
                    {options.hidden.value_or(kDefaultHidden), options.dtype},
                    num_topk,
                    {},
                    options.routing,
                    {},
                    {}};
  workload.routing = tools::generate_routing(
      options.pattern, shape,
      tools::tokens_per_rank(options.tokens, options.num_ranks(), kDefaultTokens), options.seed);
  return workload;
}

/// What is run where no flag says it: the trace that comes with the command. Where it is not there,
/// or has too few sequences for so many ranks: generated routing, and a note that says why.
Workload by_default(const BenchOptions& options) {
  std::string reason;
  if (options.trace_directory.empty()) {
    reason = fmt::format("the trace that comes with ferry is not at {}",
                         tools::default_trace_directory().string());
  } else {
    Workload workload = from_trace(options);
    const auto is_empty = [](const support::RoutingData& rank) { return rank.num_tokens == 0; };
    if (std::ranges::none_of(workload.routing, is_empty)) return workload;
    reason = fmt::format("the trace that comes with ferry has too few sequences for {} ranks",
                         options.num_ranks());
    if (options.layer != 0) {
      throw tools::UsageError(
          fmt::format("--layer {}: {}; fix: fewer ranks, or --trace DIR", options.layer, reason));
    }
  }
  Workload workload = generated(options);
  workload.notes.push_back(
      fmt::format("{}, so the routing is generated; --trace DIR takes a recorded one", reason));
  return workload;
}

Workload chosen(const BenchOptions& options) {
  if (options.routing_by_default) return by_default(options);
  return options.trace_directory.empty() ? generated(options) : from_trace(options);
}

/// Distinct values, ascending; small vectors, so sorting is the fast way.
void make_distinct(std::vector<int>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

/// Adds the rows of one token.
class TokenCounter {
 public:
  TokenCounter(const Workload& workload, RowCounts& counts)
      : workload_(workload), counts_(counts) {}

  void add(int source, std::span<const std::int32_t> experts) {
    const Topology& topology = workload_.topology;
    const int home = topology.node_of(source);
    experts_.assign(experts.begin(), experts.end());
    make_distinct(experts_);
    if (!experts_.empty() && experts_.front() < 0) experts_.erase(experts_.begin());
    ranks_.clear();
    nodes_.clear();
    for (const int expert : experts_) {
      const int rank = workload_.placement.rank_of(expert);
      if (workload_.layout == Layout::expert_major) received(rank);
      add_row(Strategy::flat, home, topology.node_of(rank));
      ranks_.push_back(rank);
    }
    make_distinct(ranks_);
    for (const int rank : ranks_) {
      if (workload_.layout == Layout::token_major) received(rank);
      add_row(Strategy::rank_dedup, home, topology.node_of(rank));
      nodes_.push_back(topology.node_of(rank));
    }
    make_distinct(nodes_);
    for (const int node : nodes_) {
      if (node == home) continue;
      ++counts_.bound;
      add_row(Strategy::node_dedup, home, node);
      ++rows_of(Strategy::node_gather).back.at(home, node);
    }
    for (int node = 0; node < topology.num_nodes(); ++node) {
      if (node != home) ++rows_of(Strategy::node_gather).out.at(home, node);
    }
  }

 private:
  void received(int rank) { ++counts_.received[static_cast<std::size_t>(rank)]; }
  StrategyRows& rows_of(Strategy strategy) {
    return counts_.strategies[static_cast<std::size_t>(strategy)];
  }
  void add_row(Strategy strategy, int home, int node) {
    if (node == home) return;
    ++rows_of(strategy).out.at(home, node);
    ++rows_of(strategy).back.at(home, node);
  }

  const Workload& workload_;
  RowCounts& counts_;
  std::vector<int> experts_;
  std::vector<int> ranks_;
  std::vector<int> nodes_;
};

}  // namespace

std::int64_t Workload::num_tokens() const {
  std::int64_t sum = 0;
  for (const support::RoutingData& rank : routing) sum += rank.num_tokens;
  return sum;
}

Workload make_workload(const BenchOptions& options) {
  Workload workload = chosen(options);
  workload.layout = options.layout;
  return workload;
}

Workload make_workload(const BenchOptions& options, const Topology& topology) {
  Workload workload = make_workload(options);
  workload.topology = topology;
  return workload;
}

std::int64_t NodeRows::total() const {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

std::int64_t NodeRows::into(int node) const {
  std::int64_t sum = 0;
  for (int source = 0; source < num_nodes; ++source) sum += at(source, node);
  return sum;
}

RowCounts count_rows(const Workload& workload) {
  const int num_nodes = workload.topology.num_nodes();
  const NodeRows none{num_nodes,
                      std::vector<std::int64_t>(static_cast<std::size_t>(num_nodes) * num_nodes)};
  RowCounts counts;
  counts.received.resize(static_cast<std::size_t>(workload.num_ranks()));
  counts.strategies.assign(kNumStrategies, {none, none});
  TokenCounter counter(workload, counts);
  const auto num_topk = static_cast<std::size_t>(workload.num_topk);
  for (int rank = 0; rank < workload.num_ranks(); ++rank) {
    const support::RoutingData& routing = workload.routing[static_cast<std::size_t>(rank)];
    for (std::size_t token = 0; token < static_cast<std::size_t>(routing.num_tokens); ++token) {
      counter.add(rank, std::span(routing.topk_idx).subspan(token * num_topk, num_topk));
    }
  }
  return counts;
}

std::uint64_t needed_bytes(const Workload& workload, const RowCounts& counts,
                           std::span<const int> ranks, const BenchOptions& options) {
  const std::uint64_t cold = cold_bytes_per_rank(static_cast<int>(ranks.size()));
  std::uint64_t bytes = 0;
  for (const int rank : ranks) {
    const auto at = static_cast<std::size_t>(rank);
    const auto tokens = static_cast<std::uint64_t>(workload.routing[at].num_tokens);
    const std::uint64_t rows =
        static_cast<std::uint64_t>(counts.received[at]) * workload.row_bytes();
    // x and out; the window's rows and outputs; both sides of the memcpy; the cooler.
    bytes += 2 * tokens * workload.row_bytes() + 4 * rows + cold;
    // Gradients of outputs and of x; of rows, and the windows of a step.
    if (options.backward) bytes += 2 * tokens * workload.row_bytes() + 3 * rows;
    if (!options.baseline) continue;
    // Of per-expert and of per-rank rows: expert rows, y, what is received and what is sent.
    const std::uint64_t sent =
        tokens * static_cast<std::uint64_t>(workload.num_topk) * workload.row_bytes();
    bytes += 2 * (3 * rows + sent);
  }
  return bytes;
}

}  // namespace ferry::bench
