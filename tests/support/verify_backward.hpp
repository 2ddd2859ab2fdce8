#pragma once
// Input and checks of the way back, against its oracle. Every check returns the text of the first
// fault, or nothing. Safe to call on several ranks at once.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "support/backward_reference.hpp"

namespace ferry::support {

/// Gradients of a rank's outputs, [num_tokens, hidden].
void fill_grad_out(const BackwardReference& reference, int rank, Matrix grad_out);
/// Gradients of the rows of a rank's window, alignment rows included: those hold NaN.
void fill_grad_rows(const BackwardReference& reference, int rank, Matrix grad_rows);
/// Gradients of row weights, NaN where nobody may read.
std::vector<float> grad_row_weights(const BackwardReference& reference, int rank, const Plan& plan);

/// What combine_backward brought.
std::optional<std::string> check_grad_y(const BackwardReference& reference, int rank,
                                        ConstMatrix rows);
/// Gradients of routing weights, by combine_backward or dispatch_backward: bit for bit.
std::optional<std::string> check_grad_weights(const BackwardReference& reference, int rank,
                                              std::span<const float> grad_weights);
/// What dispatch_backward brought.
std::optional<std::string> check_grad_x(const BackwardReference& reference, int rank,
                                        ConstMatrix grad_x);

}  // namespace ferry::support
