#pragma once
// What the two baselines of alltoallv.hpp have in common inside: sums in batches, and how each is
// made.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "bench/alltoallv.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::bench {

template <typename Value>
std::uint64_t bytes_of(const std::vector<Value>& values) {
  return values.size() * sizeof(Value);
}

/// Gathers the terms of rows and sums them in batches.
class Summer {
 public:
  Summer(const Workload& workload, std::uint64_t& most_bytes)
      : dtype_(workload.shape.dtype), hidden_(workload.shape.hidden), most_bytes_(most_bytes) {}

  void begin_row(std::byte* out) {
    if (rows_.size() == kBatch) flush();
    rows_.push_back({out, static_cast<std::uint32_t>(terms_.size()), 0});
  }
  void add(const std::byte* row, float weight, bool weighted) {
    terms_.push_back({row, weight, wire_format_of(dtype_), weighted, false, false});
    ++rows_.back().count;
  }
  void flush() {
    for (const kernels::SumRow& row : rows_) {
      if (row.count == 0) continue;
      kernels::SumTerm& last = terms_[row.first + row.count - 1];
      last.ends_rank = last.ends_node = true;
    }
    kernels::sum_rows({dtype_, hidden_, rows_, terms_});
    most_bytes_ = std::max(most_bytes_, bytes_of(rows_) + bytes_of(terms_));
    rows_.clear();
    terms_.clear();
  }
  /// The last batch; the kernel's streaming stores are done after it.
  void finish() {
    flush();
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }

 private:
  // Rows that one call of the kernel sums: enough that it can fetch ahead.
  static constexpr std::size_t kBatch = 32;

  DType dtype_;
  std::int64_t hidden_;
  std::uint64_t& most_bytes_;
  std::vector<kernels::SumRow> rows_;
  std::vector<kernels::SumTerm> terms_;
};

std::unique_ptr<Alltoallv> make_expert_rows(detail::MpiJob& job, const Workload& workload);
std::unique_ptr<Alltoallv> make_rank_rows(detail::MpiJob& job, const Workload& workload);

}  // namespace ferry::bench
