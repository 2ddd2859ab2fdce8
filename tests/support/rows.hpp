#pragma once
// Rows for tests and benchmarks that anyone can make anywhere: hashes of (seed, rank, token,
// column) as raw bit patterns, finite and of moderate size, and one transform per expert. A wrong
// route, a stale row or a swapped expert changes the values.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ferry/matrix.hpp"
#include "support/reference.hpp"

namespace ferry::support {

/// Which row: the seed is new for every repeat, so that rows of an earlier one are wrong.
struct RowKey {
  std::uint64_t seed = 0;
  int rank = 0;
  std::int64_t token = 0;
};

/// Writes row `key` into `x`, row key.token. Only the columns of the row are written.
void fill_row(const RowKey& key, Matrix x);
/// Writes rows 0..x.rows-1 of a rank.
/// Cost: about one ns per element; the loop vectorises
void fill_rows(std::uint64_t seed, int rank, Matrix x);
/// Writes one value into every column of row `index`.
void fill_row_with(float value, Matrix x, std::int64_t index);
/// Writes values into row `index`, rounded to its dtype.
void store_values(std::span<const float> values, Matrix target, std::int64_t index);
/// Byte `index` of the extra bytes of a token.
std::byte extra_byte(const RowKey& key, std::int64_t index);
/// Writes the extra bytes of a rank's tokens, `extra_bytes` each, one token after the other.
void fill_extra(std::uint64_t seed, int rank, std::span<std::byte> extra, std::int64_t extra_bytes);
/// Row `key` as numbers.
void row_values(const RowKey& key, DType dtype, std::span<float> values);

/// y = row x factor(expert) in FP32, rounded once to the dtype. `row` and `y` may be one span.
void expert_values(int expert, DType dtype, std::span<const float> row, std::span<float> y);
/// Experts of one row and what each output is multiplied with.
struct WeightedExperts {
  std::vector<int> experts;
  std::vector<float> weights;
};
/// y = sum over the experts of weight x expert_values in FP32, in their order, rounded once to the
/// dtype; for row `index` of two matrices of one dtype, which may be the same memory.
void apply_experts(const WeightedExperts& experts, ConstMatrix rows, Matrix y, std::int64_t index);
/// The same for one expert, unweighted.
void apply_expert(int expert, ConstMatrix rows, Matrix y, std::int64_t index);

/// The model of the oracle for rows of `seed`.
Model hashed_model(std::uint64_t seed, DType dtype);

/// The first element of a row that is not what it should be. NaNs of any payload are equal.
struct Difference {
  std::int64_t row = 0;
  std::int64_t column = 0;
  DType dtype = DType::f32;
  std::uint32_t actual = 0;    ///< bits
  std::uint32_t expected = 0;  ///< bits
};
std::optional<Difference> find_difference(ConstMatrix actual, std::int64_t row,
                                          std::span<const float> expected);
/// "row 3, column 17: got 1.5 (0x3fc0), expected 2 (0x4000)"
std::string to_string(const Difference& difference);

}  // namespace ferry::support
