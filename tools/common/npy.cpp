// The header of an .npy file is a Python dictionary in text form. Only the three keys of the format
// are accepted, in any order, so a small scanner is enough.
// Source: numpy/lib/format.py, the description of the format.
#include "common/npy.hpp"

#include <cctype>
#include <charconv>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "common/failures.hpp"

namespace ferry::tools {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
// Real headers have about 120 bytes; more is not a header.
constexpr std::uint64_t kMaxHeaderBytes = 64 * 1024;

struct Header {
  std::string descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<std::int64_t>> shape;
};

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& why) {
  throw EnvironmentError(
      fmt::format("{}: {}; allowed: .npy version 1 or 2, little-endian integers or floats in C "
                  "order; fix: save it again with numpy.save",
                  path.string(), why));
}

/// Scans "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }".
class HeaderScanner {
 public:
  HeaderScanner(const std::filesystem::path& path, std::string_view text)
      : path_(path), text_(text) {}

  Header scan() {
    Header header;
    expect('{');
    while (!accept('}')) {
      const std::string key = quoted();
      expect(':');
      if (key == "descr") {
        header.descr = quoted();
      } else if (key == "fortran_order") {
        header.fortran_order = boolean();
      } else if (key == "shape") {
        header.shape = tuple();
      } else {
        refuse(path_, fmt::format("the header has the unknown key '{}'", key));
      }
      if (!accept(',') && peek() != '}') refuse(path_, "the header lacks ',' between its keys");
    }
    if (peek() != '\0') refuse(path_, "the header goes on after its '}'");
    if (header.descr.empty() || !header.fortran_order || !header.shape) {
      refuse(path_, "the header lacks one of the keys descr, fortran_order, shape");
    }
    return header;
  }

 private:
  char peek() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool accept(char wanted) {
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) {
    if (!accept(wanted)) {
      refuse(path_, fmt::format("the header has no '{}' at byte {}", wanted, at_));
    }
  }
  std::string quoted() {
    expect('\'');
    const std::size_t end = text_.find('\'', at_);
    if (end == std::string_view::npos) refuse(path_, "the header has an open quote");
    const std::string result(text_.substr(at_, end - at_));
    at_ = end + 1;
    return result;
  }
  bool boolean() {
    peek();
    for (const auto& [word, value] : {std::pair<std::string_view, bool>{"True", true},
                                      std::pair<std::string_view, bool>{"False", false}}) {
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return value;
      }
    }
    refuse(path_, "fortran_order is neither True nor False");
  }
  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> values;
    expect('(');
    while (!accept(')')) {
      peek();
      std::int64_t value = 0;
      const char* begin = text_.data() + at_;
      const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
      if (error != std::errc{} || value < 0) refuse(path_, "the shape is not a tuple of sizes");
      at_ += static_cast<std::size_t>(end - begin);
      values.push_back(value);
      if (!accept(',') && peek() != ')') refuse(path_, "the shape is not a tuple of sizes");
    }
    return values;
  }

  const std::filesystem::path& path_;
  std::string_view text_;
  std::size_t at_ = 0;
};

std::string read_file(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    throw EnvironmentError(
        fmt::format("{}: there is no such file; fix: give a directory that "
                    "holds topk_idx.npy and meta.json",
                    path.string()));
  }
  std::ifstream file(path, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  if (!file) {
    throw EnvironmentError(
        fmt::format("{}: cannot be read; fix: check its permissions", path.string()));
  }
  return bytes;
}

std::uint64_t little_endian(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    value |= static_cast<std::uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  }
  return value;
}

void set_type(const std::filesystem::path& path, std::string_view descr, NpyArray& array) {
  const bool known_order = descr.size() == 3 && (descr[0] == '<' || descr[0] == '|');
  const std::string_view type = known_order ? descr.substr(1) : descr;
  struct Type {
    std::string_view name;
    NpyKind kind;
    std::uint64_t bytes;
  };
  static constexpr Type kTypes[] = {
      {"i1", NpyKind::signed_integer, 1},   {"i2", NpyKind::signed_integer, 2},
      {"i4", NpyKind::signed_integer, 4},   {"i8", NpyKind::signed_integer, 8},
      {"u1", NpyKind::unsigned_integer, 1}, {"u2", NpyKind::unsigned_integer, 2},
      {"u4", NpyKind::unsigned_integer, 4}, {"u8", NpyKind::unsigned_integer, 8},
      {"f4", NpyKind::floating, 4},         {"f8", NpyKind::floating, 8}};
  for (const Type& candidate : kTypes) {
    if (known_order && candidate.name == type && (candidate.bytes == 1 || descr[0] == '<')) {
      array.kind = candidate.kind;
      array.item_bytes = candidate.bytes;
      return;
    }
  }
  refuse(path, fmt::format("its element type is '{}'", descr));
}

/// Bytes that the shape needs; nothing when they do not fit in 63 bits.
std::optional<std::uint64_t> bytes_of_shape(const NpyArray& array) {
  std::uint64_t bytes = array.item_bytes;
  for (const std::int64_t size : array.shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes) ||
        bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return std::nullopt;
    }
  }
  return bytes;
}

}  // namespace

NpyArray read_npy(const std::filesystem::path& path) {
  const std::string bytes = read_file(path);
  const std::string_view view = bytes;
  if (view.size() < 10 || view.substr(0, kMagic.size()) != kMagic) {
    refuse(path, "it does not begin as an .npy file");
  }
  const int version = static_cast<unsigned char>(view[6]);
  if (version != 1 && version != 2) refuse(path, fmt::format("its version is {}", version));
  const std::size_t length_bytes = version == 1 ? 2 : 4;
  const std::size_t header_begin = 8 + length_bytes;
  if (view.size() < header_begin) refuse(path, "it ends inside its header");
  const std::uint64_t header_bytes = little_endian(view.substr(8, length_bytes));
  if (header_bytes > kMaxHeaderBytes || header_bytes > view.size() - header_begin) {
    refuse(path, fmt::format("its header claims {} bytes, the file has {} more", header_bytes,
                             view.size() - header_begin));
  }
  const Header header = HeaderScanner(path, view.substr(header_begin, header_bytes)).scan();
  if (*header.fortran_order) refuse(path, "it is in Fortran order");

  NpyArray array;
  array.shape = *header.shape;
  set_type(path, header.descr, array);
  const std::string_view payload = view.substr(header_begin + header_bytes);
  const std::optional<std::uint64_t> needed = bytes_of_shape(array);
  if (!needed || *needed != payload.size()) {
    refuse(path,
           fmt::format("shape {} of '{}' needs {} bytes of data, the file has {}",
                       array.describe_shape(), header.descr,
                       needed ? fmt::format("{}", *needed) : "more than 2^63", payload.size()));
  }
  array.data.resize(payload.size());
  if (!payload.empty()) std::memcpy(array.data.data(), payload.data(), payload.size());
  return array;
}

std::int64_t NpyArray::integer(std::int64_t index) const {
  // The bytes are little endian in the file; widen by hand, so that the host's order is no matter.
  std::uint64_t value = 0;
  const std::byte* item = data.data() + static_cast<std::uint64_t>(index) * item_bytes;
  for (std::uint64_t i = 0; i < item_bytes; ++i) {
    value |= static_cast<std::uint64_t>(item[i]) << (8 * i);
  }
  if (kind == NpyKind::signed_integer) {
    const auto unused_bits = static_cast<int>(64 - 8 * item_bytes);
    return static_cast<std::int64_t>(value << unused_bits) >> unused_bits;
  }
  constexpr auto kLargest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  return static_cast<std::int64_t>(value > kLargest ? kLargest : value);
}

double NpyArray::number(std::int64_t index) const {
  const std::byte* item = data.data() + static_cast<std::uint64_t>(index) * item_bytes;
  if (item_bytes == sizeof(float)) {
    float value = 0;
    std::memcpy(&value, item, sizeof value);
    return static_cast<double>(value);
  }
  double value = 0;
  std::memcpy(&value, item, sizeof value);
  return value;
}

std::string NpyArray::describe_shape() const { return fmt::format("[{}]", fmt::join(shape, ", ")); }

}  // namespace ferry::tools
