// Rows of which most values are 0: see sparse_rows.hpp. Each row becomes a mask of its columns, 64
// to a word, whatever way its positions are written. What looks at every column is SIMD.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sparse_rows.cpp"
#include "hwy/foreach_target.h"  // before highway.h: includes this file once per target
#include "hwy/highway.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "ferry/wire_format.hpp"

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::size_t kWordColumns = 64;

template <typename T>
using ElementTag = hn::CappedTag<T, kWordColumns>;

/// Calls visit(word, its first element) for each word of 64 elements; behind the last element of a
/// row stand zeros.
template <typename T, typename Visit>
HWY_INLINE void for_each_word(const std::byte* row, std::size_t count, const Visit& visit) {
  std::size_t word = 0;
  for (; (word + 1) * kWordColumns <= count; ++word) {
    visit(word, reinterpret_cast<const T*>(row) + word * kWordColumns);
  }
  const std::size_t done = word * kWordColumns;
  if (done == count) return;
  alignas(64) T tail[kWordColumns] = {};
  std::memcpy(tail, row + done * sizeof(T), (count - done) * sizeof(T));
  visit(word, tail);
}

/// Bit i of word w: element 64 w + i is not 0.
template <typename T>
HWY_NOINLINE void mask_elements(const std::byte* row, std::size_t count, std::uint64_t* words) {
  const ElementTag<T> d;
  const std::size_t lanes = hn::Lanes(d);
  for_each_word<T>(row, count, [&](std::size_t at, const T* from) {
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < kWordColumns; i += lanes) {
      std::uint8_t bytes[8] = {};  // StoreMaskBits writes whole bytes
      hn::StoreMaskBits(d, hn::Ne(hn::LoadU(d, from + i), hn::Zero(d)), bytes);
      std::uint64_t bits = 0;
      std::memcpy(&bits, bytes, sizeof bits);
      if (lanes < kWordColumns) bits &= (std::uint64_t{1} << lanes) - 1;
      word |= bits << i;
    }
    words[at] = word;
  });
}

/// The elements whose bits are set, one behind the other, to `out`, which has room for 64 more.
/// Returns behind the last.
template <typename T>
HWY_NOINLINE std::byte* gather_elements(const std::byte* row, std::size_t count,
                                        const std::uint64_t* words, std::byte* out) {
  const ElementTag<T> d;
  const std::size_t lanes = hn::Lanes(d);
  T* to = reinterpret_cast<T*>(out);
  for_each_word<T>(row, count, [&](std::size_t at, const T* from) {
    if (words[at] == 0) return;
    for (std::size_t i = 0; i < kWordColumns; i += lanes) {
      std::uint8_t bits[8];
      const std::uint64_t word = words[at] >> i;
      std::memcpy(bits, &word, sizeof bits);
      to += hn::CompressBitsStore(hn::LoadU(d, from + i), bits, d, to);
    }
  });
  return reinterpret_cast<std::byte*>(to);
}

void mask_row(const std::byte* row, std::size_t count, std::size_t element_bytes,
              std::uint64_t* words) {
  if (element_bytes == sizeof(std::uint16_t)) {
    mask_elements<std::uint16_t>(row, count, words);
  } else {
    mask_elements<std::uint32_t>(row, count, words);
  }
}

std::byte* gather_row(const std::byte* row, std::size_t count, std::size_t element_bytes,
                      const std::uint64_t* words, std::byte* out) {
  return element_bytes == sizeof(std::uint16_t)
             ? gather_elements<std::uint16_t>(row, count, words, out)
             : gather_elements<std::uint32_t>(row, count, words, out);
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <bit>
#include <cmath>
#include <vector>

#include "kernels/sparse_mask.hpp"
#include "kernels/sparse_rows.hpp"

namespace ferry::kernels {

HWY_EXPORT(mask_row);
HWY_EXPORT(gather_row);

void SparseMask::read(const std::byte* row) {
  HWY_DYNAMIC_DISPATCH(mask_row)(row, shape_.columns(), shape_.element_bytes, words_.data());
}

namespace {

constexpr std::int64_t kNarrowHidden = std::numeric_limits<std::uint16_t>::max();

/// Column numbers, and how many there are, take 2 bytes; else 4.
bool is_narrow(const SparseShape& shape) { return shape.hidden <= kNarrowHidden; }

/// Writes while there is room; what came after that is lost.
class Writer {
 public:
  explicit Writer(std::span<std::byte> out) : rest_(out) {}
  /// Where so many bytes go; null where there is no room.
  std::byte* take(std::size_t bytes) {
    if (bytes > rest_.size()) {
      fits_ = false;
      rest_ = {};
      return nullptr;
    }
    std::byte* const at = rest_.data();
    rest_ = rest_.subspan(bytes);
    return at;
  }
  void put(const void* from, std::size_t bytes) {
    if (std::byte* const at = take(bytes)) std::memcpy(at, from, bytes);
  }
  void put_varint(std::uint64_t number) {
    for (; number >= 0x80; number >>= 7U) put_byte((number & 0x7FU) | 0x80U);
    put_byte(number);
  }
  bool fits() const { return fits_; }
  std::size_t left() const { return rest_.size(); }

 private:
  void put_byte(std::uint64_t byte) {
    if (std::byte* const at = take(1)) *at = static_cast<std::byte>(byte);
  }

  std::span<std::byte> rest_;
  bool fits_ = true;
};

/// Reads while there is something; what is missing reads as 0 and is remembered.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> from) : rest_(from) {}
  const std::byte* take(std::size_t bytes) {
    if (bytes > rest_.size()) {
      good_ = false;
      return nullptr;
    }
    const std::byte* const at = rest_.data();
    rest_ = rest_.subspan(bytes);
    return at;
  }
  /// In its shortest form, at most 35 bits.
  std::uint64_t take_varint() {
    std::uint64_t number = 0;
    for (unsigned shift = 0; shift < 35; shift += 7) {
      const std::byte* const at = take(1);
      const std::uint64_t byte = at != nullptr ? std::to_integer<std::uint64_t>(*at) : 0;
      number |= (byte & 0x7FU) << shift;
      if ((byte & 0x80U) != 0) continue;
      if (byte == 0 && shift > 0) good_ = false;
      return number;
    }
    good_ = false;
    return 0;
  }
  void refuse() { good_ = false; }
  bool good() const { return good_; }
  bool at_end() const { return good_ && rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
  bool good_ = true;
};

/// Their number, then the columns, all as numbers of one size.
template <typename Number>
void write_columns(const SparseMask& mask, Writer& to) {
  const std::uint64_t count = mask.num_values();
  std::byte* at = to.take((1 + count) * sizeof(Number));
  if (at == nullptr) return;
  const auto put = [&](std::size_t number) {
    const auto narrow = static_cast<Number>(number);
    std::memcpy(at, &narrow, sizeof narrow);
    at += sizeof narrow;
  };
  put(count);
  mask.for_each(put);
}

void write_positions(const SparseMask& mask, const CompressJob& job, Writer& to) {
  switch (job.positions) {
    case Positions::coo:
      return is_narrow(job.shape) ? write_columns<std::uint16_t>(mask, to)
                                  : write_columns<std::uint32_t>(mask, to);
    case Positions::bitmask: return to.put(mask.words().data(), mask.num_bytes());
    case Positions::run_length: {
      std::size_t end = 0;
      to.put_varint(mask.num_runs());
      mask.for_each_run([&](std::size_t begin, std::size_t count) {
        to.put_varint(begin - end);
        to.put_varint(count - 1);
        end = begin + count;
      });
      return;
    }
  }
}

template <typename Number>
void read_columns(SparseMask& mask, std::size_t columns, Reader& from) {
  const auto take = [](const std::byte*& at) {
    Number number = 0;
    std::memcpy(&number, at, sizeof number);
    at += sizeof number;
    return std::size_t{number};
  };
  const std::byte* at = from.take(sizeof(Number));
  if (at == nullptr) return;
  const std::size_t count = take(at);
  if ((at = from.take(count * sizeof(Number))) == nullptr) return;
  std::size_t next = 0;  // the smallest column that may come
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t column = take(at);
    if (column < next || column >= columns) return from.refuse();
    mask.set(column, 1);
    next = column + 1;
  }
}

// Sets the mask; refuses positions that are none, or not in ascending order.
void read_positions(SparseMask& mask, const ExpandJob& job, Reader& from) {
  const std::size_t columns = job.shape.columns();
  mask.clear();
  switch (job.positions) {
    case Positions::coo:
      return is_narrow(job.shape) ? read_columns<std::uint16_t>(mask, columns, from)
                                  : read_columns<std::uint32_t>(mask, columns, from);
    case Positions::bitmask: {
      const std::byte* const bits = from.take(mask.num_bytes());
      if (bits == nullptr) return;
      std::memcpy(mask.words().data(), bits, mask.num_bytes());
      const std::size_t used = columns % SparseMask::kWordColumns;
      if (used != 0 && mask.words().back() >> used != 0) from.refuse();
      return;
    }
    case Positions::run_length: {
      const std::uint64_t runs = from.take_varint();
      std::uint64_t end = 0;
      for (std::uint64_t i = 0; i < runs && from.good(); ++i) {
        const std::uint64_t gap = from.take_varint();
        const std::uint64_t count = from.take_varint() + 1;
        // Two runs without a gap would be one.
        if ((i > 0 && gap == 0) || gap + count > columns - end) return from.refuse();
        mask.set(end + gap, count);
        end += gap + count;
      }
      return;
    }
  }
}

/// Puts the values of a row at their columns.
template <typename T>
void scatter(const SparseMask& mask, const std::byte* values, std::byte* row) {
  const std::span<const std::uint64_t> words = mask.words();
  for (std::size_t at = 0; at < words.size(); ++at) {
    std::byte* const columns = row + at * SparseMask::kWordColumns * sizeof(T);
    if (words[at] == ~std::uint64_t{0}) {
      std::memcpy(columns, values, SparseMask::kWordColumns * sizeof(T));
      values += SparseMask::kWordColumns * sizeof(T);
      continue;
    }
    for (std::uint64_t word = words[at]; word != 0; word &= word - 1) {
      const auto column = static_cast<std::size_t>(std::countr_zero(word));
      std::memcpy(columns + column * sizeof(T), values, sizeof(T));
      values += sizeof(T);
    }
  }
}

/// Of lengths with this mean, as they are where each column ends one with the same chance.
double mean_varint_bytes(double mean) {
  return mean <= 0 ? 1 : 1 + std::exp(-0x1p7 / mean) + std::exp(-0x1p14 / mean);
}

}  // namespace

std::uint64_t compress_rows(const CompressJob& job) {
  check_shape("compress_rows", job.shape);
  const std::size_t columns = job.shape.columns();
  const std::size_t size = job.shape.element_bytes;
  SparseMask mask(job.shape);
  // Whole vectors are written, so the values do not go straight to where they end.
  std::vector<std::byte> values((columns + SparseMask::kWordColumns) * size);
  Writer to(job.out);
  for (std::uint32_t i = 0; i < job.num_rows && to.fits(); ++i) {
    const std::byte* const row = job.rows + i * job.shape.row_bytes();
    mask.read(row);
    write_positions(mask, job, to);
    const std::byte* const end =
        HWY_DYNAMIC_DISPATCH(gather_row)(row, columns, size, mask.words().data(), values.data());
    to.put(values.data(), static_cast<std::size_t>(end - values.data()));
  }
  return to.fits() ? job.out.size() - to.left() : 0;
}

std::uint64_t compressed_bytes(Positions positions, const SparseShape& shape,
                               std::uint32_t num_rows, const SparseCounts& counts) {
  const std::uint64_t of_values = counts.values * shape.element_bytes;
  switch (positions) {
    case Positions::coo: return of_values + (num_rows + counts.values) * (is_narrow(shape) ? 2 : 4);
    case Positions::bitmask: return of_values + num_rows * ((shape.columns() + 7) / 8);
    case Positions::run_length: {
      if (counts.runs == 0) return of_values + num_rows;
      const auto runs = static_cast<double>(counts.runs);
      const auto values = static_cast<double>(counts.values);
      const double columns = static_cast<double>(shape.hidden) * num_rows;
      const double gap = (columns - values) / (runs + num_rows);
      const double of_runs =
          runs * (mean_varint_bytes(gap) + mean_varint_bytes(values / runs - 1)) +
          num_rows * (runs / num_rows < 0x80 ? 1 : 2);
      return of_values + static_cast<std::uint64_t>(of_runs);
    }
  }
  return of_values;
}

bool expand_rows(const ExpandJob& job) {
  check_shape("expand_rows", job.shape);
  const std::size_t size = job.shape.element_bytes;
  SparseMask mask(job.shape);
  Reader from(job.payload);
  for (std::uint32_t i = 0; i < job.num_rows; ++i) {
    std::byte* const row = job.out + i * job.shape.row_bytes();
    read_positions(mask, job, from);
    const std::byte* values = from.good() ? from.take(mask.num_values() * size) : nullptr;
    if (!from.good()) return false;
    std::memset(row, 0, job.shape.row_bytes());
    if (size == sizeof(std::uint16_t)) {
      scatter<std::uint16_t>(mask, values, row);
    } else {
      scatter<std::uint32_t>(mask, values, row);
    }
  }
  return from.at_end();
}

}  // namespace ferry::kernels
#endif  // HWY_ONCE
