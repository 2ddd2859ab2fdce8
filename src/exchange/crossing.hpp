#pragma once
// How rows of one kind of operation cross between nodes: written into the payload of a fragment,
// and found again where it arrives. Most cross one behind the other, all of one size. Where their
// error has a limit, some are longer, and the fragment says which; sparse rows are as long as they
// have values.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "ferry/transport.hpp"
#include "kernels/row_kernels.hpp"
#include "kernels/sparse_rows.hpp"
#include "wire/headers.hpp"

namespace ferry::detail {

struct Crossing {
  std::int64_t hidden = 0;
  kernels::RowFormat format{};    ///< of sparse rows, that of their values
  std::uint64_t extra_bytes = 0;  ///< that stand behind the rows, for each
  /// Largest error of a quantised row, or it crosses in `escalated`; 0 = no limit.
  float max_relative_error = 0;
  kernels::RowFormat escalated{};
  bool sparse = false;
  float sparse_ratio = 1;
  std::uint32_t sparse_block_columns = kDefaultBlockColumns;

  /// The size of a row depends on its values.
  bool varies() const { return max_relative_error > 0 || sparse; }
  /// Of one row without its extra bytes: where its error has a limit the least, of a sparse row the
  /// most.
  std::uint64_t row_bytes() const { return format.row_bytes(hidden); }
  /// Room for `rows` rows and what stands beside them, whatever their values.
  std::uint64_t most_bytes(std::uint64_t rows) const;
  kernels::SparseShape sparse_shape() const {
    return {hidden, static_cast<std::uint32_t>(element_bytes(format.format))};
  }
};

/// What was written into a payload.
struct Packed {
  std::uint64_t bytes = 0;
  wire::RowPacking packing = wire::RowPacking::plain;
};

/// Writes the rows of one kind of operation, and knows what it has written.
class RowPacker {
 public:
  RowPacker() = default;
  explicit RowPacker(const Crossing& crossing) : crossing_(crossing) {}

  /// Writes rows of `dtype` to `payload`, which has room for most_bytes.
  Packed pack(Transport& transport, DType dtype, std::span<const std::byte* const> rows,
              std::byte* payload);
  /// `rows` rows of one size were written by a kernel.
  Packed count_plain(std::uint64_t rows);
  const WireUse& use() const { return use_; }

 private:
  Packed pack_within(Transport& transport, const kernels::PackJob& job);
  Packed pack_sparse(Transport& transport, kernels::PackJob job);
  /// A way to write sparse rows, and how many bytes it may take.
  struct Attempt {
    kernels::Positions positions = kernels::Positions::bitmask;
    std::uint64_t room = 0;
  };
  /// Those that are smaller than dense rows, the smallest first.
  std::vector<Attempt> choose_positions(std::uint32_t num_rows,
                                        const kernels::SparseCounts& counts) const;

  Crossing crossing_;
  WireUse use_;
  std::vector<std::byte> dense_;  ///< reused from call to call
};

/// Where the rows of an arrived fragment stand.
class ArrivedRows {
 public:
  ArrivedRows() = default;
  ArrivedRows(ArrivedRows&&) = default;
  ArrivedRows& operator=(ArrivedRows&&) = default;
  /// What is wrong with the payload, if anything.
  [[nodiscard]] std::optional<std::string> find(Transport& transport, const Crossing& crossing,
                                                const wire::FragmentHeader& header,
                                                std::span<const std::byte> payload);
  const std::byte* row(std::uint32_t i) const {
    return marked_.empty() ? first_ + i * row_bytes_ : marked_[i].row;
  }
  bool escalated(std::uint32_t i) const { return !marked_.empty() && marked_[i].escalated; }
  bool any_escalated() const { return !marked_.empty(); }
  const std::byte* extra() const { return extra_; }

 private:
  bool expand(Transport& transport, const Crossing& crossing, const wire::FragmentHeader& header,
              std::span<const std::byte> rows);

  const std::byte* first_ = nullptr;
  std::uint64_t row_bytes_ = 0;
  const std::byte* extra_ = nullptr;
  std::vector<kernels::MarkedRow> marked_;
  std::unique_ptr<std::byte[]> dense_;  ///< sparse rows, expanded
};

}  // namespace ferry::detail
