#pragma once
// Reads NumPy .npy files of format versions 1 and 2: little-endian integers and floats in C order.
// Everything the header says is checked against the file before memory is allocated for it.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace ferry::tools {

enum class NpyKind : std::uint8_t { signed_integer, unsigned_integer, floating };

struct NpyArray {
  std::vector<std::int64_t> shape;
  NpyKind kind = NpyKind::unsigned_integer;
  std::uint64_t item_bytes = 1;
  std::vector<std::byte> data;

  std::int64_t num_items() const { return static_cast<std::int64_t>(data.size() / item_bytes); }
  /// Requires: an integer kind. Unsigned values above 2^63-1 come out as 2^63-1.
  std::int64_t integer(std::int64_t index) const;
  /// Requires: kind floating of 4 or 8 bytes.
  double number(std::int64_t index) const;
  /// For example "[8222, 26, 6]".
  std::string describe_shape() const;
};

/// Errors: EnvironmentError that names the file, what was found, what is allowed and the fix.
NpyArray read_npy(const std::filesystem::path& path);

}  // namespace ferry::tools
