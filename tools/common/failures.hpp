#pragma once
// What makes the command end with something other than 0, and the exit code of each.

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
  VerificationError(Strategy strategy, const std::string& text)
      : std::runtime_error(text), strategy_(strategy) {}
  Strategy strategy() const noexcept { return strategy_; }

 private:
  Strategy strategy_;
};

}  // namespace ferry::tools
