// Payload rows as hashes of (seed, rank, token, column), so that a row out of place or time shows,
// and what each expert makes of a row.

#include "support/rows.hpp"

#include <cmath>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "support/numbers.hpp"

namespace ferry::support {
namespace {

// The tests' own mixing (splitmix64): a fault in the library's must not hide in both.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

struct RowHash {
  std::uint32_t a;
  std::uint32_t b;
};

RowHash hash_of(const RowKey& key) {
  const std::uint64_t rank = static_cast<std::uint64_t>(key.rank) << 40;
  const std::uint64_t hash = mix(mix(key.seed) ^ mix(rank + static_cast<std::uint64_t>(key.token)));
  return {static_cast<std::uint32_t>(hash), static_cast<std::uint32_t>(hash >> 32)};
}

// 32 bits per column: 32-bit multiplies only, so that compilers vectorise the loops below.
std::uint32_t column_hash(RowHash row, std::uint32_t column) {
  std::uint32_t h = column * 0x9E3779B1U ^ row.a;
  h ^= h >> 16;
  h = h * 0x7FEB352DU + row.b;
  h ^= h >> 15;
  h *= 0x846CA68BU;
  return h ^ (h >> 16);
}

// Sign and fraction as they come; the exponent within a few powers of two of 1, so that sums of
// hundreds of terms stay finite in every dtype and cancel now and then.
std::uint32_t f32_pattern(std::uint32_t h) {
  return (h & 0x807FFFFFU) | ((120U + ((h >> 23) & 15U)) << 23);
}
std::uint16_t bf16_pattern(std::uint32_t h) {
  return static_cast<std::uint16_t>((h & 0x807FU) | ((120U + ((h >> 16) & 15U)) << 7));
}
std::uint16_t f16_pattern(std::uint32_t h) {
  return static_cast<std::uint16_t>((h & 0x83FFU) | ((11U + ((h >> 16) & 7U)) << 10));
}

float factor_of(int expert) {
  return 1.0F + static_cast<float>(mix(static_cast<std::uint64_t>(expert)) >> 44) * 0x1p-20F;
}

std::uint32_t bits_at(DType dtype, const std::byte* row, std::int64_t column) {
  std::uint32_t bits = 0;  // little endian: a short element fills the low half
  const auto size = element_bytes(dtype);
  std::memcpy(&bits, row + static_cast<std::uint64_t>(column) * size, size);
  return bits;
}

void load_values(DType dtype, const std::byte* row, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = from_bits(dtype, bits_at(dtype, row, static_cast<std::int64_t>(i)));
  }
}

}  // namespace

void fill_row(const RowKey& key, Matrix x) {
  const RowHash hash = hash_of(key);
  const auto columns = static_cast<std::uint32_t>(x.columns);
  std::byte* const row = x.row(key.token);
  switch (x.dtype) {
    case DType::f32:
      for (std::uint32_t c = 0; c < columns; ++c) {
        const std::uint32_t bits = f32_pattern(column_hash(hash, c));
        std::memcpy(row + c * std::size_t{4}, &bits, 4);
      }
      return;
    case DType::bf16:
      for (std::uint32_t c = 0; c < columns; ++c) {
        const std::uint16_t bits = bf16_pattern(column_hash(hash, c));
        std::memcpy(row + c * std::size_t{2}, &bits, 2);
      }
      return;
    case DType::f16:
      for (std::uint32_t c = 0; c < columns; ++c) {
        const std::uint16_t bits = f16_pattern(column_hash(hash, c));
        std::memcpy(row + c * std::size_t{2}, &bits, 2);
      }
      return;
  }
}

void fill_rows(std::uint64_t seed, int rank, Matrix x) {
  for (std::int64_t token = 0; token < x.rows; ++token) fill_row({seed, rank, token}, x);
}

void store_values(std::span<const float> values, Matrix target, std::int64_t index) {
  const auto size = element_bytes(target.dtype);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint32_t bits = to_bits(target.dtype, values[i]);
    std::memcpy(target.row(index) + i * size, &bits, size);
  }
}

void fill_row_with(float value, Matrix x, std::int64_t index) {
  store_values(std::vector<float>(static_cast<std::size_t>(x.columns), value), x, index);
}

std::byte extra_byte(const RowKey& key, std::int64_t index) {
  // Another seed than that of the values, so that no byte can be taken from the row itself.
  const RowHash hash = hash_of({~key.seed, key.rank, key.token});
  return static_cast<std::byte>(column_hash(hash, static_cast<std::uint32_t>(index)) >> 11);
}

void fill_extra(std::uint64_t seed, int rank, std::span<std::byte> extra,
                std::int64_t extra_bytes) {
  for (std::size_t i = 0; i < extra.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    extra[i] = extra_byte({seed, rank, at / extra_bytes}, at % extra_bytes);
  }
}

void row_values(const RowKey& key, DType dtype, std::span<float> values) {
  const RowHash hash = hash_of(key);
  for (std::uint32_t c = 0; c < values.size(); ++c) {
    const std::uint32_t h = column_hash(hash, c);
    switch (dtype) {
      case DType::f32: values[c] = from_bits(dtype, f32_pattern(h)); break;
      case DType::bf16: values[c] = from_bits(dtype, bf16_pattern(h)); break;
      case DType::f16: values[c] = from_bits(dtype, f16_pattern(h)); break;
    }
  }
}

void expert_values(int expert, DType dtype, std::span<const float> row, std::span<float> y) {
  const float factor = factor_of(expert);
  for (std::size_t i = 0; i < row.size(); ++i) y[i] = row[i] * factor;
  round_values(dtype, y);
}

void apply_experts(const WeightedExperts& experts, ConstMatrix rows, Matrix y, std::int64_t index) {
  std::vector<float> row(static_cast<std::size_t>(rows.columns));
  load_values(rows.dtype, rows.row(index), row);
  std::vector<float> sum(row.size());
  std::vector<float> values(row.size());
  for (std::size_t e = 0; e < experts.experts.size(); ++e) {
    expert_values(experts.experts[e], rows.dtype, row, values);
    for (std::size_t i = 0; i < row.size(); ++i) {
      const float term = values[i] * experts.weights[e];
      sum[i] = e == 0 ? term : sum[i] + term;  // starts from its first term: 0 + -0 is not -0
    }
  }
  store_values(sum, y, index);
}

void apply_expert(int expert, ConstMatrix rows, Matrix y, std::int64_t index) {
  std::vector<float> values(static_cast<std::size_t>(rows.columns));
  load_values(rows.dtype, rows.row(index), values);
  expert_values(expert, rows.dtype, values, values);
  store_values(values, y, index);
}

Model hashed_model(std::uint64_t seed, DType dtype) {
  return {[seed, dtype](int rank, std::int64_t token, std::span<float> values) {
            row_values({seed, rank, token}, dtype, values);
          },
          [dtype](int expert, std::span<const float> row, std::span<float> y) {
            expert_values(expert, dtype, row, y);
          },
          [seed](int rank, std::int64_t token, std::span<std::byte> bytes) {
            for (std::size_t i = 0; i < bytes.size(); ++i) {
              bytes[i] = extra_byte({seed, rank, token}, static_cast<std::int64_t>(i));
            }
          }};
}

std::optional<Difference> find_difference(ConstMatrix actual, std::int64_t row,
                                          std::span<const float> expected) {
  for (std::int64_t column = 0; column < actual.columns; ++column) {
    const std::uint32_t got = bits_at(actual.dtype, actual.row(row), column);
    const float value = expected[static_cast<std::size_t>(column)];
    const std::uint32_t wanted = to_bits(actual.dtype, value);
    if (got == wanted) continue;
    if (std::isnan(value) && std::isnan(from_bits(actual.dtype, got))) continue;
    return Difference{row, column, actual.dtype, got, wanted};
  }
  return std::nullopt;
}

std::string to_string(const Difference& difference) {
  return fmt::format("row {}, column {}: got {} ({:#x}), expected {} ({:#x})", difference.row,
                     difference.column, from_bits(difference.dtype, difference.actual),
                     difference.actual, from_bits(difference.dtype, difference.expected),
                     difference.expected);
}

}  // namespace ferry::support
