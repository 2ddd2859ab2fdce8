// What sparse rows take, and what writing and reading them costs, beside one-core memcpy of the
// dense rows in the same run: the table of docs/wire-formats.md.
//
//   bench_sparse_rows            rows of 2048 bf16, 64 to a fragment
//   bench_sparse_rows --batch    fragments of 16 to 4096 rows, at one density
//
// Times are medians over repeats that alternate with memcpy; rows come back before that.

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "base/clock.hpp"
#include "kernels/sparse_rows.hpp"

namespace ferry::bench {
namespace {

using kernels::Positions;

constexpr kernels::SparseShape kShape{2048, 2};
constexpr std::size_t kRowBytes = 4096;
constexpr int kRepeats = 31;

/// A share of values, in runs of about `run` columns.
std::vector<std::byte> make_rows(std::uint32_t num_rows, double density, double run) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> chance;
  std::vector<std::byte> rows(num_rows * kRowBytes);
  bool inside = false;
  for (std::size_t at = 0; at < rows.size(); at += 2) {
    if (chance(random) < 1 / run) inside = chance(random) < density;
    const std::uint16_t bits = inside ? static_cast<std::uint16_t>(0x3F80U + random() % 128) : 0;
    std::memcpy(&rows[at], &bits, sizeof bits);
  }
  return rows;
}

double median_us(std::vector<double> times) {
  std::ranges::nth_element(times, times.begin() + kRepeats / 2);
  return times[kRepeats / 2] * 1e6;
}

double timed_s(const std::function<void()>& work) {
  const double begin = base::now_s();
  work();
  return base::now_s() - begin;
}

/// Size over that of dense rows; time of writing and of reading over memcpy of dense rows.
struct Cost {
  double bytes = 0;
  double encode = 0;
  double decode = 0;
};

Cost measure(Positions positions, const std::vector<std::byte>& rows) {
  const auto num_rows = static_cast<std::uint32_t>(rows.size() / kRowBytes);
  std::vector<std::byte> out(rows.size() * 2 + 64);
  std::vector<std::byte> back(rows.size());
  std::vector<std::byte> copy(rows.size());
  const kernels::CompressJob compress{kShape, positions, num_rows, rows.data(), out};
  const std::uint64_t bytes = kernels::compress_rows(compress);
  const kernels::ExpandJob expand{kShape, positions, num_rows, std::span(out).first(bytes),
                                  back.data()};
  if (!kernels::expand_rows(expand) || back != rows) throw std::runtime_error("rows are wrong");
  std::vector<double> copying;
  std::vector<double> encoding;
  std::vector<double> decoding;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    copying.push_back(timed_s([&] { std::memcpy(copy.data(), rows.data(), rows.size()); }));
    encoding.push_back(timed_s([&] { kernels::compress_rows(compress); }));
    decoding.push_back(timed_s([&] { kernels::expand_rows(expand); }));
  }
  return {static_cast<double>(bytes) / static_cast<double>(rows.size()),
          median_us(encoding) / median_us(copying), median_us(decoding) / median_us(copying)};
}

void print_row(std::string_view name, double density, const std::vector<std::byte>& rows) {
  fmt::print("| {} | {:.1f} % |", name, 100 * density);
  for (const Positions positions : {Positions::coo, Positions::bitmask, Positions::run_length}) {
    const Cost cost = measure(positions, rows);
    fmt::print(" {:.4f} | {:.1f} | {:.1f} |", cost.bytes, cost.encode, cost.decode);
  }
  fmt::print("\n");
}

/// Time of choosing what is kept, and counting it, over memcpy of the rows.
double measure_thinning(float ratio) {
  const std::vector<std::byte> rows = make_rows(64, 1, 1);
  std::vector<std::byte> thinned(rows.size());
  std::vector<double> copying;
  std::vector<double> thinning;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    copying.push_back(timed_s([&] { std::memcpy(thinned.data(), rows.data(), rows.size()); }));
    thinning.push_back(timed_s([&] {
      kernels::keep_largest(
          {.shape = kShape, .ratio = ratio, .num_rows = 64, .rows = thinned.data()});
    }));
  }
  return median_us(thinning) / median_us(copying);
}

void run(bool batches) {
  fmt::print(
      "| values | share | coo | write | read | bitmask | write | read | runs | write | read |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|\n");
  if (batches) {
    for (const std::uint32_t num_rows : {16U, 64U, 256U, 1024U, 4096U}) {
      print_row(fmt::format("{} rows", num_rows), 0.05, make_rows(num_rows, 0.05, 1));
    }
    return;
  }
  for (const auto& [name, length] : {std::pair("scattered", 1.0), std::pair("clustered", 32.0)}) {
    for (const double density : {0.001, 0.01, 0.03, 0.0625, 0.1, 0.2, 0.3, 0.5}) {
      print_row(name, density, make_rows(64, density, length));
    }
  }
  fmt::print("\n| kept | thinning |\n|---|---|\n");
  for (const float ratio : {0.05F, 0.3F, 0.5F, 1.0F}) {
    fmt::print("| {} | {:.1f} |\n", ratio, measure_thinning(ratio));
  }
}

}  // namespace
}  // namespace ferry::bench

int main(int count, char** arguments) {
  ferry::bench::run(count > 1 && std::string_view(arguments[1]) == "--batch");
}
