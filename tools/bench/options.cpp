// Every refusal says which flag, which value, what is allowed and what to do.
#include "bench/options.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <string_view>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "bench/failures.hpp"

namespace ferry::bench {
namespace {

constexpr int kMaxRanks = 1024;
constexpr std::array kStrategies = {Strategy::flat, Strategy::rank_dedup, Strategy::node_gather,
                                    Strategy::node_dedup};

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

/// A whole text as a number; nothing when anything is left over.
template <typename Number>
std::optional<Number> number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

DType parse_dtype(std::string_view flag, std::string_view name) {
  const std::optional<DType> dtype = dtype_from_string(name);
  if (!dtype) {
    throw UsageError(fmt::format("{} {}: no such format; allowed: f32, bf16, f16", flag, name));
  }
  return *dtype;
}

void parse_wire(const std::string& text, BenchOptions& options) {
  if (text.empty()) return;
  constexpr std::string_view kCombine = "combine=";
  for (const std::string_view part : split(text, ',')) {
    if (part.substr(0, kCombine.size()) == kCombine) {
      options.wire_combine = parse_dtype("--wire combine", part.substr(kCombine.size()));
    } else {
      const DType both = parse_dtype("--wire", part);
      options.wire_dispatch = both;
      // `--wire NAME` is both directions, unless combine= says otherwise, in either order.
      if (!options.wire_combine) options.wire_combine = both;
    }
  }
}

std::vector<Strategy> parse_strategies(const std::string& text) {
  if (text == "all") return {kStrategies.begin(), kStrategies.end()};
  std::vector<Strategy> strategies;
  for (const std::string_view name : split(text, ',')) {
    const std::optional<Strategy> strategy = strategy_from_string(name);
    if (!strategy) {
      throw UsageError(fmt::format("--strategy {}: no such strategy; allowed: all, or a comma list "
                                   "of flat, rank_dedup, node_gather, node_dedup",
                                   name));
    }
    for (const Strategy earlier : strategies) {
      if (earlier == *strategy) {
        throw UsageError(fmt::format("--strategy {}: {} is named twice; fix: name each once", text,
                                     name));
      }
    }
    strategies.push_back(*strategy);
  }
  return strategies;
}

std::vector<std::int64_t> parse_tokens(const std::string& text, int num_ranks) {
  if (text.empty()) return {};
  std::vector<std::int64_t> tokens;
  for (const std::string_view part : split(text, ',')) {
    const std::optional<std::int64_t> count = number<std::int64_t>(part);
    constexpr std::int64_t kMaxTokens = 1 << 24;
    if (!count || *count < 0 || *count > kMaxTokens) {
      throw UsageError(fmt::format("--tokens {}: '{}' is no token count; allowed: 0..{}", text,
                                   part, kMaxTokens));
    }
    tokens.push_back(*count);
  }
  if (tokens.size() != 1 && tokens.size() != static_cast<std::size_t>(num_ranks)) {
    throw UsageError(fmt::format("--tokens {}: {} counts for {} ranks; fix: give one count for "
                                 "all ranks, or one per rank",
                                 text, tokens.size(), num_ranks));
  }
  return tokens;
}

std::optional<double> parse_routing(const std::string& text) {
  constexpr std::string_view kZipf = "zipf:";
  if (text == "uniform") return std::nullopt;
  if (text.substr(0, kZipf.size()) == kZipf) {
    const std::optional<double> exponent =
        number<double>(std::string_view(text).substr(kZipf.size()));
    if (exponent && *exponent >= 0 && *exponent <= 10) return exponent;
  }
  throw UsageError(fmt::format("--routing {}: no such routing; allowed: uniform, or zipf:S with "
                               "the exponent S in 0..10, for example zipf:1.0",
                               text));
}

Fault parse_fault(const std::string& text) {
  if (text == "none") return Fault::none;
  if (text == "row") return Fault::row;
  if (text == "out") return Fault::out;
  if (text == "bytes") return Fault::bytes;
  throw UsageError(fmt::format("--inject-fault {}: allowed: none, row, out, bytes", text));
}

/// Only what the trace does not decide may be given beside --trace.
void check_trace_flags(const BenchOptions& options) {
  if (options.trace_directory.empty()) {
    if (options.layer != 0) {
      throw UsageError(fmt::format("--layer {}: only a trace has layers; fix: add --trace DIR",
                                   options.layer));
    }
    return;
  }
  if (options.num_topk || options.num_experts || options.routing != "uniform") {
    throw UsageError("--trace decides the routing, top-k and experts; fix: leave out --routing, "
                     "--topk and --experts");
  }
}

void check_ranges(const BenchOptions& options) {
  const auto check = [](std::string_view flag, std::int64_t value, std::int64_t low,
                        std::int64_t high) {
    if (value < low || value > high) {
      throw UsageError(fmt::format("{} {}: allowed: {}..{}", flag, value, low, high));
    }
  };
  check("--nodes", options.num_nodes, 1, kMaxRanks);
  check("--ranks-per-node", options.ranks_per_node, 1, kMaxRanks);
  check("--nodes times --ranks-per-node", std::int64_t{options.num_nodes} * options.ranks_per_node,
        1, kMaxRanks);
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
    const std::optional<double> value = number<double>(digits);
    if (value && *value > 0 && std::isfinite(*value)) return *value * unit.bits_per_s;
  }
  throw UsageError(fmt::format("--link-rate {}: no rate; allowed: a number > 0 with kbit, mbit, "
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
  add(kWhat, "--routing", plain.routing, "generated routing: uniform, or zipf:S for skew")
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
  options.dtype = parse_dtype("--dtype", flags.dtype);
  parse_wire(flags.wire, options);
  options.link_bits_per_s = parse_link_rate(flags.link_rate);
  options.tokens = parse_tokens(flags.tokens, options.num_ranks());
  options.zipf_exponent = parse_routing(options.routing);
  options.fault = parse_fault(flags.fault);
  check_trace_flags(options);
  return options;
}

}  // namespace ferry::bench
