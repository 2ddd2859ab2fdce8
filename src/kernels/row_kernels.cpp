// Which SIMD target the kernels run on: the best of the machine, unless a test pins one.

#include "kernels/row_kernels.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hwy/highway.h>

#include "ferry/error.hpp"

namespace ferry::kernels {
namespace {

/// Asked once and before any pin, because Highway answers with the pinned target afterwards.
const std::vector<std::int64_t>& machine_targets() {
  static const std::vector<std::int64_t> targets = hwy::SupportedAndGeneratedTargets();
  return targets;
}

void pin(std::int64_t target) {
  hwy::SetSupportedTargetsForTest(target);  // 0 lifts the pin
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace

std::vector<std::string> simd_targets() {
  std::vector<std::string> names;
  for (const std::int64_t target : machine_targets()) names.emplace_back(hwy::TargetName(target));
  return names;
}

void pin_simd_target(std::string_view name) {
  if (name.empty()) {
    machine_targets();
    pin(0);
    return;
  }
  for (const std::int64_t target : machine_targets()) {
    if (name == hwy::TargetName(target)) {
      pin(target);
      return;
    }
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("pin_simd_target: \"{}\" is not a SIMD target of this machine; "
                          "allowed: {} or \"\" (the best); fix: take a name from simd_targets()",
                          name, fmt::join(simd_targets(), ", ")));
}

}  // namespace ferry::kernels
