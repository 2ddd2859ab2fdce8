// The ferry command: parses the command line, runs one subcommand, and turns every failure into one
// line on standard error and an exit code (failures.hpp).

#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "bench/command.hpp"
#include "common/failures.hpp"
#include "info/command.hpp"
#include "planner/command.hpp"

namespace {

using ferry::tools::ExitCode;

// A launcher may end all ranks as soon as one ends with an error; the one that tells goes first.
constexpr std::chrono::milliseconds kLetTheFirstTell{500};

int fail(ExitCode code, const std::string& text) {
  if (ferry::tools::is_first_process()) {
    fmt::print(stderr, "ferry: {}\n", text);
  } else {
    std::this_thread::sleep_for(kLetTheFirstTell);
  }
  return static_cast<int>(code);
}

struct Flags {
  ferry::bench::BenchFlags bench;
  ferry::planner::PlanFlags plan;
  ferry::info::InfoFlags info;
};

int run(const CLI::App& app, const Flags& flags) {
  try {
    if (app.got_subcommand("bench")) ferry::bench::run_command(flags.bench);
    if (app.got_subcommand("plan")) ferry::planner::run_command(flags.plan);
    if (app.got_subcommand("info")) ferry::info::run_command(flags.info);
    return static_cast<int>(ExitCode::ok);
  } catch (const ferry::tools::ToldFailure& failure) {
    return static_cast<int>(failure.code());
  } catch (...) {
    const ferry::tools::Failure failure = ferry::tools::describe(std::current_exception());
    return fail(failure.code, failure.text);
  }
}

/// The subcommand of a command line that cannot be parsed, to name its help.
std::string command_of(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  return name == "bench" || name == "plan" || name == "info" ? name : "COMMAND";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Ferry carries the tokens of a Mixture-of-Experts layer to their experts and back.",
               "ferry");
  app.set_version_flag("--version", "ferry " FERRY_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Example: ferry bench --routing zipf:1.0 --link-rate 1gbit\n"
      "More:    ferry bench --help");
  Flags flags;
  ferry::bench::add_command(app, flags.bench);
  ferry::planner::add_command(app, flags.plan);
  ferry::info::add_command(app, flags.info);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // --help and --version end here too, with code 0 and their text on standard output.
    if (error.get_exit_code() == 0) return app.exit(error);
    return fail(ExitCode::usage,
                fmt::format("{}; see ferry {} --help", error.what(), command_of(argc, argv)));
  }
  return run(app, flags);
}
