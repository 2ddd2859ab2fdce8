// Every refusal says which flag, which value, what is allowed and what to do.
#include "bench/options.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "common/default_trace.hpp"
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
  if (text == "baseline") return Fault::baseline;
  throw tools::UsageError(
      fmt::format("--inject-fault {}: allowed: none, row, out, bytes, baseline", text));
}

/// Nodes and ranks of each in a job whose size the launcher decided.
void fit_shape(const launch::Launcher& launcher, BenchOptions& options) {
  const int size = launcher.num_ranks;
  if (!options.num_nodes_given && !options.ranks_per_node_given && size > 0) {
    options.machines_as_found = true;
    options.num_nodes = 1;
    options.ranks_per_node = size;
    return;
  }
  if (size <= 0) {
    if (options.num_nodes_given && options.ranks_per_node_given) return;
    throw tools::UsageError(
        fmt::format("{} does not say how many ranks it started; fix: give --nodes and "
                    "--ranks-per-node",
                    launcher.name));
  }
  if (!options.ranks_per_node_given) {
    options.ranks_per_node = std::max(1, size / options.num_nodes);
  }
  if (!options.num_nodes_given) {
    options.num_nodes = std::max(1, size / options.ranks_per_node);
  }
  if (options.num_ranks() == size) return;
  throw tools::UsageError(fmt::format(
      "--nodes {} --ranks-per-node {}: {} ranks, but {} started {}; fix: make their "
      "product {}, or leave both out and nodes are the machines",
      options.num_nodes, options.ranks_per_node, options.num_ranks(), launcher.name, size, size));
}

/// What a launcher decides, and what only ranks of one can do.
void check_launcher_flags(const std::optional<launch::Launcher>& launcher,
                          const BenchOptions& options) {
  if (options.fault == Fault::baseline && !options.baseline) {
    throw tools::UsageError("--inject-fault baseline: allowed only with --baseline alltoallv");
  }
  if (launcher) {
    if (options.link_bits_per_s > 0) {
      throw tools::UsageError(
          fmt::format("--link-rate under {}: only ranks that are threads have links with a rate; "
                      "fix: leave it out, or start ferry bench without the launcher",
                      launcher->name));
    }
    return;
  }
  if (options.baseline || options.rail_message) {
    throw tools::UsageError(
        fmt::format("--baseline {}: needs ranks that are MPI processes; fix: start it with "
                    "`mpirun -n {} ferry bench ...` and without --mpi off",
                    options.baseline ? "alltoallv" : "rail_message", options.num_ranks()));
  }
}

void parse_baselines(const BenchFlags& flags, BenchOptions& options) {
  for (const std::string& name : flags.baselines) {
    if (name == "alltoallv") {
      options.baseline = true;
    } else if (name == "rail_message") {
      options.rail_message = true;
    } else {
      throw tools::UsageError(
          fmt::format("--baseline {}: no such baseline; allowed: alltoallv, rail_message", name));
    }
  }
  if (!options.baseline) return;
  if (options.layout != Layout::expert_major || options.weights != WeightMode::at_combine) {
    throw tools::UsageError(
        fmt::format("--baseline alltoallv: does what --layout expert_major --weights at_combine "
                    "does, not {} and {}; fix: leave those flags out",
                    to_string(options.layout), to_string(options.weights)));
  }
}

/// Where the routing comes from. Only what the trace does not decide may be given beside --trace;
/// without any flag that says what is routed, it is the trace that comes with the command.
void choose_routing(const BenchFlags& flags, BenchOptions& options) {
  const bool generated = options.num_topk || options.num_experts || !flags.routing.empty();
  if (!options.trace_directory.empty() && generated) {
    throw tools::UsageError(
        "--trace decides the routing, top-k and experts; fix: leave out --routing, "
        "--topk and --experts");
  }
  options.routing_by_default =
      options.trace_directory.empty() && !generated && flags.tokens.empty();
  if (options.routing_by_default) {
    const std::filesystem::path directory = tools::default_trace_directory();
    std::error_code error;
    if (std::filesystem::is_directory(directory, error)) options.trace_directory = directory;
  }
  tools::check_layer(options.trace_directory, options.layer);
  if (!flags.routing.empty()) options.routing = flags.routing;
  options.pattern = tools::parse_routing(options.routing);
}

void check_ranges(const BenchOptions& options) {
  const auto check = [](std::string_view flag, std::int64_t value, std::int64_t low,
                        std::int64_t high) {
    tools::check_range(flag, value, {low, high});
  };
  tools::check_ranks(options.num_nodes, options.ranks_per_node);
  if (options.mpi != "auto" && options.mpi != "openmpi" && options.mpi != "mpich" &&
      options.mpi != "off") {
    throw tools::UsageError(
        fmt::format("--mpi {}: allowed: auto, openmpi, mpich, off", options.mpi));
  }
  check("--repeat", options.repeat, 1, 1'000'000);
  check("--hidden", options.hidden.value_or(1), 1, 1 << 20);
  check("--topk", options.num_topk.value_or(1), 1, 64);
  check("--experts", options.num_experts.value_or(1), 1, 1 << 16);
  check("--fragment-bytes", options.fragment_bytes, 0, 1 << 30);
  check("--range-tokens", options.range_tokens, 0, std::int64_t{1} << 32);
}

/// A variable that holds a number above 0; nothing where it is not set.
std::optional<double> number_in(const char* variable, std::string_view unit) {
  const char* const text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return std::nullopt;
  const std::optional<double> value = tools::number<double>(text);
  if (value && std::isfinite(*value) && *value >= 0) return value;
  throw tools::UsageError(
      fmt::format("{}={}: allowed: a number of {}, at least 0; fix: correct or unset it", variable,
                  text, unit));
}

class FlagGroup {
 public:
  FlagGroup(CLI::App& command, const char* group) : command_(command), group_(group) {}
  const char* name() const { return group_; }
  template <typename Value>
  CLI::Option* add(const char* name, Value& value, const char* help) const {
    return command_.add_option(name, value, help)->group(group_);
  }

 private:
  CLI::App& command_;
  const char* group_;
};

void add_what_flags(const FlagGroup& group, BenchFlags& flags) {
  BenchOptions& plain = flags.plain;
  group
      .add("--trace", plain.trace_directory,
           "routing trace of a real model: topk_idx.npy, meta.json [, topk_weights.npy]; default: "
           "the one\n"
           "that comes with ferry, unless --routing, --tokens, --topk or --experts is given")
      ->type_name("DIR");
  group.add("--layer", plain.layer, "layer of the trace")->capture_default_str();
  group
      .add("--routing", flags.routing,
           "generated routing: uniform; zipf:S, skewed; khot:K, every token takes K hot experts "
           "first;\n"
           "group:G,M, experts of M of G groups per token; default uniform, where it is generated")
      ->type_name("PATTERN");
  group
      .add("--tokens", flags.tokens,
           "tokens per rank, or a comma list with one count per rank; default 512, or the whole "
           "trace")
      ->type_name("T");
  group.add("--hidden", plain.hidden, "elements of a row; default 2048, or those of --trace DIR");
  group.add("--topk", plain.num_topk, "experts per token; default 8");
  group.add("--experts", plain.num_experts, "experts of all ranks; default 64");
  group.add("--dtype", flags.dtype, "f32, bf16 or f16")->capture_default_str();
  group.add("--seed", plain.seed, "of rows and generated routing")->capture_default_str();
}

void add_where_flags(const FlagGroup& group, BenchFlags& flags) {
  BenchOptions& plain = flags.plain;
  group
      .add("--nodes", plain.num_nodes,
           "nodes (ranks of a node share memory); under mpirun: the machines, or virtual nodes of "
           "them")
      ->capture_default_str()
      ->each([&plain](const std::string&) { plain.num_nodes_given = true; });
  group
      .add("--ranks-per-node", plain.ranks_per_node,
           "ranks of each node: threads, or under mpirun the processes that it started")
      ->capture_default_str()
      ->each([&plain](const std::string&) { plain.ranks_per_node_given = true; });
  group
      .add(
          "--mpi", plain.mpi,
          "auto: the launcher's MPI, threads without a launcher; openmpi or mpich: that one; off:\n"
          "threads in any case")
      ->capture_default_str();
  group
      .add("--strategy", flags.strategy,
           "all, or a comma list of flat, rank_dedup, node_gather, node_dedup")
      ->capture_default_str();
  group
      .add("--layout", flags.layout,
           "rows of a window: expert_major, one per (token, expert); token_major, one per (token, "
           "rank)")
      ->capture_default_str();
  group
      .add("--weights", flags.weights,
           "who applies routing weights: at_combine, at_expert (the caller) or none")
      ->capture_default_str();
  group.add("--wire", flags.wire, tools::kWireHelp)->type_name("NAME");
  group
      .add("--link-rate", flags.link_rate,
           "slow each node's link to this rate, for example 1gbit; 0 = as fast as memory")
      ->capture_default_str();
  group
      .add("--fragment-bytes", plain.fragment_bytes,
           "bytes of one message between nodes; 0 = what the transport prefers")
      ->capture_default_str();
  group.add("--range-tokens", plain.range_tokens, "tokens per range; 0 = chosen by the library")
      ->capture_default_str();
}

}  // namespace

LabLink read_lab_link() {
  LabLink link;
  link.bits_per_s = number_in("FERRY_LAB_LINK_RATE", "bits per second").value_or(0);
  link.burst_bytes =
      static_cast<std::uint64_t>(number_in("FERRY_LAB_LINK_BURST", "bytes").value_or(0));
  return link;
}

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
  add_what_flags({command, "What is exchanged"}, flags);
  add_where_flags({command, "Where and how"}, flags);
  const FlagGroup group(command, "How it is measured and told");
  BenchOptions& plain = flags.plain;
  group
      .add("--baseline", flags.baselines,
           "alltoallv: also measure MPI_Alltoallv with packing and unpacking, with one row per "
           "(token,\n"
           "expert) and with one per (token, rank). rail_message: one message per node of a "
           "strategy's\n"
           "bytes, then a barrier of the node. Both need mpirun")
      ->type_name("NAME");
  command
      .add_flag("--backward", plain.backward,
                "also measure combine_backward, dispatch_backward and a whole step: plan, forward, "
                "backward")
      ->group(group.name());
  command
      .add_flag("--no-reuse", plain.no_reuse,
                "with --backward: also a step that exchanges its metadata before each of the four\n"
                "operations, as an implementation without plans does")
      ->group(group.name());
  group.add("--repeat", plain.repeat, "timed repeats, after one warm-up")->capture_default_str();
  command.add_flag("--json", plain.json, "one JSON object per line and strategy; docs/metrics.md")
      ->group(group.name());
  group
      .add("--inject-fault", flags.fault,
           "break a received row, a sum, a byte count or a row of the baseline on purpose (row, "
           "out, "
           "bytes,\n"
           "baseline), to see exit 3")
      ->capture_default_str();
}

BenchOptions parse_bench_flags(const BenchFlags& flags,
                               const std::optional<launch::Launcher>& launcher) {
  BenchOptions options = flags.plain;
  check_ranges(options);
  if (launcher) fit_shape(*launcher, options);
  options.all_strategies = flags.strategy == "all";
  options.strategies = parse_strategies(flags.strategy);
  parse_modes(flags, options);
  options.dtype = tools::parse_dtype("--dtype", flags.dtype);
  options.wire = tools::parse_wire(flags.wire);
  options.link_bits_per_s = parse_link_rate(flags.link_rate);
  options.wire.link_bytes_per_s_per_rank = options.link_bits_per_s / 8 / options.ranks_per_node;
  static_cast<void>(options.wire.filled_in(options.dtype));  // refuses what does not go together
  options.tokens = tools::parse_tokens(flags.tokens, options.num_ranks());
  options.fault = parse_fault(flags.fault);
  parse_baselines(flags, options);
  if (options.no_reuse && !options.backward) {
    throw tools::UsageError("--no-reuse: allowed only with --backward; fix: add it");
  }
  check_launcher_flags(launcher, options);
  choose_routing(flags, options);
  return options;
}

}  // namespace ferry::bench
