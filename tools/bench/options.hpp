#pragma once
// The flags of `ferry bench`: their text forms, and what they mean.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/flags.hpp"
#include "common/generator.hpp"
#include "ferry/dtype.hpp"
#include "ferry/launch.hpp"
#include "ferry/options.hpp"

namespace CLI {
class App;  // CLI/CLI.hpp takes seconds to compile; few files need all of it
}

namespace ferry::bench {

/// What one run breaks on purpose, so that anybody can see that the verification notices.
enum class Fault : std::uint8_t { none, row, out, bytes, baseline };

struct BenchOptions {
  // What is exchanged
  std::string trace_directory;  ///< empty = generated routing
  /// No flag said what is routed: it is the trace that comes with the command, in trace_directory,
  /// or generated where that is not there.
  bool routing_by_default = false;
  int layer = 0;
  std::string routing = "uniform";   ///< as given
  tools::RoutingPattern pattern;     ///< what it says
  std::vector<std::int64_t> tokens;  ///< one for all ranks, or one per rank; empty = default
  std::optional<std::int64_t> hidden;
  std::optional<int> num_topk;
  std::optional<int> num_experts;
  DType dtype = DType::bf16;
  std::uint64_t seed = 1;

  // Where and how
  int num_nodes = 2;
  int ranks_per_node = 4;
  bool num_nodes_given = false;
  bool ranks_per_node_given = false;
  /// Under a launcher without either flag: nodes are the machines, whatever they turn out to be.
  bool machines_as_found = false;
  std::string mpi = "auto";
  std::vector<Strategy> strategies;
  bool all_strategies = false;  ///< then one that does not go with the layout is left out
  Layout layout = Layout::expert_major;
  WeightMode weights = WeightMode::at_combine;
  tools::WireFormats wire;
  double link_bits_per_s = 0;
  std::int64_t fragment_bytes = 0;
  std::int64_t range_tokens = 0;

  // How it is measured and told
  int repeat = 10;
  bool baseline = false;      ///< MPI_Alltoallv, per-expert and per-rank rows
  bool rail_message = false;  ///< one message per node of the bytes of each strategy
  bool backward = false;      ///< combine_backward and dispatch_backward, and a whole step
  bool no_reuse = false;      ///< also a step that plans anew before each operation
  bool json = false;
  Fault fault = Fault::none;

  int num_ranks() const { return num_nodes * ranks_per_node; }
};

/// The flags as text, filled by CLI11.
struct BenchFlags {
  BenchOptions plain;   ///< flags that need no parsing beyond CLI11's
  std::string routing;  ///< empty = not given
  std::string strategy = "all";
  std::string dtype = "bf16";
  std::string wire;
  std::string layout = "expert_major";
  std::string weights = "at_combine";
  std::string link_rate = "0";
  std::string tokens;
  std::string fault = "none";
  std::vector<std::string> baselines;
};

/// Adds the flags to the subcommand; `flags` must live until it has been parsed.
void add_bench_flags(CLI::App& command, BenchFlags& flags);

/// `launcher`: what started this process as one rank, if anything did; it decides the ranks.
/// Errors: UsageError that names the flag, its value, what is allowed and the fix.
BenchOptions parse_bench_flags(const BenchFlags& flags,
                               const std::optional<launch::Launcher>& launcher = std::nullopt);

/// What a lab tells its ranks about the links between nodes: FERRY_LAB_LINK_RATE in bits per second
/// and FERRY_LAB_LINK_BURST, bytes that pass a link without using up its rate.
struct LabLink {
  double bits_per_s = 0;  ///< 0 = not known
  std::uint64_t burst_bytes = 0;
};
/// Errors: UsageError with the variable and its text.
LabLink read_lab_link();

/// "1gbit", "100mbit", "2.5gbit": bits per second; "0" = no pacing.
double parse_link_rate(const std::string& text);

}  // namespace ferry::bench
