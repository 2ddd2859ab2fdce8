// The oracle of the way back: see backward_reference.hpp.

#include "support/backward_reference.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "support/numbers.hpp"
#include "support/rows.hpp"

namespace ferry::support {
namespace {

std::vector<Routing> routing_of(const Reference& forward) {
  std::vector<Routing> routing;
  for (int rank = 0; rank < forward.group().topology.num_ranks(); ++rank) {
    routing.push_back(forward.routing(rank));
  }
  return routing;
}

// The dtype's own format.
WireFormat plain(const Group& group) {
  switch (group.dtype) {
    case DType::f32: return WireFormat::f32;
    case DType::bf16: return WireFormat::bf16;
    case DType::f16: return WireFormat::f16;
  }
  return WireFormat::f32;
}

// The format of gradients: as asked for, else as forward, but never quantised or sparse by itself.
WireFormat of_gradients(const Group& group, std::optional<WireFormat> asked, WireFormat forward) {
  if (asked) return *asked;
  const bool numbers =
      forward == WireFormat::f32 || forward == WireFormat::bf16 || forward == WireFormat::f16;
  return numbers ? forward : plain(group);
}

// Gradients that go out to the experts.
Group outgoing(Group group) {
  group.gradients = true;
  group.wire_dispatch = of_gradients(group, group.wire_combine_backward, group.wire_dispatch);
  return group;
}

// Rows that come home from experts, unweighted; they have not crossed on the way out.
Group unweighted(Group group) {
  group.gradients = true;
  group.weights = WeightMode::none;
  group.wire_combine = of_gradients(group, group.wire_dispatch_backward, group.wire_combine);
  group.wire_dispatch = plain(group);
  return group;
}

// Rows of `seed`, all multiplied with one factor.
Model gradients_of(std::uint64_t seed, float factor, DType dtype) {
  Model model = hashed_model(seed, dtype);
  if (factor == 1) return model;
  model.token = [hashed = model.token, factor, dtype](int rank, std::int64_t token,
                                                      std::span<float> values) {
    hashed(rank, token, values);
    for (float& value : values) value *= factor;
    round_values(dtype, values);
  };
  return model;
}

// 16 sums, column c to sum c mod 16, then halves onto halves.
float dot(std::span<const float> a, std::span<const float> b) {
  float sums[16] = {};
  for (std::size_t c = 0; c < a.size(); ++c) {
    const float product = a[c] * b[c];
    sums[c % 16] += product;
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

}  // namespace

BackwardReference::BackwardReference(Reference forward, std::uint64_t seed, float factor)
    : forward_(std::move(forward)),
      seed_(seed),
      grad_out_(outgoing(forward_.group()), gradients_of(seed, factor, forward_.group().dtype),
                routing_of(forward_)),
      grad_rows_(unweighted(forward_.group()),
                 gradients_of(seed + 1, factor, forward_.group().dtype), routing_of(forward_)) {}

void BackwardReference::grad_out(int rank, std::int64_t token, std::span<float> values) const {
  grad_out_.arrived(rank, {.source = rank, .token = token}, values);
}

void BackwardReference::grad_y(int rank, const RowOrigin& origin, std::span<float> values) const {
  grad_out_.arrived(rank, origin, values);
  if (forward_.group().weights == WeightMode::at_combine && !origin.is_alignment()) {
    for (const Term& term : forward_.terms(origin.source, origin.token, rank)) {
      if (term.expert != origin.expert) continue;
      for (float& value : values) value *= term.weight;
    }
  }
  round_values(forward_.group().dtype, values);
}

float BackwardReference::grad_weight(int home, std::int64_t token, int slot) const {
  const auto expert = static_cast<int>(forward_.routing(home).expert(token, slot));
  if (expert < 0) return 0;
  if (forward_.group().weights == WeightMode::at_expert) {
    return grad_row_weight(home, token, expert);
  }
  const int rank = forward_.group().placement.rank_of(expert);
  std::vector<float> gradient(static_cast<std::size_t>(forward_.group().hidden));
  std::vector<float> y(gradient.size());
  grad_out_.arrived(rank, {expert, home, token}, gradient);
  forward_.output(rank, {expert, home, token}, y);
  return dot(gradient, y);
}

void BackwardReference::grad_row(int rank, const RowOrigin& origin, std::span<float> values) const {
  grad_rows_.output(rank, origin, values);
}

float BackwardReference::grad_row_weight(int source, std::int64_t token, int expert) const {
  float value = 0;
  const auto key = seed_ + 2 + static_cast<std::uint64_t>(expert);
  row_values({key, source, token}, DType::f32, std::span(&value, 1));
  return value;
}

void BackwardReference::grad_x(int home, std::int64_t token, std::span<float> values) const {
  grad_rows_.out(home, token, values);
}

}  // namespace ferry::support
