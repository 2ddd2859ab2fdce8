// What is on and off comes from how this file was compiled: CMake defines FERRY_VERSION,
// FERRY_BUILD_TYPE and FERRY_SANITIZER for it.
#include "info/command.hpp"

#include <cstdio>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "common/text.hpp"

namespace ferry::info {
namespace {

using Json = nlohmann::ordered_json;

std::string compiler() {
#if defined(__clang__)
  return "Clang " __clang_version__;
#elif defined(__GNUC__)
  return "GCC " __VERSION__;
#else
  return "unknown";
#endif
}

std::vector<Part> build_parts() {
#if defined(FERRY_ASSERT_SLOW_ENABLED)
  constexpr bool kSlowAssertions = true;
#else
  constexpr bool kSlowAssertions = false;
#endif
  const std::string sanitizer = FERRY_SANITIZER;
  return {{"mpi", false, "not in this build"},
          {"python", false, "not in this build"},
          {"slow_assertions", kSlowAssertions, "-DFERRY_ASSERT_SLOW=ON"},
          {"sanitizer", !sanitizer.empty(),
           sanitizer.empty() ? "-DFERRY_SANITIZE=address or thread" : sanitizer}};
}

Json json_of(const std::vector<Part>& parts) {
  Json json = Json::object();
  for (const Part& part : parts) json[part.name] = {{"on", part.on}, {"note", part.note}};
  return json;
}

template <typename Value>
Json or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json(nullptr);
}

std::string size_of(std::uint64_t bytes) {
  if (bytes == 0) return "unknown";
  if (bytes >= 10'000'000'000ULL) return fmt::format("{:.1f} GB", static_cast<double>(bytes) / 1e9);
  return fmt::format("{:.2f} MB", static_cast<double>(bytes) / 1e6);
}

std::string or_unlimited(const std::optional<std::uint64_t>& value, bool is_bytes) {
  if (!value) return "unlimited";
  return is_bytes ? size_of(*value) : fmt::format("{}", *value);
}

constexpr const char* kLine = "{:<14} {}\n";

std::string text_of(const std::vector<Part>& parts) {
  std::string text;
  for (const Part& part : parts) {
    text += fmt::format("  {:<16} {} ({})\n", part.name, part.on ? "on" : "off", part.note);
  }
  return text;
}

std::string text_of(const MachineTopology& machine) {
  std::string text = fmt::format("{}, {}, {}, {}", tools::counted(machine.num_sockets, "socket"),
                                 tools::counted(machine.num_numa_nodes, "NUMA node"),
                                 tools::counted(machine.num_cores, "core"),
                                 tools::counted(machine.num_threads, "hardware thread"));
  if (machine.num_allowed_threads != machine.num_threads) {
    text += fmt::format("; this process may use {} of them", machine.num_allowed_threads);
  }
  return text;
}

}  // namespace

CLI::App& add_command(CLI::App& app, InfoFlags& flags) {
  CLI::App* command = app.add_subcommand(
      "info", "Show what this build and this machine can do: CPU, topology, transports, limits");
  command->add_flag("--json", flags.json, "one JSON object; docs/metrics.md");
  return *command;
}

InfoReport make_report() {
  return {.version = FERRY_VERSION,
          .compiler = compiler(),
          .build_type = FERRY_BUILD_TYPE,
          .cpu = read_cpu(),
          .topology = read_topology(),
          .limits = read_limits(),
          .transports = {{"threads", true,
                          "ranks are threads of one process; links can be slowed to a rate"},
                         {"mpi", false, "not in this build"}},
          .parts = build_parts()};
}

std::string to_json(const InfoReport& report) {
  const MachineTopology& machine = report.topology;
  const Json json = {{"schema", "ferry.info/1"},
                     {"version", report.version},
                     {"compiler", report.compiler},
                     {"build_type", report.build_type},
                     {"cpu",
                      {{"model", report.cpu.model},
                       {"features", report.cpu.features},
                       {"simd_targets", report.cpu.simd_targets}}},
                     {"topology",
                      {{"num_sockets", machine.num_sockets},
                       {"num_numa_nodes", machine.num_numa_nodes},
                       {"num_cores", machine.num_cores},
                       {"num_threads", machine.num_threads},
                       {"num_allowed_threads", machine.num_allowed_threads},
                       {"l2_bytes", machine.l2_bytes},
                       {"l3_bytes", machine.l3_bytes},
                       {"memory_bytes", machine.memory_bytes},
                       {"available_memory_bytes", machine.available_memory_bytes}}},
                     {"limits",
                      {{"memlock_bytes", or_null(report.limits.memlock_bytes)},
                       {"open_files", or_null(report.limits.open_files)},
                       {"cpu_quota", or_null(report.limits.cpu_quota)},
                       {"huge_pages", report.limits.huge_pages}}},
                     {"transports", json_of(report.transports)},
                     {"parts", json_of(report.parts)}};
  return tools::line_of(json);
}

std::string to_text(const InfoReport& report) {
  const MachineTopology& machine = report.topology;
  const Limits& limits = report.limits;
  std::string text =
      fmt::format("ferry {} ({}, {})\n\n", report.version, report.build_type, report.compiler);
  text += fmt::format(kLine, "CPU", report.cpu.model.empty() ? "unknown" : report.cpu.model);
  text += fmt::format(kLine, "CPU features", fmt::join(report.cpu.features, " "));
  text += fmt::format(
      kLine, "SIMD targets",
      fmt::format("{} (the kernels use the first)", fmt::join(report.cpu.simd_targets, " ")));
  text += fmt::format(kLine, "topology", text_of(machine));
  text += fmt::format(
      kLine, "caches",
      fmt::format("L2 {}, L3 {}, each", size_of(machine.l2_bytes), size_of(machine.l3_bytes)));
  text += fmt::format(kLine, "memory",
                      fmt::format("{}, {} available", size_of(machine.memory_bytes),
                                  size_of(machine.available_memory_bytes)));
  text += "\ntransports\n" + text_of(report.transports);
  text += "\nparts\n" + text_of(report.parts);
  text += fmt::format(
      "\nlimits\n  {:<16} {} (memory that a network adapter may pin)\n  {:<16} {} (one per window "
      "region and connection)\n  {:<16} {} (fewer cores than ranks make them wait for each other)\n"
      "  {:<16} {} (windows and buffers ask for huge pages; never = small ones, slower rows)\n",
      "memlock", or_unlimited(limits.memlock_bytes, true), "open files",
      or_unlimited(limits.open_files, false), "CPU quota",
      limits.cpu_quota ? fmt::format("{:g} cores", *limits.cpu_quota) : "none", "huge pages",
      limits.huge_pages.empty() ? "unknown" : limits.huge_pages);
  return text;
}

void run_command(const InfoFlags& flags) {
  const InfoReport report = make_report();
  fmt::print("{}", flags.json ? to_json(report) + "\n" : to_text(report));
}

}  // namespace ferry::info
