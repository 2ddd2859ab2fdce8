// find_marked_rows: where the rows of a payload stand that pack_rows_within wrote.

#include <bit>

#include "kernels/marks.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::kernels {

bool find_marked_rows(const MarkedRowsJob& job, std::vector<MarkedRow>& rows) {
  rows.clear();
  const std::uint64_t num_marks = mark_bytes(job.num_rows);
  if (job.payload.size() < num_marks) return false;
  const std::span<const std::byte> marks = job.payload.last(num_marks);
  std::uint64_t num_escalated = 0;
  for (const std::byte mark : marks) {
    num_escalated += static_cast<std::uint64_t>(std::popcount(static_cast<unsigned char>(mark)));
  }
  if (job.num_rows % kBitsPerByte != 0 &&
      std::to_integer<unsigned>(marks.back()) >> job.num_rows % kBitsPerByte != 0) {
    return false;
  }
  const std::uint64_t plain = job.wire.row_bytes(job.hidden);
  const std::uint64_t escalated = job.escalated.row_bytes(job.hidden);
  if (num_escalated == 0 || job.payload.size() != num_marks + num_escalated * escalated +
                                                      (job.num_rows - num_escalated) * plain) {
    return false;
  }
  rows.reserve(job.num_rows);
  const std::byte* at = job.payload.data();
  for (std::uint32_t i = 0; i < job.num_rows; ++i) {
    const bool marked =
        (std::to_integer<unsigned>(marks[i / kBitsPerByte]) >> i % kBitsPerByte & 1U) != 0;
    rows.push_back({at, marked});
    at += marked ? escalated : plain;
  }
  return true;
}

}  // namespace ferry::kernels
