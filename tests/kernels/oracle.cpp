// Slow and obviously right: numbers are taken apart with ldexp and rounded with nearbyint.

#include "oracle.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>

#include <sys/mman.h>
#include <unistd.h>

namespace ferry::testing {
namespace {

struct Format {
  int exponent_bits;
  int mantissa_bits;
};

Format format_of(DType dtype) {
  if (dtype == DType::f32) return {8, 23};
  return dtype == DType::bf16 ? Format{8, 7} : Format{5, 10};
}

}  // namespace

std::uint32_t float_bits(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_from_bits(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void store_bits(DType dtype, std::uint32_t bits, std::byte* out) {
  const auto half = static_cast<std::uint16_t>(bits);
  if (dtype == DType::f32) {
    std::memcpy(out, &bits, 4);
  } else {
    std::memcpy(out, &half, 2);
  }
}

std::uint32_t load_bits(DType dtype, const std::byte* at) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, at, element_bytes(dtype));  // little endian, as all machines of the project
  return bits;
}

float value_of(DType dtype, const std::byte* at) {
  const std::uint32_t bits = load_bits(dtype, at);
  if (dtype == DType::f32) return float_from_bits(bits);
  const auto [exponent_bits, mantissa_bits] = format_of(dtype);
  const std::uint32_t mantissa = bits & ((1U << mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const bool negative = (bits >> (mantissa_bits + exponent_bits)) != 0;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (exponent == (1 << exponent_bits) - 1) {
    const std::uint32_t payload = mantissa << (23 - mantissa_bits);
    return float_from_bits((negative ? 0xFF800000U : 0x7F800000U) | payload);
  }
  const double magnitude =
      exponent == 0 ? std::ldexp(static_cast<double>(mantissa), 1 - bias - mantissa_bits)
                    : std::ldexp(static_cast<double>(mantissa + (1U << mantissa_bits)),
                                 exponent - bias - mantissa_bits);
  return static_cast<float>(negative ? -magnitude : magnitude);
}

std::uint32_t bits_of(DType dtype, float value) {
  if (dtype == DType::f32) return float_bits(value);
  const auto [exponent_bits, mantissa_bits] = format_of(dtype);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint32_t sign = std::signbit(value) ? 1U << (exponent_bits + mantissa_bits) : 0U;
  const std::uint32_t infinity = ((1U << exponent_bits) - 1) << mantissa_bits;
  if (std::isnan(value)) {
    const std::uint32_t payload = (float_bits(value) & 0x7FFFFFU) >> (23 - mantissa_bits);
    return sign | infinity | payload | (1U << (mantissa_bits - 1));
  }
  if (std::isinf(value)) return sign | infinity;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return sign;
  int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  double steps = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
  if (steps == std::ldexp(1.0, mantissa_bits + 1)) {
    steps /= 2;
    ++exponent;
  }
  if (exponent > bias) return sign | infinity;
  const auto whole = static_cast<std::uint32_t>(steps);
  if (whole < (1U << mantissa_bits)) return sign | whole;  // denormal
  return sign | (static_cast<std::uint32_t>(exponent + bias) << mantissa_bits) |
         (whole - (1U << mantissa_bits));
}

GuardedMemory::GuardedMemory(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t usable = (bytes + page - 1) / page * page;
  mapped_bytes_ = usable + 2 * page;
  void* memory = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("GuardedMemory: mmap failed");
  auto* base = static_cast<std::byte*>(memory);
  ::mprotect(base, page, PROT_NONE);
  ::mprotect(base + page + usable, page, PROT_NONE);
  begin_ = base + page;
  end_ = begin_ + usable;
}

GuardedMemory::~GuardedMemory() {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  ::munmap(begin_ - page, mapped_bytes_);
}

std::uint32_t test_element(DType dtype, std::uint64_t row, std::uint64_t column) {
  const std::uint64_t hash = base::mix64(base::combine_hash(row, column));
  const auto [exponent_bits, mantissa_bits] = format_of(dtype);
  const std::uint32_t mantissa = static_cast<std::uint32_t>(hash) & ((1U << mantissa_bits) - 1);
  const auto sign = static_cast<std::uint32_t>(hash >> 63);
  const int all_ones = (1 << exponent_bits) - 1;
  // Mostly numbers of like size, so that sums round in every bit; one in eight anything finite.
  const bool anything = (hash >> 60 & 7) == 0;
  const int near_one = (1 << (exponent_bits - 1)) - 5 + static_cast<int>(hash >> 32 & 7);
  const int exponent = anything ? static_cast<int>((hash >> 40) % all_ones) : near_one;
  return (((sign << exponent_bits) | static_cast<std::uint32_t>(exponent)) << mantissa_bits) |
         mantissa;
}

void fill_row(DType dtype, std::uint64_t row, std::size_t hidden, std::byte* out) {
  for (std::size_t i = 0; i < hidden; ++i) {
    store_bits(dtype, test_element(dtype, row, i), out + i * element_bytes(dtype));
  }
}

float sum_column(std::span<const kernels::SumTerm> terms, std::size_t column) {
  const auto plus = [](std::optional<float> sum, float value) {
    return sum ? static_cast<float>(*sum + value) : value;
  };
  std::optional<float> total;
  std::optional<float> node;
  std::optional<float> rank;
  for (const kernels::SumTerm& term : terms) {
    float value = value_of(dtype_of(term.format), term.row + column * element_bytes(term.format));
    if (term.weighted) {
      const volatile float product = term.weight * value;  // rounded: no fused multiply-add
      value = product;
    }
    rank = plus(rank, value);
    if (term.ends_rank) {
      node = plus(node, *rank);
      rank.reset();
    }
    if (term.ends_node) {
      total = plus(total, *node);
      node.reset();
    }
  }
  return total.value_or(0.0F);
}

}  // namespace ferry::testing
