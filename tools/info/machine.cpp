// hwloc for the topology, Highway for what the kernels will choose, and Linux for the rest.
#include "info/machine.hpp"

#include <hwloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <bit>
#include <fstream>
#include <memory>
#include <sstream>

#include <hwy/highway.h>

#include "common/failures.hpp"

namespace ferry::info {
namespace {

/// What the kernels (through Highway) and the checksum (through ISA-L) make use of.
constexpr std::array kUsedFeatures = {
    "sse4_1",      "sse4_2",      "avx2",      "fma",        "f16c",  "avx512f", "avx512bw",
    "avx512_bf16", "avx512_fp16", "pclmulqdq", "vpclmulqdq", "asimd", "sve",     "crc32"};

/// The value behind "key : value" of the first CPU in /proc/cpuinfo; empty where there is none.
std::string cpuinfo(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    std::string name = line.substr(0, colon);
    name.erase(name.find_last_not_of(" \t") + 1);
    if (name == key) return line.substr(std::min(colon + 2, line.size()));
  }
  return "";
}

std::vector<std::string> simd_targets() {
  std::vector<std::string> names;
  // Highway numbers better targets lower.
  for (std::int64_t targets = hwy::SupportedTargets() & HWY_TARGETS; targets != 0;
       targets &= targets - 1) {
    names.push_back(hwy::TargetName(targets & -targets));
  }
  return names;
}

struct DestroyTopology {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
using TopologyHandle = std::unique_ptr<hwloc_topology, DestroyTopology>;

TopologyHandle load_topology() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) {
    throw tools::EnvironmentError("hwloc has no memory for a topology; fix: free some");
  }
  TopologyHandle topology(raw);
  // All of the machine, so that what the process may use can be told from what is there.
  if (hwloc_topology_set_flags(raw, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED) != 0 ||
      hwloc_topology_load(raw) != 0) {
    throw tools::EnvironmentError(
        "hwloc cannot read the topology of this machine; fix: see whether /sys and /proc are "
        "mounted and readable, and whether HWLOC_XMLFILE names a valid file");
  }
  return topology;
}

int count(hwloc_topology_t topology, hwloc_obj_type_t type) {
  return std::max(0, hwloc_get_nbobjs_by_type(topology, type));
}

std::uint64_t cache_bytes(hwloc_topology_t topology, hwloc_obj_type_t type) {
  const hwloc_obj_t cache = hwloc_get_obj_by_type(topology, type, 0);
  return cache == nullptr ? 0 : cache->attr->cache.size;
}

std::uint64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    std::uint64_t kibibytes = 0;
    if (words >> key >> kibibytes && key == "MemAvailable:") return kibibytes * 1024;
  }
  return 0;
}

std::optional<std::uint64_t> limit_of(__rlimit_resource resource) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

/// "QUOTA PERIOD" in microseconds, or "max PERIOD".
std::optional<double> cpu_quota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0;
  double period = 0;
  if (file >> quota >> period && period > 0) return quota / period;
  return std::nullopt;
}

/// The word in brackets, for example of "always [madvise] never".
std::string huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  std::getline(file, line);
  const std::size_t open = line.find('[');
  const std::size_t close = line.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return "";
  return line.substr(open + 1, close - open - 1);
}

}  // namespace

Cpu read_cpu() {
  Cpu cpu;
  cpu.model = cpuinfo("model name");
  // x86 calls them flags, Arm Features.
  std::istringstream words(cpuinfo("flags") + " " + cpuinfo("Features"));
  for (std::string word; words >> word;) {
    if (std::find(kUsedFeatures.begin(), kUsedFeatures.end(), word) != kUsedFeatures.end()) {
      cpu.features.push_back(word);
    }
  }
  cpu.simd_targets = simd_targets();
  return cpu;
}

MachineTopology read_topology() {
  const TopologyHandle handle = load_topology();
  hwloc_topology* const topology = handle.get();
  MachineTopology machine;
  machine.num_sockets = count(topology, HWLOC_OBJ_PACKAGE);
  machine.num_numa_nodes = count(topology, HWLOC_OBJ_NUMANODE);
  machine.num_cores = count(topology, HWLOC_OBJ_CORE);
  machine.num_threads = count(topology, HWLOC_OBJ_PU);
  const hwloc_bitmap_t bound = hwloc_bitmap_alloc();
  if (bound != nullptr && hwloc_get_cpubind(topology, bound, HWLOC_CPUBIND_PROCESS) == 0) {
    machine.num_allowed_threads = hwloc_bitmap_weight(bound);
  } else {
    machine.num_allowed_threads = hwloc_bitmap_weight(hwloc_topology_get_allowed_cpuset(topology));
  }
  hwloc_bitmap_free(bound);
  machine.l2_bytes = cache_bytes(topology, HWLOC_OBJ_L2CACHE);
  machine.l3_bytes = cache_bytes(topology, HWLOC_OBJ_L3CACHE);
  machine.memory_bytes = hwloc_get_root_obj(topology)->total_memory;
  machine.available_memory_bytes = available_memory();
  return machine;
}

Limits read_limits() {
  return {.memlock_bytes = limit_of(RLIMIT_MEMLOCK),
          .open_files = limit_of(RLIMIT_NOFILE),
          .cpu_quota = cpu_quota(),
          .huge_pages = huge_pages()};
}

}  // namespace ferry::info
