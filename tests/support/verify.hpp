#pragma once
// Checks of an exchange's results against the oracle, row by row. Every check returns the text of
// the first fault, or nothing. Safe to call on several ranks at once.

#include <cstdint>
#include <optional>
#include <string>

#include "ferry/exchange.hpp"
#include "support/reference.hpp"

namespace ferry::support {

/// Everything that a plan says about the rows of `rank`: how many there are, their experts, counts
/// and offsets, where each comes from, and which experts each names.
std::optional<std::string> check_plan(const Reference& reference, int rank, const Plan& plan);
/// The rows that dispatch brought to `rank`, alignment rows included.
std::optional<std::string> check_rows(const Reference& reference, int rank, ConstMatrix rows);
/// The same with their extra bytes, and the size of the window that holds both.
std::optional<std::string> check_rows(const Reference& reference, int rank, const ExpertRows& rows);
/// The rows that combine brought home to `rank`.
std::optional<std::string> check_out(const Reference& reference, int rank, ConstMatrix out);

/// y = each expert's transform of its rows (rows.hpp), times what the plan says the weight is if
/// weights are applied at the expert; with token_major the sum of those of a row's experts. Writes
/// no alignment row. `rows` and `y` may be the same memory.
void run_experts(const Plan& plan, ConstMatrix rows, Matrix y,
                 WeightMode weights = WeightMode::at_combine);

}  // namespace ferry::support
