// Order of rows on the way: by target rank, and there by expert, then token. So what arrives for an
// expert from one rank is one run of rows, copied at once.
#include <algorithm>
#include <cstring>

#include "bench/alltoallv_parts.hpp"

namespace ferry::bench {
namespace {

/// One row per (token, expert).
class ExpertRowsBaseline final : public Alltoallv {
 public:
  ExpertRowsBaseline(detail::MpiJob& job, const Workload& workload);
  void exchange_counts() override;
  void dispatch(ConstMatrix x) override;
  void combine(Matrix out) override;

 private:
  struct Term {
    std::int64_t row = 0;  ///< in what is sent
    float weight = 0;
  };
  std::int64_t& arriving(int source, std::size_t local) {
    return arriving_[static_cast<std::size_t>(source) * most_local_ + local];
  }
  void list_terms();
  void place_terms();
  std::uint64_t metadata_bytes() const override {
    return Alltoallv::metadata_bytes() + bytes_of(term_begin_) + bytes_of(terms_) +
           bytes_of(leaving_) + bytes_of(arriving_) + bytes_of(next_row_) + bytes_of(term_of_) +
           sum_bytes_;
  }

  std::size_t most_local_ = 0;           ///< experts of the rank that has most
  std::vector<std::size_t> term_begin_;  ///< of every token, and the end
  std::vector<Term> terms_;
  std::vector<std::int64_t> leaving_;   ///< rows to [rank, local expert]
  std::vector<std::int64_t> arriving_;  ///< rows from [rank, local expert]
  std::vector<std::int64_t> next_row_;  ///< as leaving_
  std::vector<std::size_t> term_of_;    ///< by expert: its last term, plus one
  std::uint64_t sum_bytes_ = 0;
};

ExpertRowsBaseline::ExpertRowsBaseline(detail::MpiJob& job, const Workload& workload)
    : Alltoallv(job, workload) {
  for (const int index : local_index_) {
    most_local_ = std::max(most_local_, static_cast<std::size_t>(index) + 1);
  }
  leaving_.resize(static_cast<std::size_t>(num_ranks_) * most_local_);
  arriving_.resize(leaving_.size());
  next_row_.resize(leaving_.size());
  term_of_.resize(local_index_.size());
}

// A term's row is first the place of its expert in leaving_.
void ExpertRowsBaseline::list_terms() {
  std::ranges::fill(leaving_, 0);
  std::ranges::fill(term_of_, 0);
  term_begin_.assign(1, 0);
  terms_.clear();
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    const std::size_t first = terms_.size();
    for (int slot = 0; slot < routing_.num_topk; ++slot) {
      const std::int64_t expert = routing_.expert(token, slot);
      if (expert < 0) continue;
      const auto at = static_cast<std::size_t>(expert);
      if (term_of_[at] > first) {  // the token names it again: one row, the sum of the weights
        terms_[term_of_[at] - 1].weight += routing_.weight(token, slot);
        continue;
      }
      const int rank = workload_.placement.rank_of(static_cast<int>(expert));
      const auto place =
          static_cast<std::size_t>(rank) * most_local_ + static_cast<std::size_t>(local_index_[at]);
      ++leaving_[place];
      terms_.push_back({static_cast<std::int64_t>(place), routing_.weight(token, slot)});
      term_of_[at] = terms_.size();
    }
    term_begin_.push_back(terms_.size());
  }
}

void ExpertRowsBaseline::place_terms() {
  std::int64_t row = 0;
  for (std::size_t place = 0; place < leaving_.size(); ++place) {
    next_row_[place] = row;
    row += leaving_[place];
  }
  for (Term& term : terms_) term.row = next_row_[static_cast<std::size_t>(term.row)]++;
}

void ExpertRowsBaseline::exchange_counts() {
  list_terms();
  job_.alltoall(leaving_, arriving_);
  place_terms();
  std::vector<std::int64_t> of_expert(local_experts_.size());
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    sent_.counts[at] = 0;
    received_.counts[at] = 0;
    for (std::size_t local = 0; local < most_local_; ++local) {
      sent_.counts[at] += leaving_[at * most_local_ + local];
      received_.counts[at] += arriving(rank, local);
      if (local < of_expert.size()) of_expert[local] += arriving(rank, local);
    }
  }
  place_experts(of_expert);
  reserve_rows();
}

void ExpertRowsBaseline::dispatch(ConstMatrix x) {
  const auto bytes = static_cast<std::size_t>(row_bytes_);
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    const auto at = static_cast<std::size_t>(token);
    for (std::size_t i = term_begin_[at]; i < term_begin_[at + 1]; ++i) {
      std::memcpy(sent_row(terms_[i].row), x.row(token), bytes);
    }
  }
  send_out();
  std::vector<std::int64_t> to(expert_offsets_.begin(), expert_offsets_.end());
  std::int64_t from = 0;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    for (std::size_t local = 0; local < local_experts_.size(); ++local) {
      const std::int64_t count = arriving(rank, local);
      if (count == 0) continue;
      std::memcpy(expert_row(to[local]), received_row(from),
                  static_cast<std::size_t>(count * row_bytes_));
      to[local] += count;
      from += count;
    }
  }
}

void ExpertRowsBaseline::combine(Matrix out) {
  std::vector<std::int64_t> from(expert_offsets_.begin(), expert_offsets_.end());
  std::int64_t to = 0;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    for (std::size_t local = 0; local < local_experts_.size(); ++local) {
      const std::int64_t count = arriving(rank, local);
      if (count == 0) continue;
      std::memcpy(received_row(to), output_row(from[local]),
                  static_cast<std::size_t>(count * row_bytes_));
      from[local] += count;
      to += count;
    }
  }
  send_back();
  Summer summer(workload_, sum_bytes_);
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    const auto at = static_cast<std::size_t>(token);
    summer.begin_row(out.row(token));
    for (std::size_t i = term_begin_[at]; i < term_begin_[at + 1]; ++i) {
      summer.add(sent_row(terms_[i].row), terms_[i].weight, true);
    }
  }
  summer.finish();
}

}  // namespace

std::unique_ptr<Alltoallv> make_expert_rows(detail::MpiJob& job, const Workload& workload) {
  return std::make_unique<ExpertRowsBaseline>(job, workload);
}

}  // namespace ferry::bench
