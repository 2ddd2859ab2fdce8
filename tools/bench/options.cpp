// Every refusal says which flag, which value, what is allowed and what to do.
#include "bench/options.hpp"

#include <array>
#include <cmath>
#include <string_view>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "common/failures.hpp"
#include "common/flags.hpp"
#include "common/trace_routing.hpp"

namespace ferry::bench {
namespace {

constexpr std::array kStrategies = {Strategy::flat, Strategy::rank_dedup, Strategy::node_gather,
                                    Strategy::node_dedup};

std::vector<Strategy> parse_strategies(const std::string& text) {
  if (text == "all") return {kStrategies.begin(), kStrategies.end()};
  std::vector<Strategy> strategies;
  for (const std::string_view name : tools::split(text, ',')) {
    const std::optional<Strategy> strategy = strategy_from_string(name);
    if (!strategy) {
      throw tools::UsageError(
          fmt::format("--strategy {}: no such strategy; allowed: all, or a comma list "
                      "of flat, rank_dedup, node_gather, node_dedup",
                      name));
    }
    for (const Strategy earlier : strategies) {
      if (earlier == *strategy) {
        throw tools::UsageError(
            fmt::format("--strategy {}: {} is named twice; fix: name each once", text, name));
      }
    }
    strategies.push_back(*strategy);
  }
  return strategies;
}

/// Layout, weights, and the strategies that go with them.
void parse_modes(const BenchFlags& flags, BenchOptions& options) {
  const std::optional<Layout> layout = layout_from_string(flags.layout);
  if (!layout) {
    throw tools::UsageError(
        fmt::format("--layout {}: allowed: expert_major, token_major", flags.layout));
  }
  const std::optional<WeightMode> weights = weight_mode_from_string(flags.weights);
  if (!weights) {
    throw tools::UsageError(
        fmt::format("--weights {}: allowed: at_combine, at_expert, none", flags.weights));
  }
  options.layout = *layout;
  options.weights = *weights;
  if (*layout == Layout::expert_major) return;
  if (*weights == WeightMode::at_combine) {
    throw tools::UsageError(
        "--layout token_major: one row stands for several experts, so combine cannot weight them; "
        "fix: --weights at_expert or none");
  }
  const std::size_t removed = std::erase(options.strategies, Strategy::flat);
  if (removed > 0 && !options.all_strategies) {
    throw tools::UsageError(
        "--strategy flat: sends one row per expert, which is not --layout token_major; fix: leave "
        "it out");
  }
}

Fault parse_fault(const std::string& text) {
  if (text == "none") return Fault::none;
  if (text == "row") return Fault::row;
  if (text == "out") return Fault::out;
  if (text == "bytes") return Fault::bytes;
  throw tools::UsageError(fmt::format("--inject-fault {}: allowed: none, row, out, bytes", text));
}

/// Only what the trace does not decide may be given beside --trace.
void check_trace_flags(const BenchOptions& options) {
  tools::check_layer(options.trace_directory, options.layer);
  if (options.trace_directory.empty()) return;
  if (options.num_topk || options.num_experts || options.routing != "uniform") {
    throw tools::UsageError(
        "--trace decides the routing, top-k and experts; fix: leave out --routing, "
        "--topk and --experts");
  }
}

void check_ranges(const BenchOptions& options) {
  const auto check = [](std::string_view flag, std::int64_t value, std::int64_t low,
                        std::int64_t high) {
    tools::check_range(flag, value, {low, high});
  };
  tools::check_ranks(options.num_nodes, options.ranks_per_node);
  check("--repeat", options.repeat, 1, 1'000'000);
  check("--hidden", options.hidden.value_or(1), 1, 1 << 20);
  check("--topk", options.num_topk.value_or(1), 1, 64);
  check("--experts", options.num_experts.value_or(1), 1, 1 << 16);
  check("--fragment-bytes", options.fragment_bytes, 0, 1 << 30);
  check("--range-tokens", options.range_tokens, 0, std::int64_t{1} << 32);
}

}  // namespace

double parse_link_rate(const std::string& text) {
  if (text == "0") return 0;
  struct Unit {
    std::string_view name;
    double bits_per_s;
  };
  static constexpr Unit kUnits[] = {{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}, {"tbit", 1e12}};
  for (const Unit& unit : kUnits) {
    if (text.size() <= unit.name.size() || !std::string_view(text).ends_with(unit.name)) continue;
    const std::string_view digits(text.data(), text.size() - unit.name.size());
    const std::optional<double> value = tools::number<double>(digits);
    if (value && *value > 0 && std::isfinite(*value)) return *value * unit.bits_per_s;
  }
  throw tools::UsageError(
      fmt::format("--link-rate {}: no rate; allowed: a number > 0 with kbit, mbit, "
                  "gbit or tbit (bits per second), for example 1gbit; 0 = as fast as "
                  "memory",
                  text));
}

void add_bench_flags(CLI::App& command, BenchFlags& flags) {
  BenchOptions& plain = flags.plain;
  const auto add = [&command](const char* group, const char* name, auto& value, const char* help) {
    return command.add_option(name, value, help)->group(group);
  };
  constexpr const char* kWhat = "What is exchanged";
  add(kWhat, "--trace", plain.trace_directory,
      "routing trace of a real model: topk_idx.npy, meta.json [, topk_weights.npy]")
      ->type_name("DIR");
  add(kWhat, "--layer", plain.layer, "layer of the trace")->capture_default_str();
  add(kWhat, "--routing", plain.routing,
      "generated routing: uniform; zipf:S, skewed; khot:K, every token takes K hot experts first;\n"
      "group:G,M, experts of M of G groups per token")
      ->capture_default_str();
  add(kWhat, "--tokens", flags.tokens,
      "tokens per rank, or a comma list with one count per rank; default 512, or the whole trace")
      ->type_name("T");
  add(kWhat, "--hidden", plain.hidden, "elements of a row; default 2048, or the trace's");
  add(kWhat, "--topk", plain.num_topk, "experts per token; default 8");
  add(kWhat, "--experts", plain.num_experts, "experts of all ranks; default 64");
  add(kWhat, "--dtype", flags.dtype, "f32, bf16 or f16")->capture_default_str();
  add(kWhat, "--seed", plain.seed, "of rows and generated routing")->capture_default_str();

  constexpr const char* kWhere = "Where and how";
  add(kWhere, "--nodes", plain.num_nodes, "nodes (ranks of a node share memory)")
      ->capture_default_str();
  add(kWhere, "--ranks-per-node", plain.ranks_per_node, "ranks of each node, one thread each")
      ->capture_default_str();
  add(kWhere, "--strategy", flags.strategy,
      "all, or a comma list of flat, rank_dedup, node_gather, node_dedup")
      ->capture_default_str();
  add(kWhere, "--layout", flags.layout,
      "rows of a window: expert_major, one per (token, expert); token_major, one per (token, rank)")
      ->capture_default_str();
  add(kWhere, "--weights", flags.weights,
      "who applies routing weights: at_combine, at_expert (the caller) or none")
      ->capture_default_str();
  add(kWhere, "--wire", flags.wire,
      "format of rows between nodes: NAME for both directions [,combine=NAME]; default the dtype")
      ->type_name("NAME");
  add(kWhere, "--link-rate", flags.link_rate,
      "slow each node's link to this rate, for example 1gbit; 0 = as fast as memory")
      ->capture_default_str();
  add(kWhere, "--fragment-bytes", plain.fragment_bytes,
      "bytes of one message between nodes; 0 = what the transport prefers")
      ->capture_default_str();
  add(kWhere, "--range-tokens", plain.range_tokens, "tokens per range; 0 = chosen by the library")
      ->capture_default_str();

  constexpr const char* kTold = "How it is measured and told";
  add(kTold, "--repeat", plain.repeat, "timed repeats, after one warm-up")->capture_default_str();
  command.add_flag("--json", plain.json, "one JSON object per line and strategy; docs/metrics.md")
      ->group(kTold);
  add(kTold, "--inject-fault", flags.fault,
      "break a received row, a sum or a byte count on purpose (row, out, bytes), to see exit 3")
      ->capture_default_str();
}

BenchOptions parse_bench_flags(const BenchFlags& flags) {
  BenchOptions options = flags.plain;
  check_ranges(options);
  options.all_strategies = flags.strategy == "all";
  options.strategies = parse_strategies(flags.strategy);
  parse_modes(flags, options);
  options.dtype = tools::parse_dtype("--dtype", flags.dtype);
  const tools::WireFormats wire = tools::parse_wire(flags.wire);
  options.wire_dispatch = wire.dispatch;
  options.wire_combine = wire.combine;
  options.link_bits_per_s = parse_link_rate(flags.link_rate);
  options.tokens = tools::parse_tokens(flags.tokens, options.num_ranks());
  options.pattern = tools::parse_routing(options.routing);
  options.fault = parse_fault(flags.fault);
  check_trace_flags(options);
  return options;
}

}  // namespace ferry::bench
