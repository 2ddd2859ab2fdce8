#pragma once
// What makes the command end with something other than 0, and the exit code of each.

#include <exception>
#include <optional>
#include <stdexcept>
#include <string>

#include "ferry/options.hpp"

namespace ferry::tools {

enum class ExitCode : int { ok = 0, usage = 2, verification_failed = 3, environment = 4 };

/// The command line asks for something that is not allowed.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A file cannot be read, or the machine has too little of something.
class EnvironmentError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A row, a sum or a byte count differs from what the oracle expects.
class VerificationError : public std::runtime_error {
 public:
  /// Without a strategy: in the baseline.
  VerificationError(std::optional<Strategy> strategy, const std::string& text)
      : std::runtime_error(text), strategy_(strategy) {}
  std::optional<Strategy> strategy() const noexcept { return strategy_; }

 private:
  std::optional<Strategy> strategy_;
};

/// The ranks of a job have agreed on why they end, and the first of them has told it.
class ToldFailure : public std::runtime_error {
 public:
  explicit ToldFailure(ExitCode code) : std::runtime_error("told by rank 0"), code_(code) {}
  ExitCode code() const noexcept { return code_; }

 private:
  ExitCode code_;
};

/// What a failure means to the caller of the command.
struct Failure {
  ExitCode code = ExitCode::environment;
  std::string text;
  std::optional<Strategy> strategy{};  ///< whose verification failed
};
/// Requires: an exception
Failure describe(const std::exception_ptr& exception);

/// True unless a launcher started this process as another rank than 0: all of them meet the same
/// wrong flag, and one tells it.
bool is_first_process();

}  // namespace ferry::tools
