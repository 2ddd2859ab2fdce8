#pragma once
// Checks of an exchange's results against the oracle, row by row. Every check returns the text of
// the first fault, or nothing. Safe to call on several ranks at once.

#include <cstdint>
#include <optional>
#include <string>

#include "ferry/exchange.hpp"
#include "support/reference.hpp"

namespace ferry::support {

/// Counts, offsets and experts of a plan, and the number of rows.
std::optional<std::string> check_plan(const Reference& reference, int rank, const Plan& plan);
/// The rows that dispatch brought to `rank`.
std::optional<std::string> check_rows(const Reference& reference, int rank, ConstMatrix rows);
/// The rows that combine brought home to `rank`.
std::optional<std::string> check_out(const Reference& reference, int rank, ConstMatrix out);

/// y = each expert's transform of its rows (rows.hpp). `rows` and `y` may be the same memory.
void run_experts(const Plan& plan, ConstMatrix rows, Matrix y);

}  // namespace ferry::support
