#include "bench/tell.hpp"

#include <unistd.h>

#include <cstdio>

#include <fmt/format.h>

#include "bench/print.hpp"

namespace ferry::bench {
namespace {

void clear_progress() {
  if (isatty(STDERR_FILENO) != 0) fmt::print(stderr, "\r\033[K");
}

}  // namespace

void tell(const RunContext& context, const RunResult& result) {
  clear_progress();
  if (!context.options.json) {
    fmt::print("{}", to_table(context, result));
    return;
  }
  for (const std::string& note : context.workload.notes) {
    fmt::print(stderr, "ferry: note: {}\n", note);
  }
  for (const StrategyResult& strategy : result.strategies) {
    fmt::print("{}\n", to_json(context, strategy, result.baselines));
  }
}

void tell_failed(const RunContext* context, const tools::Failure& failure) {
  clear_progress();
  if (context == nullptr || !context->options.json ||
      failure.code != tools::ExitCode::verification_failed) {
    return;
  }
  fmt::print("{}\n", to_json_failed(*context, failure.strategy, failure.text));
}

}  // namespace ferry::bench
