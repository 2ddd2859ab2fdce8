// Rows in payloads: see crossing.hpp.

#include "exchange/crossing.hpp"

#include <algorithm>

#include <fmt/format.h>

namespace ferry::detail {
namespace {

constexpr kernels::Positions kPositions[] = {kernels::Positions::coo, kernels::Positions::bitmask,
                                             kernels::Positions::run_length};

wire::RowPacking packing_of(kernels::Positions positions) {
  switch (positions) {
    case kernels::Positions::coo: return wire::RowPacking::coo;
    case kernels::Positions::bitmask: return wire::RowPacking::bitmask;
    case kernels::Positions::run_length: return wire::RowPacking::run_length;
  }
  return wire::RowPacking::plain;
}

/// Nothing where rows are not sparse.
std::optional<kernels::Positions> positions_of(wire::RowPacking packing) {
  for (const kernels::Positions positions : kPositions) {
    if (packing_of(positions) == packing) return positions;
  }
  return std::nullopt;
}

}  // namespace

std::uint64_t Crossing::most_bytes(std::uint64_t rows) const {
  if (max_relative_error == 0) return rows * (row_bytes() + extra_bytes);
  const std::uint64_t longest = std::max(row_bytes(), escalated.row_bytes(hidden));
  return rows * (longest + extra_bytes) + (rows + 7) / 8;
}

Packed RowPacker::pack(Transport& transport, DType dtype, std::span<const std::byte* const> rows,
                       std::byte* payload) {
  const kernels::PackJob job{.source_dtype = dtype,
                             .wire = crossing_.format,
                             .hidden = crossing_.hidden,
                             .rows = rows,
                             .out = payload};
  if (!crossing_.varies()) {
    transport.pack_rows(job);
    return count_plain(rows.size());
  }
  const Packed packed =
      crossing_.sparse ? pack_sparse(transport, job) : pack_within(transport, job);
  use_.rows += rows.size();
  use_.payload_bytes += packed.bytes;
  return packed;
}

Packed RowPacker::count_plain(std::uint64_t rows) {
  const std::uint64_t bytes = rows * crossing_.row_bytes();
  use_.rows += rows;
  use_.payload_bytes += bytes;
  return {.bytes = bytes};
}

Packed RowPacker::pack_within(Transport& transport, const kernels::PackJob& job) {
  const kernels::PackedRows packed =
      transport.pack_rows_within({.pack = job,
                                  .escalated = crossing_.escalated,
                                  .max_relative_error = crossing_.max_relative_error});
  use_.escalated_rows += packed.escalated;
  return {.bytes = packed.bytes,
          .packing = packed.escalated > 0 ? wire::RowPacking::marked : wire::RowPacking::plain};
}

// Dense rows first, where only the values are left that cross; so what arrives does not depend on
// how it is written. How, follows from what these rows hold: their values and runs are counted
// anyway when they are thinned out.
Packed RowPacker::pack_sparse(Transport& transport, kernels::PackJob job) {
  const auto num_rows = static_cast<std::uint32_t>(job.rows.size());
  const std::uint64_t dense_bytes = num_rows * crossing_.row_bytes();
  std::byte* const payload = job.out;
  if (dense_.size() < dense_bytes) dense_.resize(dense_bytes);
  job.out = dense_.data();
  transport.pack_rows(job);
  const kernels::SparseCounts counts =
      transport.keep_largest({.shape = crossing_.sparse_shape(),
                              .ratio = crossing_.sparse_ratio,
                              .block_columns = crossing_.sparse_block_columns,
                              .num_rows = num_rows,
                              .rows = dense_.data()});
  for (const auto& [positions, room] : choose_positions(num_rows, counts)) {
    const std::uint64_t made = transport.compress_rows({.shape = crossing_.sparse_shape(),
                                                        .positions = positions,
                                                        .num_rows = num_rows,
                                                        .rows = dense_.data(),
                                                        .out = std::span(payload, room)});
    if (made > 0) return {.bytes = made, .packing = packing_of(positions)};
  }
  const std::byte* const rows = dense_.data();
  transport.pack_rows({.source_dtype = dtype_of(crossing_.format.format),
                       .wire = crossing_.format,
                       .hidden = static_cast<std::int64_t>(num_rows) * crossing_.hidden,
                       .rows = std::span(&rows, 1),
                       .out = payload});
  return {.bytes = dense_bytes};
}

// Bytes of runs are an estimate; they get no more room than the next best takes.
std::vector<RowPacker::Attempt> RowPacker::choose_positions(
    std::uint32_t num_rows, const kernels::SparseCounts& counts) const {
  std::vector<Attempt> attempts;
  const std::uint64_t dense_bytes = num_rows * crossing_.row_bytes();
  for (const kernels::Positions positions : kPositions) {
    const std::uint64_t bytes =
        kernels::compressed_bytes(positions, crossing_.sparse_shape(), num_rows, counts);
    if (bytes < dense_bytes) attempts.push_back({positions, bytes});
  }
  std::ranges::sort(attempts, {}, &Attempt::room);
  for (std::size_t i = 0; i < attempts.size(); ++i) {
    attempts[i].room = i + 1 < attempts.size() ? attempts[i + 1].room : dense_bytes;
  }
  return attempts;
}

std::optional<std::string> ArrivedRows::find(Transport& transport, const Crossing& crossing,
                                             const wire::FragmentHeader& header,
                                             std::span<const std::byte> payload) {
  const std::uint64_t extra_bytes = header.num_rows * crossing.extra_bytes;
  const std::uint64_t plain_bytes = header.num_rows * crossing.row_bytes() + extra_bytes;
  first_ = payload.data();
  row_bytes_ = crossing.row_bytes();
  if (header.packing == wire::RowPacking::plain) {
    if (payload.size() != plain_bytes) {
      return fmt::format("{} rows in {} bytes; the plan says {} rows in {} bytes", header.num_rows,
                         payload.size(), header.num_rows, plain_bytes);
    }
    extra_ = first_ + plain_bytes - extra_bytes;
    return std::nullopt;
  }
  if (payload.size() < extra_bytes || payload.size() > crossing.most_bytes(header.num_rows)) {
    return fmt::format("{} rows in {} bytes; the plan allows {} to {} bytes", header.num_rows,
                       payload.size(), extra_bytes, crossing.most_bytes(header.num_rows));
  }
  const std::span<const std::byte> rows = payload.first(payload.size() - extra_bytes);
  extra_ = rows.data() + rows.size();
  if (!expand(transport, crossing, header, rows)) {
    return fmt::format("{} bytes that are not {} rows in packing {} of its format", rows.size(),
                       header.num_rows, static_cast<int>(header.packing));
  }
  return std::nullopt;
}

bool ArrivedRows::expand(Transport& transport, const Crossing& crossing,
                         const wire::FragmentHeader& header, std::span<const std::byte> rows) {
  const std::optional<kernels::Positions> positions = positions_of(header.packing);
  if (crossing.sparse != positions.has_value() || !crossing.varies()) return false;
  if (!positions) {
    return transport.find_marked_rows({.wire = crossing.format,
                                       .escalated = crossing.escalated,
                                       .hidden = crossing.hidden,
                                       .num_rows = header.num_rows,
                                       .payload = rows},
                                      marked_);
  }
  dense_ = std::make_unique_for_overwrite<std::byte[]>(header.num_rows * row_bytes_);
  first_ = dense_.get();
  return transport.expand_rows({.shape = crossing.sparse_shape(),
                                .positions = *positions,
                                .num_rows = header.num_rows,
                                .payload = rows,
                                .out = dense_.get()});
}

}  // namespace ferry::detail
