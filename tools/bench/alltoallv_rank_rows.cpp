// Order of rows on the way: by target rank, and there by token. Rows arrive by source rank, then
// token, so handing out places in that order gives the expert-major order.
#include <algorithm>
#include <cstring>

#include "bench/alltoallv_parts.hpp"

namespace ferry::bench {
namespace {

/// One row per (token, rank), and one weighted partial sum back.
class RankRowsBaseline final : public Alltoallv {
 public:
  RankRowsBaseline(detail::MpiJob& job, const Workload& workload);
  void exchange_counts() override;
  void dispatch(ConstMatrix x) override;
  void combine(Matrix out) override;

 private:
  /// What a row is for, per slot of its token.
  struct Slot {
    std::int32_t local_expert = -1;  ///< -1: none of this rank, or one that an earlier slot names
    float weight = 0;
  };
  std::size_t slots_per_row() const { return static_cast<std::size_t>(routing_.num_topk); }
  std::span<Slot> slots_of(const GrowingBuffer& buffer, std::int64_t row) const {
    return {reinterpret_cast<Slot*>(buffer.data()) + row * routing_.num_topk, slots_per_row()};
  }
  void list_rows();
  void place_rows();
  void write_slots(std::int64_t token, int rank, std::span<Slot> slots) const;
  void place_slots();
  std::uint64_t metadata_bytes() const override {
    return Alltoallv::metadata_bytes() + bytes_of(row_begin_) + bytes_of(rows_) +
           sent_slots_.bytes() + received_slots_.bytes() + bytes_of(places_) + sum_bytes_;
  }

  std::vector<std::size_t> row_begin_;  ///< of every token, and the end
  std::vector<std::int64_t> rows_;      ///< first the target rank, then the row in what is sent
  GrowingBuffer sent_slots_;
  GrowingBuffer received_slots_;
  std::vector<std::int64_t> places_;  ///< of every received slot: its expert row, or -1
  std::uint64_t sum_bytes_ = 0;
};

RankRowsBaseline::RankRowsBaseline(detail::MpiJob& job, const Workload& workload)
    : Alltoallv(job, workload) {}

void RankRowsBaseline::list_rows() {
  std::ranges::fill(sent_.counts, 0);
  row_begin_.assign(1, 0);
  rows_.clear();
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    const auto first = static_cast<std::ptrdiff_t>(rows_.size());
    for (int slot = 0; slot < routing_.num_topk; ++slot) {
      const std::int64_t expert = routing_.expert(token, slot);
      if (expert < 0) continue;
      const std::int64_t rank = workload_.placement.rank_of(static_cast<int>(expert));
      // Ascending, each once: top-k is small, so insertion is the fast way.
      const auto place = std::lower_bound(rows_.begin() + first, rows_.end(), rank);
      if (place != rows_.end() && *place == rank) continue;
      rows_.insert(place, rank);
      ++sent_.counts[static_cast<std::size_t>(rank)];
    }
    row_begin_.push_back(rows_.size());
  }
}

void RankRowsBaseline::write_slots(std::int64_t token, int rank, std::span<Slot> slots) const {
  std::ranges::fill(slots, Slot{});
  for (int slot = 0; slot < routing_.num_topk; ++slot) {
    const std::int64_t expert = routing_.expert(token, slot);
    if (expert < 0 || workload_.placement.rank_of(static_cast<int>(expert)) != rank) continue;
    const std::int32_t local = local_index_[static_cast<std::size_t>(expert)];
    const auto named = std::find_if(slots.begin(), slots.begin() + slot, [&](const Slot& earlier) {
      return earlier.local_expert == local;
    });
    if (named == slots.begin() + slot) named->local_expert = local;
    named->weight += routing_.weight(token, slot);
  }
}

void RankRowsBaseline::place_rows() {
  sent_.place();
  sent_slots_.reserve(static_cast<std::uint64_t>(sent_.total()) * slots_per_row() * sizeof(Slot));
  std::vector<std::int64_t> next(sent_.offsets);
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    const auto at = static_cast<std::size_t>(token);
    for (std::size_t i = row_begin_[at]; i < row_begin_[at + 1]; ++i) {
      const auto rank = static_cast<int>(rows_[i]);
      rows_[i] = next[static_cast<std::size_t>(rank)]++;
      write_slots(token, rank, slots_of(sent_slots_, rows_[i]));
    }
  }
}

void RankRowsBaseline::place_slots() {
  std::vector<std::int64_t> next(local_experts_.size());
  const std::span<const Slot> slots(reinterpret_cast<const Slot*>(received_slots_.data()),
                                    static_cast<std::size_t>(received_.total()) * slots_per_row());
  for (const Slot& slot : slots) {
    if (slot.local_expert >= 0) ++next[static_cast<std::size_t>(slot.local_expert)];
  }
  place_experts(next);
  std::copy_n(expert_offsets_.begin(), next.size(), next.begin());
  places_.resize(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::int32_t local = slots[i].local_expert;
    places_[i] = local < 0 ? -1 : next[static_cast<std::size_t>(local)]++;
  }
}

void RankRowsBaseline::exchange_counts() {
  list_rows();
  job_.alltoall(sent_.counts, received_.counts);
  place_rows();
  received_.place();
  const std::uint64_t slot_bytes = slots_per_row() * sizeof(Slot);
  received_slots_.reserve(static_cast<std::uint64_t>(received_.total()) * slot_bytes);
  job_.alltoallv(of(sent_slots_, sent_, slot_bytes), of(received_slots_, received_, slot_bytes));
  place_slots();
  reserve_rows();
}

void RankRowsBaseline::dispatch(ConstMatrix x) {
  const auto bytes = static_cast<std::size_t>(row_bytes_);
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    const auto at = static_cast<std::size_t>(token);
    for (std::size_t i = row_begin_[at]; i < row_begin_[at + 1]; ++i) {
      std::memcpy(sent_row(rows_[i]), x.row(token), bytes);
    }
  }
  send_out();
  const std::int64_t* place = places_.data();
  for (std::int64_t row = 0; row < received_.total(); ++row) {
    for (std::size_t slot = 0; slot < slots_per_row(); ++slot, ++place) {
      if (*place >= 0) std::memcpy(expert_row(*place), received_row(row), bytes);
    }
  }
}

void RankRowsBaseline::combine(Matrix out) {
  Summer summer(workload_, sum_bytes_);
  const std::int64_t* place = places_.data();
  for (std::int64_t row = 0; row < received_.total(); ++row) {
    summer.begin_row(received_row(row));
    for (const Slot& slot : slots_of(received_slots_, row)) {
      if (*place >= 0) summer.add(output_row(*place), slot.weight, true);
      ++place;
    }
  }
  summer.finish();
  send_back();
  for (std::int64_t token = 0; token < routing_.num_tokens; ++token) {
    const auto at = static_cast<std::size_t>(token);
    summer.begin_row(out.row(token));
    for (std::size_t i = row_begin_[at]; i < row_begin_[at + 1]; ++i) {
      summer.add(sent_row(rows_[i]), 1, false);
    }
  }
  summer.finish();
}

}  // namespace

std::unique_ptr<Alltoallv> make_rank_rows(detail::MpiJob& job, const Workload& workload) {
  return std::make_unique<RankRowsBaseline>(job, workload);
}

}  // namespace ferry::bench
