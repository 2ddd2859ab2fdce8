// What both baselines share: places, buffers, and the two exchanges of rows.
#include "bench/alltoallv.hpp"

#include <cstring>

#include "bench/alltoallv_parts.hpp"

namespace ferry::bench {

std::string_view to_string(BaselineRows rows) {
  switch (rows) {
    case BaselineRows::per_expert: return "alltoallv";
    case BaselineRows::per_rank: return "alltoallv_rank_rows";
  }
  return "?";
}

void GrowingBuffer::fill(unsigned char value) {
  if (bytes() > 0) std::memset(data(), value, bytes());
}

Alltoallv::Alltoallv(detail::MpiJob& job, const Workload& workload)
    : job_(job),
      workload_(workload),
      routing_(workload.routing[static_cast<std::size_t>(job.rank())].view()),
      row_bytes_(static_cast<std::int64_t>(workload.row_bytes())),
      num_ranks_(job.size()) {
  std::vector<int> num_local(static_cast<std::size_t>(num_ranks_));
  for (int expert = 0; expert < workload.placement.num_experts(); ++expert) {
    const int rank = workload.placement.rank_of(expert);
    local_index_.push_back(num_local[static_cast<std::size_t>(rank)]++);
    if (rank == job.rank()) local_experts_.push_back(expert);
  }
  expert_offsets_.resize(local_experts_.size() + 1);
  for (Parts* const parts : {&sent_, &received_}) {
    parts->counts.resize(static_cast<std::size_t>(num_ranks_));
    parts->place();
  }
}

void Alltoallv::Parts::place() {
  offsets.assign(counts.size() + 1, 0);
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    offsets[rank + 1] = offsets[rank] + counts[rank];
  }
}

detail::RankParts Alltoallv::of(const GrowingBuffer& buffer, const Parts& parts,
                                std::uint64_t unit_bytes) {
  return {buffer.data(), unit_bytes, parts.counts,
          std::span(parts.offsets).first(parts.counts.size())};
}

void Alltoallv::place_experts(std::span<const std::int64_t> counts) {
  for (std::size_t local = 0; local < counts.size(); ++local) {
    expert_offsets_[local + 1] = expert_offsets_[local] + counts[local];
  }
  const auto bytes = static_cast<std::uint64_t>(expert_offsets_.back() * row_bytes_);
  expert_rows_.reserve(bytes);
  outputs_.reserve(bytes);
}

void Alltoallv::reserve_rows() {
  sent_.place();
  received_.place();
  send_rows_.reserve(static_cast<std::uint64_t>(sent_.total() * row_bytes_));
  receive_rows_.reserve(static_cast<std::uint64_t>(received_.total() * row_bytes_));
}

void Alltoallv::send_out() {
  const auto unit = static_cast<std::uint64_t>(row_bytes_);
  job_.alltoallv(of(send_rows_, sent_, unit), of(receive_rows_, received_, unit));
}

void Alltoallv::send_back() {
  const auto unit = static_cast<std::uint64_t>(row_bytes_);
  job_.alltoallv(of(receive_rows_, received_, unit), of(send_rows_, sent_, unit));
}

Matrix Alltoallv::matrix_in(const GrowingBuffer& buffer) const {
  return {buffer.data(), workload_.shape.dtype, expert_offsets_.back(), workload_.shape.hidden, 0};
}

std::uint64_t Alltoallv::row_buffer_bytes() const {
  return send_rows_.bytes() + receive_rows_.bytes() + expert_rows_.bytes() + outputs_.bytes();
}

std::uint64_t Alltoallv::metadata_bytes() const {
  return sent_.bytes() + received_.bytes() + bytes_of(local_experts_) + bytes_of(local_index_) +
         bytes_of(expert_offsets_);
}

void Alltoallv::poison(unsigned char value) {
  for (GrowingBuffer* const buffer : {&send_rows_, &receive_rows_, &expert_rows_, &outputs_}) {
    buffer->fill(value);
  }
}

std::unique_ptr<Alltoallv> make_baseline(BaselineRows rows, detail::MpiJob& job,
                                         const Workload& workload) {
  switch (rows) {
    case BaselineRows::per_expert: return make_expert_rows(job, workload);
    case BaselineRows::per_rank: return make_rank_rows(job, workload);
  }
  return nullptr;
}

// Nothing is rounded on the way to an expert, and all ranks are alike.
support::Group oracle_of_rows(const Workload& workload) {
  const DType dtype = workload.shape.dtype;
  return {Topology::single_node(workload.num_ranks()),
          workload.placement,
          workload.shape.hidden,
          dtype,
          Strategy::flat,
          wire_format_of(dtype),
          wire_format_of(dtype)};
}

// Per expert: the sum over slots. Per rank: the sum over ranks of what each has summed and rounded,
// which is what the oracle knows as rows of (token, rank) that the caller has weighted.
support::Group oracle_of_sums(BaselineRows rows, const Workload& workload) {
  support::Group group = oracle_of_rows(workload);
  if (rows == BaselineRows::per_rank) {
    group.strategy = Strategy::rank_dedup;
    group.layout = Layout::token_major;
    group.weights = WeightMode::at_expert;
  }
  return group;
}

}  // namespace ferry::bench
