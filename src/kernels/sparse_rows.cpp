// Rows of which most values are 0: see sparse_rows.hpp. Each row becomes a mask of its columns, 64
// to a word, whatever way its positions are written; only making the mask looks at every column,
// and is SIMD.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sparse_rows.cpp"
#include "hwy/foreach_target.h"  // before highway.h: includes this file once per target
#include "hwy/highway.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace ferry::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::size_t kWordColumns = 64;

/// Bit i of word w: element 64 w + i is not 0.
template <typename T>
void mask_elements(const std::byte* row, std::size_t count, std::uint64_t* words) {
  const hn::CappedTag<T, kWordColumns> d;
  const std::size_t lanes = hn::Lanes(d);
  alignas(64) T tail[kWordColumns];
  for (std::size_t begin = 0; begin < count; begin += kWordColumns) {
    const T* from = reinterpret_cast<const T*>(row) + begin;
    if (count - begin < kWordColumns) {
      std::memset(tail, 0, sizeof tail);
      std::memcpy(tail, row + begin * sizeof(T), (count - begin) * sizeof(T));
      from = tail;
    }
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < kWordColumns; i += lanes) {
      std::uint8_t bytes[8] = {};  // StoreMaskBits writes whole bytes
      hn::StoreMaskBits(d, hn::Ne(hn::LoadU(d, from + i), hn::Zero(d)), bytes);
      std::uint64_t bits = 0;
      std::memcpy(&bits, bytes, sizeof bits);
      if (lanes < kWordColumns) bits &= (std::uint64_t{1} << lanes) - 1;
      word |= bits << i;
    }
    *words++ = word;
  }
}

void mask_row(const std::byte* row, std::size_t count, std::size_t element_bytes,
              std::uint64_t* words) {
  if (element_bytes == sizeof(std::uint16_t)) {
    mask_elements<std::uint16_t>(row, count, words);
  } else {
    mask_elements<std::uint32_t>(row, count, words);
  }
}

}  // namespace ferry::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "base/check.hpp"
#include "kernels/sparse_rows.hpp"

namespace ferry::kernels {

HWY_EXPORT(mask_row);

namespace {

constexpr std::size_t kWordColumns = 64;
constexpr std::int64_t kNarrowHidden = std::numeric_limits<std::uint16_t>::max();

std::size_t columns_of(const SparseShape& shape) { return static_cast<std::size_t>(shape.hidden); }
std::size_t row_bytes(const SparseShape& shape) { return columns_of(shape) * shape.element_bytes; }
/// Of a column number, and of how many there are.
std::size_t column_bytes(const SparseShape& shape) { return shape.hidden > kNarrowHidden ? 4 : 2; }

/// The columns of one row that hold a value.
class Mask {
 public:
  explicit Mask(const SparseShape& shape)
      : columns_(columns_of(shape)), words_((columns_ + kWordColumns - 1) / kWordColumns) {}

  void read(const std::byte* row, std::size_t element_bytes) {
    HWY_DYNAMIC_DISPATCH(mask_row)(row, columns_, element_bytes, words_.data());
  }
  std::span<std::uint64_t> words() { return words_; }
  std::size_t num_bytes() const { return (columns_ + 7) / 8; }

  std::uint64_t num_values() const {
    std::uint64_t values = 0;
    for (const std::uint64_t word : words_) {
      values += static_cast<std::uint64_t>(std::popcount(word));
    }
    return values;
  }
  /// Runs of neighbouring columns: a column that holds a value, behind one that does not.
  std::uint64_t num_runs() const {
    std::uint64_t runs = 0;
    std::uint64_t before = 0;
    for (const std::uint64_t word : words_) {
      runs += static_cast<std::uint64_t>(std::popcount(word & ~((word << 1U) | before)));
      before = word >> (kWordColumns - 1);
    }
    return runs;
  }
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (std::size_t at = 0; at < words_.size(); ++at) {
      for (std::uint64_t word = words_[at]; word != 0; word &= word - 1) {
        visit(at * kWordColumns + static_cast<std::size_t>(std::countr_zero(word)));
      }
    }
  }
  /// visit(first column, columns)
  template <typename Visit>
  void for_each_run(const Visit& visit) const {
    std::size_t begin = 0;
    std::size_t end = 0;
    for_each([&](std::size_t column) {
      if (column != end || end == begin) {
        if (end > begin) visit(begin, end - begin);
        begin = column;
      }
      end = column + 1;
    });
    if (end > begin) visit(begin, end - begin);
  }
  void set(std::size_t begin, std::size_t count) {
    for (std::size_t column = begin; column < begin + count; ++column) {
      words_[column / kWordColumns] |= std::uint64_t{1} << column % kWordColumns;
    }
  }
  void clear() { std::ranges::fill(words_, 0); }

 private:
  std::size_t columns_;
  std::vector<std::uint64_t> words_;
};

/// Writes while there is room; what came after that is lost.
class Writer {
 public:
  explicit Writer(std::span<std::byte> out) : rest_(out) {}
  void put(const void* from, std::size_t bytes) {
    if (bytes > rest_.size()) {
      fits_ = false;
      rest_ = {};
      return;
    }
    std::memcpy(rest_.data(), from, bytes);
    rest_ = rest_.subspan(bytes);
  }
  void put_number(std::uint64_t number, std::size_t bytes) { put(&number, bytes); }
  void put_varint(std::uint64_t number) {
    for (; number >= 0x80; number >>= 7U) put_number((number & 0x7FU) | 0x80U, 1);
    put_number(number, 1);
  }
  bool fits() const { return fits_; }
  std::size_t left() const { return rest_.size(); }

 private:
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
  std::uint64_t take_number(std::size_t bytes) {
    std::uint64_t number = 0;
    if (const std::byte* const at = take(bytes)) std::memcpy(&number, at, bytes);
    return number;
  }
  /// In its shortest form, at most 32 bits.
  std::uint64_t take_varint() {
    std::uint64_t number = 0;
    for (unsigned shift = 0; shift < 35; shift += 7) {
      const std::uint64_t byte = take_number(1);
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

void write_positions(const Mask& mask, std::span<const std::uint64_t> words, const CompressJob& job,
                     Writer& to) {
  switch (job.positions) {
    case Positions::coo: {
      const std::size_t bytes = column_bytes(job.shape);
      to.put_number(mask.num_values(), bytes);
      mask.for_each([&](std::size_t column) { to.put_number(column, bytes); });
      return;
    }
    case Positions::bitmask: to.put(words.data(), mask.num_bytes()); return;
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

// Sets the mask; refuses positions that are none, or not in ascending order.
void read_positions(Mask& mask, const ExpandJob& job, Reader& from) {
  const std::size_t columns = columns_of(job.shape);
  mask.clear();
  switch (job.positions) {
    case Positions::coo: {
      const std::size_t bytes = column_bytes(job.shape);
      const std::uint64_t count = from.take_number(bytes);
      std::uint64_t next = 0;  // the smallest column that may come
      for (std::uint64_t i = 0; i < count && from.good(); ++i) {
        const std::uint64_t column = from.take_number(bytes);
        if (column < next || column >= columns) return from.refuse();
        mask.set(column, 1);
        next = column + 1;
      }
      return;
    }
    case Positions::bitmask: {
      const std::byte* const bits = from.take(mask.num_bytes());
      if (bits == nullptr) return;
      std::memcpy(mask.words().data(), bits, mask.num_bytes());
      const std::size_t used = columns % kWordColumns;
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

template <typename T>
void keep_in_block(T* block, std::size_t columns, std::size_t keep, std::vector<T>& magnitudes) {
  constexpr T kMagnitude = std::numeric_limits<T>::max() >> 1U;
  if (keep >= columns) return;
  magnitudes.clear();
  for (std::size_t i = 0; i < columns; ++i) magnitudes.push_back(block[i] & kMagnitude);
  const auto smallest = magnitudes.begin() + static_cast<std::ptrdiff_t>(keep - 1);
  std::nth_element(magnitudes.begin(), smallest, magnitudes.end(), std::greater<>());
  const T limit = *smallest;
  auto equal = static_cast<std::size_t>(std::count(magnitudes.begin(), smallest + 1, limit));
  for (std::size_t i = 0; i < columns; ++i) {
    const T magnitude = block[i] & kMagnitude;
    if (magnitude > limit) continue;
    if (magnitude == limit && equal > 0) {
      --equal;
    } else {
      block[i] = 0;
    }
  }
}

template <typename T>
void keep_in_rows(const KeepLargestJob& job) {
  constexpr T kMinusZero = static_cast<T>(T{1} << (std::numeric_limits<T>::digits - 1));
  const std::size_t columns = columns_of(job.shape);
  std::vector<T> row(columns);
  std::vector<T> magnitudes;
  for (std::uint32_t i = 0; i < job.num_rows; ++i) {
    std::byte* const at = job.rows + i * row_bytes(job.shape);
    std::memcpy(row.data(), at, row_bytes(job.shape));
    for (T& value : row) value = value == kMinusZero ? T{0} : value;
    for (std::size_t begin = 0; begin < columns; begin += job.block_columns) {
      const std::size_t count = std::min<std::size_t>(job.block_columns, columns - begin);
      const auto keep = static_cast<std::size_t>(std::ceil(job.ratio * static_cast<float>(count)));
      keep_in_block(row.data() + begin, count, std::max<std::size_t>(keep, 1), magnitudes);
    }
    std::memcpy(at, row.data(), row_bytes(job.shape));
  }
}

/// Of lengths with this mean, as they are where each column ends one with the same chance.
double mean_varint_bytes(double mean) {
  return mean <= 0 ? 1 : 1 + std::exp(-0x1p7 / mean) + std::exp(-0x1p14 / mean);
}

void check(const char* what, const SparseShape& shape) {
  FERRY_ASSERT(shape.hidden >= 1 && (shape.element_bytes == 2 || shape.element_bytes == 4),
               "{}: hidden = {}, elements of {} bytes", what, shape.hidden, shape.element_bytes);
}

}  // namespace

void keep_largest(const KeepLargestJob& job) {
  check("keep_largest", job.shape);
  FERRY_ASSERT(job.ratio > 0 && job.ratio <= 1 && job.block_columns > 0,
               "keep_largest: ratio = {} in blocks of {}", job.ratio, job.block_columns);
  if (job.shape.element_bytes == 2) {
    keep_in_rows<std::uint16_t>(job);
  } else {
    keep_in_rows<std::uint32_t>(job);
  }
}

CompressedRows compress_rows(const CompressJob& job) {
  check("compress_rows", job.shape);
  const std::size_t size = job.shape.element_bytes;
  Mask mask(job.shape);
  Writer to(job.out);
  CompressedRows made;
  for (std::uint32_t i = 0; i < job.num_rows; ++i) {
    const std::byte* const row = job.rows + i * row_bytes(job.shape);
    mask.read(row, size);
    made.values += mask.num_values();
    made.runs += mask.num_runs();
    write_positions(mask, mask.words(), job, to);
    mask.for_each_run(
        [&](std::size_t begin, std::size_t count) { to.put(row + begin * size, count * size); });
    if (!to.fits()) return {};
  }
  made.bytes = job.out.size() - to.left();
  return made;
}

double compressed_row_bytes(Positions positions, const SparseShape& shape, double values,
                            double runs) {
  const double of_values = values * shape.element_bytes;
  switch (positions) {
    case Positions::coo: return of_values + (1 + values) * static_cast<double>(column_bytes(shape));
    case Positions::bitmask: return of_values + std::ceil(static_cast<double>(shape.hidden) / 8);
    case Positions::run_length: {
      if (runs == 0) return of_values + 1;
      const double gap = (static_cast<double>(shape.hidden) - values) / (runs + 1);
      return of_values + (runs < 0x80 ? 1 : 2) +
             runs * (mean_varint_bytes(gap) + mean_varint_bytes(values / runs - 1));
    }
  }
  return of_values;
}

bool expand_rows(const ExpandJob& job) {
  check("expand_rows", job.shape);
  const std::size_t size = job.shape.element_bytes;
  Mask mask(job.shape);
  Reader from(job.payload);
  for (std::uint32_t i = 0; i < job.num_rows; ++i) {
    std::byte* const row = job.out + i * row_bytes(job.shape);
    read_positions(mask, job, from);
    const std::byte* values = from.good() ? from.take(mask.num_values() * size) : nullptr;
    if (!from.good()) return false;
    std::memset(row, 0, row_bytes(job.shape));
    mask.for_each_run([&](std::size_t begin, std::size_t count) {
      std::memcpy(row + begin * size, values, count * size);
      values += count * size;
    });
  }
  return from.at_end();
}

}  // namespace ferry::kernels
#endif  // HWY_ONCE
