// Routings for tests and the bench, made from a seed: uniform, skewed, with gaps and repeats.

#include "support/routing.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

namespace ferry::support {
namespace {

using Random = std::mt19937_64;

// Uniform in (0, 1]; written out because library distributions differ between implementations.
double unit(Random& random) { return (static_cast<double>(random() >> 11) + 1.0) * 0x1p-53; }
std::size_t below(Random& random, std::size_t bound) { return random() % bound; }

std::vector<double> popularity(const RoutingSpec& spec) {
  const auto count = static_cast<std::size_t>(spec.num_experts);
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  Random random(count);
  for (std::size_t i = count; i > 1; --i) std::swap(order[i - 1], order[below(random, i)]);
  std::vector<double> result(count);
  for (std::size_t i = 0; i < count; ++i) {
    result[order[i]] = std::pow(static_cast<double>(i + 1), -spec.zipf);
  }
  return result;
}

// Draws different experts with chances in proportion to their popularity: the smallest of the
// exponential arrival times (Efraimidis and Spirakis, 2006).
class Chooser {
 public:
  explicit Chooser(const RoutingSpec& spec)
      : uniform_(spec.zipf == 0), popularity_(popularity(spec)), arrivals_(popularity_.size()) {}

  void choose(Random& random, std::span<std::int32_t> slots) {
    const std::size_t count = std::min(slots.size(), arrivals_.size());
    for (std::size_t e = 0; e < arrivals_.size(); ++e) {
      const double time = uniform_ ? unit(random) : -std::log(unit(random)) / popularity_[e];
      arrivals_[e] = {time, static_cast<std::int32_t>(e)};
    }
    const auto middle = arrivals_.begin() + static_cast<std::ptrdiff_t>(count);
    std::partial_sort(arrivals_.begin(), middle, arrivals_.end());
    for (std::size_t i = 0; i < count; ++i) slots[i] = arrivals_[i].second;
  }

 private:
  bool uniform_;
  std::vector<double> popularity_;
  std::vector<std::pair<double, std::int32_t>> arrivals_;
};

void spoil(const RoutingSpec& spec, Random& random, std::span<std::int32_t> slots) {
  for (std::size_t slot = 1; slot < slots.size(); ++slot) {
    if (unit(random) <= spec.repeat_share) slots[slot] = slots[below(random, slot)];
  }
  for (std::int32_t& expert : slots) {
    if (unit(random) <= spec.none_share) expert = -1;
  }
}

float odd_weight(Random& random) {
  switch (below(random, 5)) {
    case 0: return 0.0F;
    case 1: return std::numeric_limits<float>::denorm_min() * static_cast<float>(random() % 4096);
    case 2: return -static_cast<float>(unit(random));
    case 3: return 1000.0F * static_cast<float>(unit(random));
    case 4: return -0.0F;
  }
  return static_cast<float>(unit(random));
}

void weigh(WeightKind kind, Random& random, std::span<float> weights) {
  double sum = 0;
  for (float& weight : weights) {
    weight = static_cast<float>(std::exp(2.0 * unit(random)));
    sum += weight;
  }
  for (float& weight : weights) weight = static_cast<float>(weight / sum);
  if (kind != WeightKind::odd) return;
  for (float& weight : weights) {
    if (unit(random) < 0.5) weight = odd_weight(random);
  }
}

}  // namespace

RoutingData make_routing(const RoutingSpec& spec, std::int64_t num_tokens, std::uint64_t seed,
                         int rank) {
  Random random(seed * 1000003ULL + static_cast<std::uint64_t>(rank));
  const auto topk = static_cast<std::size_t>(spec.num_topk);
  const auto tokens = static_cast<std::size_t>(num_tokens);
  RoutingData result{num_tokens, spec.num_topk, std::vector<std::int32_t>(tokens * topk, -1), {}};
  if (spec.weights != WeightKind::none) result.topk_weights.resize(tokens * topk);
  Chooser chooser(spec);
  for (std::size_t token = 0; token < tokens; ++token) {
    const std::span slots = std::span(result.topk_idx).subspan(token * topk, topk);
    if (spec.all_to_first) {
      std::fill(slots.begin(), slots.end(), 0);
    } else {
      chooser.choose(random, slots);
    }
    spoil(spec, random, slots);
    if (spec.weights != WeightKind::none) {
      weigh(spec.weights, random, std::span(result.topk_weights).subspan(token * topk, topk));
    }
  }
  return result;
}

std::vector<RoutingData> make_all_routing(const RoutingSpec& spec,
                                          std::span<const std::int64_t> tokens,
                                          std::uint64_t seed) {
  std::vector<RoutingData> result;
  for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
    result.push_back(make_routing(spec, tokens[rank], seed, static_cast<int>(rank)));
  }
  return result;
}

std::vector<Routing> views(std::span<const RoutingData> routing) {
  std::vector<Routing> result;
  for (const RoutingData& one : routing) result.push_back(one.view());
  return result;
}

}  // namespace ferry::support
