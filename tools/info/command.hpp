#pragma once
// `ferry info`: what this build and this machine can do, for bug reports and before a run.

#include <string>

#include "info/machine.hpp"

namespace CLI {
class App;  // CLI/CLI.hpp takes seconds to compile; few files need all of it
}

namespace ferry::info {

struct InfoFlags {
  bool json = false;
};

/// Something that a build may have or lack.
struct Part {
  std::string name;
  bool on = false;
  std::string note;  ///< what it is, or why it is off
};

struct InfoReport {
  std::string version;
  std::string compiler;
  std::string build_type;
  Cpu cpu;
  MachineTopology topology;
  Limits limits;
  std::vector<Part> transports;
  std::vector<Part> parts;
};

/// Adds the subcommand; its flags land in `flags`, which must outlive the parse.
CLI::App& add_command(CLI::App& app, InfoFlags& flags);

/// Errors: EnvironmentError
InfoReport make_report();
/// One line, schema "ferry.info/1".
std::string to_json(const InfoReport& report);
std::string to_text(const InfoReport& report);

/// Runs it; the result goes to standard output. Errors: EnvironmentError
void run_command(const InfoFlags& flags);

}  // namespace ferry::info
