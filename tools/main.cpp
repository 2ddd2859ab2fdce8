// The ferry command: parses the command line, runs one subcommand, and turns every failure into one
// line on standard error and an exit code (failures.hpp).

#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "bench/command.hpp"
#include "common/failures.hpp"
#include "ferry/error.hpp"
#include "info/command.hpp"
#include "planner/command.hpp"

namespace {

using ferry::tools::ExitCode;

int fail(ExitCode code, const std::string& text) {
  fmt::print(stderr, "ferry: {}\n", text);
  return static_cast<int>(code);
}

/// What the caller of the command can do about an error of the library.
ExitCode exit_code_of(ferry::ErrorCode code) {
  switch (code) {
    case ferry::ErrorCode::invalid_argument:
    case ferry::ErrorCode::mismatch:
    case ferry::ErrorCode::unsupported: return ExitCode::usage;
    case ferry::ErrorCode::stale_plan:
    case ferry::ErrorCode::wrong_thread:
    case ferry::ErrorCode::corrupt_message: return ExitCode::verification_failed;
    case ferry::ErrorCode::limit_exceeded:
    case ferry::ErrorCode::resource_exhausted:
    case ferry::ErrorCode::timeout:
    case ferry::ErrorCode::peer_failed:
    case ferry::ErrorCode::cancelled: return ExitCode::environment;
  }
  return ExitCode::environment;
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
  } catch (const ferry::tools::UsageError& error) {
    return fail(ExitCode::usage, error.what());
  } catch (const ferry::tools::EnvironmentError& error) {
    return fail(ExitCode::environment, error.what());
  } catch (const ferry::tools::VerificationError& error) {
    return fail(ExitCode::verification_failed, error.what());
  } catch (const ferry::Error& error) {
    return fail(exit_code_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return fail(ExitCode::environment,
                "no memory is left; fix: fewer --tokens, a smaller --hidden or fewer ranks");
  } catch (const std::exception& error) {
    return fail(ExitCode::environment, error.what());
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
