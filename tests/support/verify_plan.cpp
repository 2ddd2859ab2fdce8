// Compares what a plan says about its rows with the oracle: counts and offsets, where each row
// comes from, and which experts a token_major row names.

#include <algorithm>
#include <bit>
#include <vector>

#include <fmt/format.h>

#include "support/verify.hpp"

namespace ferry::support {
namespace {

// A plan under test, beside what it should say.
class PlanCheck {
 public:
  PlanCheck(const Reference& reference, int rank, const Plan& plan)
      : reference_(reference), rank_(rank), plan_(plan), rows_(reference.rows_of(rank)) {
    for (int expert = 0; expert < reference.group().placement.num_experts(); ++expert) {
      if (reference.group().placement.rank_of(expert) == rank) experts_.push_back(expert);
    }
  }

  std::optional<std::string> run() const {
    if (auto fault = check_sizes()) return fault;
    if (auto fault = check_experts()) return fault;
    if (auto fault = check_sources()) return fault;
    return check_topk();
  }

 private:
  using Fault = std::optional<std::string>;

  bool is_token_major() const { return reference_.group().layout == Layout::token_major; }

  template <typename... Parts>
  Fault fault(fmt::format_string<Parts...> text, Parts&&... parts) const {
    return fmt::format("rank {}: ", rank_) + fmt::format(text, std::forward<Parts>(parts)...);
  }

  Fault check_sizes() const {
    const auto num_rows = static_cast<std::int64_t>(rows_.size());
    const std::int64_t received = std::count_if(
        rows_.begin(), rows_.end(), [](const RowOrigin& row) { return !row.is_alignment(); });
    if (plan_.num_rows() != num_rows || plan_.summary().rows_received != received) {
      return fault("the plan has {} rows, {} of them received, expected {} and {}",
                   plan_.num_rows(), plan_.summary().rows_received, num_rows, received);
    }
    const std::size_t offsets = is_token_major() ? 0 : experts_.size() + 1;
    if (plan_.local_experts().size() != experts_.size() ||
        plan_.expert_counts().size() != experts_.size() ||
        plan_.expert_offsets().size() != offsets) {
      return fault("the plan has {} experts, {} counts and {} offsets, expected {} and {}",
                   plan_.local_experts().size(), plan_.expert_counts().size(),
                   plan_.expert_offsets().size(), experts_.size(), offsets);
    }
    return std::nullopt;
  }

  // Rows that an expert works on.
  std::int64_t count_of(int expert) const {
    return std::count_if(rows_.begin(), rows_.end(), [&](const RowOrigin& row) {
      if (!is_token_major()) return row.expert == expert;
      const std::vector<Term> terms = reference_.terms(row.source, row.token, rank_);
      return std::any_of(terms.begin(), terms.end(),
                         [&](const Term& term) { return term.expert == expert; });
    });
  }

  Fault check_experts() const {
    const std::int64_t alignment = reference_.group().row_alignment;
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < experts_.size(); ++i) {
      const std::int64_t count = count_of(experts_[i]);
      const std::int64_t first = is_token_major() ? offset : plan_.expert_offsets()[i];
      if (plan_.local_experts()[i] != experts_[i] || plan_.expert_counts()[i] != count ||
          first != offset) {
        return fault("local expert {} is {} with {} rows from row {}, expected {} with {} from {}",
                     i, plan_.local_experts()[i], plan_.expert_counts()[i], first, experts_[i],
                     count, offset);
      }
      offset += count;
      while (offset % alignment != 0) ++offset;
    }
    if (!is_token_major() && plan_.expert_offsets().back() != offset) {
      return fault("the last offset is {}, expected {}", plan_.expert_offsets().back(), offset);
    }
    return std::nullopt;
  }

  Fault check_sources() const {
    const Group& group = reference_.group();
    const RowSources& sources = plan_.row_sources();
    const bool wanted =
        group.row_sources || is_token_major() || group.weights == WeightMode::at_expert;
    const std::size_t places = wanted ? rows_.size() : 0;
    const std::size_t slots = is_token_major() ? 0 : places;
    if (sources.rank.size() != places || sources.token.size() != places ||
        sources.slot.size() != slots || sources.weight.size() != slots) {
      return fault("row_sources has {} ranks, {} tokens, {} slots, {} weights; expected {} and {}",
                   sources.rank.size(), sources.token.size(), sources.slot.size(),
                   sources.weight.size(), places, slots);
    }
    for (std::size_t i = 0; i < places; ++i) {
      const RowOrigin& row = rows_[i];
      if (sources.rank[i] != row.source || sources.token[i] != row.token) {
        return fault("row {} is said to be token {} of rank {}, expected {} of {}", i,
                     sources.token[i], sources.rank[i], row.token, row.source);
      }
      if (slots == 0) continue;
      const Term term = term_of(row);
      if (sources.slot[i] != term.slot || !same(sources.weight[i], term.weight)) {
        return fault("row {} is said to be of slot {} with weight {}, expected {} with {}", i,
                     sources.slot[i], sources.weight[i], term.slot, term.weight);
      }
    }
    return std::nullopt;
  }

  Fault check_topk() const {
    const auto num_topk = static_cast<std::size_t>(reference_.routing(rank_).num_topk);
    const std::size_t size = is_token_major() ? rows_.size() * num_topk : 0;
    if (plan_.topk_idx().size() != size || plan_.topk_weights().size() != size) {
      return fault("{} topk_idx and {} topk_weights, expected {}", plan_.topk_idx().size(),
                   plan_.topk_weights().size(), size);
    }
    for (std::size_t i = 0; i < size; ++i) {
      const RowOrigin& row = rows_[i / num_topk];
      std::int32_t local = -1;
      float weight = 0;
      for (const Term& term : reference_.terms(row.source, row.token, rank_)) {
        if (static_cast<std::size_t>(term.slot) != i % num_topk) continue;
        const auto place = std::find(experts_.begin(), experts_.end(), term.expert);
        local = static_cast<std::int32_t>(place - experts_.begin());
        weight = term.weight;
      }
      if (plan_.topk_idx()[i] != local || !same(plan_.topk_weights()[i], weight)) {
        return fault("slot {} of row {} is expert {} with weight {}, expected {} with {}",
                     i % num_topk, i / num_topk, plan_.topk_idx()[i], plan_.topk_weights()[i],
                     local, weight);
      }
    }
    return std::nullopt;
  }

  // The term that an expert_major row is; of an alignment row slot -1 and weight 0.
  Term term_of(const RowOrigin& row) const {
    if (row.is_alignment()) return {};
    const std::vector<Term> terms = reference_.terms(row.source, row.token, rank_);
    return *std::find_if(terms.begin(), terms.end(),
                         [&](const Term& term) { return term.expert == row.expert; });
  }

  // Weights never change on the way, not even the sign of a zero.
  static bool same(float a, float b) {
    return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
  }

  const Reference& reference_;
  int rank_;
  const Plan& plan_;
  std::vector<RowOrigin> rows_;
  std::vector<int> experts_;
};

}  // namespace

std::optional<std::string> check_plan(const Reference& reference, int rank, const Plan& plan) {
  return PlanCheck(reference, rank, plan).run();
}

}  // namespace ferry::support
