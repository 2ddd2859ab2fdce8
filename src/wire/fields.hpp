#pragma once
// Writes and reads the fields of a header in order, with the parts that all headers share: magic,
// version and type in front, the checksum at the end. The reader keeps the first error it meets and
// goes on, so that a decoder is a plain list of fields and asks once.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/check.hpp"
#include "kernels/row_kernels.hpp"
#include "wire/bytes.hpp"
#include "wire/headers.hpp"

namespace ferry::wire {

inline constexpr std::uint32_t kMagic = 0x31595246;  // the bytes "FRY1"
inline constexpr std::size_t kPrefixBytes = 8;       // magic, version, type
inline constexpr std::size_t kCrcBytes = 4;
inline constexpr std::uint8_t kAfterFailure = 0x01;  // call flags
/// Everything of a poison message but its text.
inline constexpr std::size_t kPoisonFixedBytes = 44;

/// What is known of a message from its type alone.
struct MessageShape {
  MessageType type = MessageType::fragment;
  std::string_view name;
  std::size_t min_bytes = 0;
  std::size_t max_bytes = 0;
};

/// Requires: the buffer has exactly the bytes that are put.
class FieldWriter {
 public:
  FieldWriter(std::span<std::byte> out, MessageType type) : out_(out), at_(out.data()) {
    put(kMagic);
    put(kVersion);
    put(static_cast<std::uint16_t>(type));
  }

  template <typename T>
  void put(T value) {
    at_ = store(at_, value);
  }

  template <typename E>
  void put_enum(E value) {
    put(static_cast<std::uint8_t>(value));
  }

  /// Bytes 8 to 33 of every header that belongs to a call.
  void put_call(const CallId& call) {
    put(call.place);
    put(call.generation);
    put(call.exchange);
    put(call.plan);
    put(call.ordinal);
    put_enum(call.kind);
    put(call.after_failure ? kAfterFailure : std::uint8_t{0});
  }

  /// A grant without its kind, which stands where it packs well.
  void put_grant(const Grant& grant) {
    put(grant.exchange);
    put(grant.plan);
    put(grant.ordinal);
    put(grant.fragments);
  }

  void put_text(std::string_view text) { at_ = store_block(at_, text.data(), text.size()); }

  void seal() {
    put(kernels::crc32c(out_.first(out_.size() - kCrcBytes)));
    FERRY_ASSERT(at_ == out_.data() + out_.size(), "wrote {} bytes of {}", at_ - out_.data(),
                 out_.size());
  }

 private:
  std::span<std::byte> out_;
  std::byte* at_;
};

class FieldReader {
 public:
  /// Checks what all headers share; if that fails, every field reads as 0.
  FieldReader(std::span<const std::byte> bytes, const MessageShape& shape)
      : name_(shape.name), error_(find_frame_error(bytes, shape)) {
    if (!error_) rest_ = bytes.first(bytes.size() - kCrcBytes).subspan(kPrefixBytes);
  }

  template <typename T>
  T take() {
    if (rest_.size() < sizeof(T)) return T{};
    const T value = load<T>(rest_.data());
    rest_ = rest_.subspan(sizeof(T));
    return value;
  }

  template <typename E>
  E take_enum(std::string_view field, E last) {
    const auto value = take<std::uint8_t>();
    require(value <= static_cast<int>(last), field, value, static_cast<int>(last));
    return static_cast<E>(value);
  }

  /// One byte of which only the bits of `allowed` may be set.
  std::uint8_t take_flags(std::string_view field, std::uint8_t allowed) {
    const auto value = take<std::uint8_t>();
    if ((value & ~allowed) != 0) {
      fail(field, fmt::format("{:#04x}", value), fmt::format("only bits of {:#04x}", allowed));
    }
    return value;
  }

  CallId take_call() {
    CallId call;
    call.place = take<std::uint64_t>();
    call.generation = take<std::uint32_t>();
    call.exchange = take<std::uint32_t>();
    call.plan = take<std::uint32_t>();
    call.ordinal = take<std::uint32_t>();
    call.kind = take_enum("kind", kLastOpKind);
    call.after_failure = take_flags("call_flags", kAfterFailure) != 0;
    return call;
  }

  Grant take_grant() {
    Grant grant;
    grant.exchange = take<std::uint32_t>();
    grant.plan = take<std::uint32_t>();
    grant.ordinal = take<std::uint32_t>();
    grant.fragments = take<std::uint32_t>();
    return grant;
  }

  std::string take_text() {
    const auto* text = reinterpret_cast<const char*>(rest_.data());
    return std::string(text, std::exchange(rest_, {}).size());
  }

  void require_zero(std::string_view field, std::uint64_t value) {
    require(value == 0, field, value, 0);
  }

  std::size_t remaining() const { return rest_.size(); }

  void fail(std::string_view field, std::string_view value, std::string_view expected) {
    if (!error_) error_ = fmt::format("{}: {} is {}; expected {}", name_, field, value, expected);
  }

  /// The first error. Requires: all fields were taken.
  std::optional<std::string> finish() {
    FERRY_ASSERT(error_ || rest_.empty(), "{}: {} bytes were not read", name_, rest_.size());
    return std::move(error_);
  }

 private:
  static std::optional<std::string> find_frame_error(std::span<const std::byte> bytes,
                                                     const MessageShape& shape);

  void require(bool good, std::string_view field, std::uint64_t value, std::uint64_t last) {
    if (!good) fail(field, fmt::format("{}", value), last == 0 ? "0" : fmt::format("0..{}", last));
  }

  std::string_view name_;
  std::span<const std::byte> rest_;
  std::optional<std::string> error_;
};

}  // namespace ferry::wire
