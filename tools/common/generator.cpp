// khot and group draw different experts from a smaller set with the shared generator, and then name
// the members of that set: no second way of drawing, and no second way of weighing.
#include "common/generator.hpp"

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <string_view>

#include <fmt/format.h>

#include "common/failures.hpp"
#include "common/flags.hpp"

namespace ferry::tools {
namespace {

using Random = std::mt19937_64;
using support::RoutingData;
using support::RoutingSpec;

constexpr int kMaxGeneratedExperts = 1 << 16;

std::optional<int> count_in(std::string_view text) {
  const std::optional<int> value = number<int>(text);
  if (!value || *value < 1 || *value > kMaxGeneratedExperts) return std::nullopt;
  return value;
}

std::optional<RoutingPattern> parse(std::string_view text) {
  const std::size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  const std::string_view rest =
      colon == std::string_view::npos ? std::string_view() : text.substr(colon + 1);
  RoutingPattern pattern;
  if (text == "uniform") return pattern;
  if (name == "zipf") {
    const std::optional<double> exponent = number<double>(rest);
    // Written so that NaN fails, too.
    if (!exponent || !(*exponent >= 0 && *exponent <= 10)) return std::nullopt;
    pattern.kind = RoutingPattern::Kind::zipf;
    pattern.zipf_exponent = *exponent;
    return pattern;
  }
  if (name == "khot") {
    const std::optional<int> num_hot = count_in(rest);
    if (!num_hot) return std::nullopt;
    pattern.kind = RoutingPattern::Kind::khot;
    pattern.num_hot = *num_hot;
    return pattern;
  }
  const std::vector<std::string_view> counts = split(rest, ',');
  if (name != "group" || counts.size() != 2) return std::nullopt;
  const std::optional<int> num_groups = count_in(counts[0]);
  const std::optional<int> per_token = count_in(counts[1]);
  if (!num_groups || !per_token || *per_token > *num_groups) return std::nullopt;
  pattern.kind = RoutingPattern::Kind::group;
  pattern.num_groups = *num_groups;
  pattern.groups_per_token = *per_token;
  return pattern;
}

/// The experts that are not hot, ascending.
std::vector<std::int32_t> cold_experts(const std::vector<std::int32_t>& hot, int num_experts) {
  std::vector<std::int32_t> cold;
  for (std::int32_t expert = 0; expert < num_experts; ++expert) {
    if (!std::binary_search(hot.begin(), hot.end(), expert)) cold.push_back(expert);
  }
  return cold;
}

void name_members(std::span<std::int32_t> slots, const std::vector<std::int32_t>& members) {
  for (std::int32_t& slot : slots) {
    if (slot >= 0) slot = members[static_cast<std::size_t>(slot)];
  }
}

std::vector<RoutingData> generate_khot(const RoutingPattern& pattern, RoutingSpec spec,
                                       std::span<const std::int64_t> tokens, std::uint64_t seed) {
  const std::vector<std::int32_t> hot = hot_experts(spec.num_experts, pattern.num_hot);
  const std::vector<std::int32_t> cold = cold_experts(hot, spec.num_experts);
  const auto num_topk = static_cast<std::size_t>(spec.num_topk);
  const bool only_hot = num_topk <= hot.size();
  const std::vector<std::int32_t>& drawn_from = only_hot ? hot : cold;
  spec.num_experts = static_cast<int>(drawn_from.size());
  std::vector<RoutingData> ranks = support::make_all_routing(spec, tokens, seed);
  for (RoutingData& rank : ranks) {
    name_members(rank.topk_idx, drawn_from);
    // The last slots: where fewer cold experts than slots exist, it is those that were left empty.
    for (std::size_t end = num_topk; !only_hot && end <= rank.topk_idx.size(); end += num_topk) {
      std::copy(hot.begin(), hot.end(),
                rank.topk_idx.begin() + static_cast<std::ptrdiff_t>(end - hot.size()));
    }
  }
  return ranks;
}

std::vector<RoutingData> generate_group(const RoutingPattern& pattern, RoutingSpec spec,
                                        std::span<const std::int64_t> tokens, std::uint64_t seed) {
  const int group_size = spec.num_experts / pattern.num_groups;
  spec.num_experts = group_size * pattern.groups_per_token;
  std::vector<RoutingData> ranks = support::make_all_routing(spec, tokens, seed);
  std::vector<std::int32_t> groups(static_cast<std::size_t>(pattern.num_groups));
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    Random random(seed * 1000003ULL + rank + (1ULL << 32));
    std::iota(groups.begin(), groups.end(), 0);
    const auto num_topk = static_cast<std::size_t>(spec.num_topk);
    for (std::size_t at = 0; at < ranks[rank].topk_idx.size(); at += num_topk) {
      // The first steps of a shuffle; groups need not be in order before.
      for (std::size_t i = 0; i < static_cast<std::size_t>(pattern.groups_per_token); ++i) {
        std::swap(groups[i], groups[i + random() % (groups.size() - i)]);
      }
      for (std::int32_t& slot : std::span(ranks[rank].topk_idx).subspan(at, num_topk)) {
        slot = groups[static_cast<std::size_t>(slot / group_size)] * group_size + slot % group_size;
      }
    }
  }
  return ranks;
}

}  // namespace

RoutingPattern parse_routing(const std::string& text) {
  if (const std::optional<RoutingPattern> pattern = parse(text)) return *pattern;
  throw UsageError(fmt::format(
      "--routing {}: no such routing; allowed: uniform; zipf:S with the exponent S in 0..10, for "
      "example zipf:1.0; khot:K with K hot experts, for example khot:4; group:G,M with M of G "
      "groups per token, for example group:8,4",
      text));
}

std::string to_string(const RoutingPattern& pattern) {
  switch (pattern.kind) {
    case RoutingPattern::Kind::uniform: return "uniform";
    case RoutingPattern::Kind::zipf: return fmt::format("zipf:{}", pattern.zipf_exponent);
    case RoutingPattern::Kind::khot: return fmt::format("khot:{}", pattern.num_hot);
    case RoutingPattern::Kind::group:
      return fmt::format("group:{},{}", pattern.num_groups, pattern.groups_per_token);
  }
  return "unknown";
}

void check_pattern(const RoutingPattern& pattern, const RouterShape& shape) {
  if (shape.num_topk > shape.num_experts) {
    throw UsageError(
        fmt::format("--topk {}: a token cannot go to more than the {} different "
                    "experts; fix: a smaller --topk or more --experts",
                    shape.num_topk, shape.num_experts));
  }
  if (pattern.kind == RoutingPattern::Kind::khot && pattern.num_hot > shape.num_experts) {
    throw UsageError(
        fmt::format("--routing {}: {} hot experts of {}; allowed: 1..{}; fix: a "
                    "smaller K or more experts",
                    to_string(pattern), pattern.num_hot, shape.num_experts, shape.num_experts));
  }
  if (pattern.kind != RoutingPattern::Kind::group) return;
  if (shape.num_experts % pattern.num_groups != 0) {
    throw UsageError(
        fmt::format("--routing {}: {} groups do not divide {} experts; allowed: a G "
                    "that divides them, for groups of equal size",
                    to_string(pattern), pattern.num_groups, shape.num_experts));
  }
  const int candidates = shape.num_experts / pattern.num_groups * pattern.groups_per_token;
  if (shape.num_topk > candidates) {
    throw UsageError(
        fmt::format("--routing {}: top-{} of the {} experts of {} groups; fix: more "
                    "groups per token (M), or a smaller top-k",
                    to_string(pattern), shape.num_topk, candidates, pattern.groups_per_token));
  }
}

std::vector<std::int32_t> hot_experts(int num_experts, int num_hot) {
  std::vector<std::int32_t> hot;
  for (std::int64_t i = 0; i < num_hot; ++i) {
    hot.push_back(static_cast<std::int32_t>(i * num_experts / num_hot));
  }
  return hot;
}

std::vector<RoutingData> generate_routing(const RoutingPattern& pattern, const RouterShape& shape,
                                          std::span<const std::int64_t> tokens,
                                          std::uint64_t seed) {
  RoutingSpec spec;
  spec.num_experts = shape.num_experts;
  spec.num_topk = shape.num_topk;
  switch (pattern.kind) {
    case RoutingPattern::Kind::uniform: return support::make_all_routing(spec, tokens, seed);
    case RoutingPattern::Kind::zipf:
      spec.zipf = pattern.zipf_exponent;
      return support::make_all_routing(spec, tokens, seed);
    case RoutingPattern::Kind::khot: return generate_khot(pattern, spec, tokens, seed);
    case RoutingPattern::Kind::group: return generate_group(pattern, spec, tokens, seed);
  }
  return {};
}

}  // namespace ferry::tools
