// From exceptions to exit codes.
#include "common/failures.hpp"

#include <cstdlib>
#include <new>
#include <string_view>

#include "ferry/error.hpp"

namespace ferry::tools {
namespace {

/// What the caller of the command can do about an error of the library.
ExitCode exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::mismatch:
    case ErrorCode::unsupported: return ExitCode::usage;
    case ErrorCode::stale_plan:
    case ErrorCode::wrong_thread:
    case ErrorCode::corrupt_message: return ExitCode::verification_failed;
    case ErrorCode::limit_exceeded:
    case ErrorCode::resource_exhausted:
    case ErrorCode::timeout:
    case ErrorCode::peer_failed:
    case ErrorCode::cancelled: return ExitCode::environment;
  }
  return ExitCode::environment;
}

}  // namespace

Failure describe(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const UsageError& error) {
    return {ExitCode::usage, error.what()};
  } catch (const EnvironmentError& error) {
    return {ExitCode::environment, error.what()};
  } catch (const VerificationError& error) {
    return {ExitCode::verification_failed, error.what(), error.strategy()};
  } catch (const Error& error) {
    return {exit_code_of(error.code()), error.what()};
  } catch (const std::bad_alloc&) {
    return {ExitCode::environment,
            "no memory is left; fix: fewer --tokens, a smaller --hidden or fewer ranks"};
  } catch (const std::exception& error) {
    return {ExitCode::environment, error.what()};
  }
}

bool is_first_process() {
  const auto rank_in = [](const char* variable) {
    const char* const text = std::getenv(variable);
    return text == nullptr ? std::string_view() : std::string_view(text);
  };
  for (const char* const variable : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}) {
    if (const std::string_view rank = rank_in(variable); !rank.empty()) return rank == "0";
  }
  // torchrun and srun without PMI are refused, by every process that they start.
  if (!rank_in("TORCHELASTIC_RUN_ID").empty()) {
    return rank_in("RANK").empty() || rank_in("RANK") == "0";
  }
  if (const std::string_view rank = rank_in("SLURM_PROCID"); !rank.empty()) return rank == "0";
  return true;
}

}  // namespace ferry::tools
