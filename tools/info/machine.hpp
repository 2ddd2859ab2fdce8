#pragma once
// What this machine is to an exchange: its cores, caches and memory, which SIMD targets the kernels
// can use on it, and the limits of the process that matter. Read once; nothing is changed.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ferry::info {

struct Cpu {
  std::string model;                  ///< empty where the system does not say
  std::vector<std::string> features;  ///< those that Ferry's kernels or libraries can use
  /// SIMD targets of the kernels, best first: those that this build has and this CPU can run.
  std::vector<std::string> simd_targets;
};

/// What the process may use of the machine; counts are of objects that hwloc sees.
struct MachineTopology {
  int num_sockets = 0;
  int num_numa_nodes = 0;
  int num_cores = 0;
  int num_threads = 0;          ///< hardware threads
  int num_allowed_threads = 0;  ///< of them, those that this process may run on
  std::uint64_t l2_bytes = 0;   ///< of one cache; 0 = unknown
  std::uint64_t l3_bytes = 0;   ///< of one cache
  std::uint64_t memory_bytes = 0;
  std::uint64_t available_memory_bytes = 0;  ///< 0 = unknown
};

/// Unset = unlimited, or unknown where the system does not say.
struct Limits {
  std::optional<std::uint64_t> memlock_bytes;
  std::optional<std::uint64_t> open_files;
  std::optional<double> cpu_quota;  ///< in cores, of the control group
  std::string huge_pages;           ///< "always", "madvise", "never"; empty = unknown
};

Cpu read_cpu();
/// Errors: EnvironmentError when hwloc cannot read the topology
MachineTopology read_topology();
Limits read_limits();

}  // namespace ferry::info
