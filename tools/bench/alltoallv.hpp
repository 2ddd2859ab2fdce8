#pragma once
// What an engineer writes by hand with MPI_Alltoallv, as the baseline that Ferry is measured
// against: counts all-to-all, pack, MPI_Alltoallv, unpack to expert-major, and back with the
// weighted sum. Rows are moved by memcpy, places are prefix sums made once per routing, buffers are
// used again, and sums are computed by Ferry's own SIMD kernel, so that what differs is the
// exchange. As in the frameworks that do this, rows for experts of the own rank take the same way.
//
//   rows    per expert: one per (token, expert); the outputs come back unweighted, home sums them
//           per rank:   one per (token, rank) with the experts and weights it is for; the receiver
//                       copies it to each of them and returns one weighted partial sum, rounded
//   steps   counts: 1 all-to-all (per rank: and 1 MPI_Alltoallv of experts and weights)
//           dispatch, combine: 1 MPI_Alltoallv each

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "bench/memory.hpp"
#include "bench/workload.hpp"
#include "ferry/matrix.hpp"
#include "support/reference.hpp"
#include "transport/mpi/mpi_module.hpp"

namespace ferry::bench {

enum class BaselineRows : std::uint8_t { per_expert = 0, per_rank = 1 };
inline constexpr std::array kBaselines = {BaselineRows::per_expert, BaselineRows::per_rank};
/// "alltoallv" and "alltoallv_rank_rows"
std::string_view to_string(BaselineRows rows);

/// Memory that only ever grows, so that a repeat finds what the last one left.
class GrowingBuffer {
 public:
  void reserve(std::uint64_t bytes) {
    if (bytes > memory_.bytes()) memory_ = HugeBuffer(bytes);
  }
  std::byte* data() const { return memory_.data(); }
  std::uint64_t bytes() const { return memory_.bytes(); }
  void fill(unsigned char value);

 private:
  HugeBuffer memory_;
};

/// One rank of the baseline. Every call is collective over the job.
class Alltoallv {
 public:
  Alltoallv(detail::MpiJob& job, const Workload& workload);
  Alltoallv(const Alltoallv&) = delete;
  Alltoallv& operator=(const Alltoallv&) = delete;
  virtual ~Alltoallv() = default;

  /// Who sends how many rows to whom, and where each row goes; dispatch and combine replay it.
  virtual void exchange_counts() = 0;
  /// x [num_tokens, hidden], contiguous -> rows().
  virtual void dispatch(ConstMatrix x) = 0;
  /// outputs() -> out [num_tokens, hidden], contiguous.
  virtual void combine(Matrix out) = 0;

  /// Expert-major: by expert, source rank, token.
  Matrix rows() const { return matrix_in(expert_rows_); }
  Matrix outputs() const { return matrix_in(outputs_); }
  /// Of local expert i: its global id, and its first row, with the number of rows at the end.
  std::span<const int> local_experts() const { return local_experts_; }
  std::span<const std::int64_t> expert_offsets() const { return expert_offsets_; }

  /// Expert rows, outputs, what is sent and received, and all metadata.
  std::uint64_t buffer_bytes() const { return row_buffer_bytes() + metadata_bytes(); }
  /// Fills all buffers of rows, so that nothing of an earlier repeat can pass.
  void poison(unsigned char value);

 protected:
  /// Parts that go to, or come from, each rank, in rows.
  struct Parts {
    std::vector<std::int64_t> counts;
    std::vector<std::int64_t> offsets;  ///< one more than counts: the end
    void place();                       ///< offsets from counts
    std::int64_t total() const { return offsets.back(); }
    std::uint64_t bytes() const { return 8 * (counts.size() + offsets.size()); }
  };
  static detail::RankParts of(const GrowingBuffer& buffer, const Parts& parts,
                              std::uint64_t unit_bytes);
  /// offsets from the rows of each local expert, and room for all of them.
  void place_experts(std::span<const std::int64_t> counts);
  /// Room for the rows of sent_ and received_.
  void reserve_rows();
  std::byte* sent_row(std::int64_t row) const { return send_rows_.data() + row * row_bytes_; }
  std::byte* received_row(std::int64_t row) const {
    return receive_rows_.data() + row * row_bytes_;
  }
  std::byte* expert_row(std::int64_t row) const { return expert_rows_.data() + row * row_bytes_; }
  std::byte* output_row(std::int64_t row) const { return outputs_.data() + row * row_bytes_; }
  void send_out();   ///< send_rows_ -> receive_rows_
  void send_back();  ///< receive_rows_ -> send_rows_
  virtual std::uint64_t metadata_bytes() const;

  detail::MpiJob& job_;
  const Workload& workload_;
  const Routing routing_;
  const std::int64_t row_bytes_;
  const int num_ranks_;
  std::vector<int> local_experts_;
  std::vector<int> local_index_;  ///< of every expert on its rank
  std::vector<std::int64_t> expert_offsets_;
  Parts sent_;
  Parts received_;

 private:
  Matrix matrix_in(const GrowingBuffer& buffer) const;
  std::uint64_t row_buffer_bytes() const;

  // The way back uses the buffers of the way out.
  GrowingBuffer send_rows_;
  GrowingBuffer receive_rows_;
  GrowingBuffer expert_rows_;
  GrowingBuffer outputs_;
};

std::unique_ptr<Alltoallv> make_baseline(BaselineRows rows, detail::MpiJob& job,
                                         const Workload& workload);
/// What the oracle must be asked for: the rows of dispatch, and the sums of combine.
support::Group oracle_of_rows(const Workload& workload);
support::Group oracle_of_sums(BaselineRows rows, const Workload& workload);

}  // namespace ferry::bench
