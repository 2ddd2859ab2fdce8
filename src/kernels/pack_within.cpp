// pack_rows_within and find_marked_rows: quantised rows whose error has a limit. Made of push_rows
// and pack_rows, row by row while it is in cache; what is added is arithmetic in one fixed order,
// so that every SIMD target takes the same decisions.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.hpp"
#include "kernels/float_state.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry::kernels {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::uint32_t kBitsPerByte = 8;

std::uint64_t mark_bytes(std::uint64_t num_rows) {
  return (num_rows + kBitsPerByte - 1) / kBitsPerByte;
}

void read_row(const std::byte* row, const RowFormat& format, std::span<float> out) {
  const PushRow source{row, 0, 1};
  std::byte* const target = reinterpret_cast<std::byte*>(out.data());
  push_rows({.source = format,
             .target_dtype = DType::f32,
             .hidden = static_cast<std::int64_t>(out.size()),
             .rows = std::span(&source, 1),
             .targets = std::span(&target, 1)});
}

/// Lanes i, i + 16, ... are added up alone, then lane i takes lane i + 8, i + 4, i + 2, i + 1.
struct Sum {
  float lanes[kLanes] = {};
  float total() {
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }
};

/// Whether the differences are small beside the values, as root mean squares. False where one is
/// not finite. Both are divided by the largest value first, so that no square is out of range.
bool is_within(std::span<const float> values, std::span<const float> decoded, float limit) {
  float largest = 0;
  for (const float value : values) largest = std::max(largest, std::fabs(value));
  if (largest == 0) {
    // std::max keeps its first argument where the second is a NaN.
    return std::ranges::none_of(values, [](float value) { return std::isnan(value); });
  }
  constexpr float kSmallest = 0x1p-126F;  // below it, the inverse would be infinite
  const float inverse = 1.0F / std::max(largest, kSmallest);
  Sum errors;
  Sum squares;
  const std::size_t whole = values.size() - values.size() % kLanes;
  const auto add = [&](std::size_t at, std::size_t lane) {
    const float error = (values[at] - decoded[at]) * inverse;
    const float value = values[at] * inverse;
    errors.lanes[lane] += error * error;
    squares.lanes[lane] += value * value;
  };
  for (std::size_t at = 0; at < whole; at += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) add(at + lane, lane);
  }
  for (std::size_t at = whole; at < values.size(); ++at) add(at, at - whole);
  return errors.total() <= limit * limit * squares.total();
}

}  // namespace

PackedRows pack_rows_within(const PackWithinJob& job) {
  const PackJob& pack = job.pack;
  FERRY_ASSERT(is_quantised(pack.wire.format) && !is_quantised(job.escalated.format),
               "pack_rows_within: {} and {}", to_string(pack.wire.format),
               to_string(job.escalated.format));
  const detail::FloatState state;
  const auto hidden = static_cast<std::size_t>(pack.hidden);
  std::vector<float> values(hidden);
  std::vector<float> decoded(hidden);
  std::vector<std::byte> marks(mark_bytes(pack.rows.size()));
  PackedRows packed;
  std::byte* out = pack.out;
  for (std::size_t i = 0; i < pack.rows.size(); ++i) {
    PackJob one = pack;
    one.rows = pack.rows.subspan(i, 1);
    one.out = out;
    pack_rows(one);
    read_row(pack.rows[i], pack.source_dtype, values);
    read_row(out, pack.wire, decoded);
    if (!is_within(values, decoded, job.max_relative_error)) {
      one.wire = job.escalated;
      pack_rows(one);
      marks[i / kBitsPerByte] |= static_cast<std::byte>(1U << i % kBitsPerByte);
      ++packed.escalated;
    }
    out += one.wire.row_bytes(pack.hidden);
  }
  if (packed.escalated > 0) {
    std::memcpy(out, marks.data(), marks.size());
    out += marks.size();
  }
  packed.bytes = static_cast<std::uint64_t>(out - pack.out);
  return packed;
}

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
