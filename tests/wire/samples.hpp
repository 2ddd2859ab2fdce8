#pragma once
// Headers and memberships for the tests of wire formats.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "plan/membership.hpp"
#include "wire/headers.hpp"
#include "wire/membership_codec.hpp"

namespace ferry::wire::test {

/// Bytes from text such as "46 52 0a".
std::vector<std::byte> from_hex(std::string_view text);

/// Such text with the weights 1, 0.5, -2 and 0.25 behind it.
inline std::string with_weights(std::string_view head) {
  return std::string(head) + " 00 00 80 3f 00 00 00 3f 00 00 00 c0 00 00 80 3e";
}

/// A copy on the heap of exactly this size, so that AddressSanitizer sees one byte too many.
class ExactBytes {
 public:
  explicit ExactBytes(std::span<const std::byte> bytes);
  std::span<const std::byte> span() const { return {bytes_.get(), size_}; }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  std::size_t size_;
};

/// Headers with every field different from its default and from every other field.
FragmentHeader sample_fragment();
MetadataHeader sample_metadata();
GrantMessage sample_grant();
PoisonMessage sample_poison();

template <typename Header>
std::vector<std::byte> encoded(const Header& header) {
  if constexpr (std::is_same_v<Header, FragmentHeader>) {
    std::vector<std::byte> bytes(kFragmentHeaderBytes);
    encode(header, std::span<std::byte, kFragmentHeaderBytes>(bytes));
    return bytes;
  } else if constexpr (std::is_same_v<Header, MetadataHeader>) {
    std::vector<std::byte> bytes(kMetadataHeaderBytes);
    encode(header, std::span<std::byte, kMetadataHeaderBytes>(bytes));
    return bytes;
  } else if constexpr (std::is_same_v<Header, GrantMessage>) {
    std::vector<std::byte> bytes(kGrantMessageBytes);
    encode(header, std::span<std::byte, kGrantMessageBytes>(bytes));
    return bytes;
  } else {
    return encode(header);
  }
}

/// Writes the right checksum into the last 4 bytes.
void reseal(std::vector<std::byte>& message);

/// Which memberships random_membership makes.
struct MembershipShape {
  std::uint64_t num_tokens = 0;
  int num_topk = 1;
  int num_columns = 1;
  double density = 0.5;  ///< share of the tokens that come
  bool slots = false;
  bool weights = true;
  bool ordered = false;  ///< by weight, as a bitmask of experts needs it
  double repeats = 0;    ///< share of the tokens that name what the one before names

  MembershipForm form() const { return {num_columns, slots, weights}; }
  MembershipLimits limits() const { return {num_tokens, num_topk, form()}; }
};
plan::Membership empty_membership(std::uint64_t num_tokens);
plan::Membership random_membership(const MembershipShape& shape, std::mt19937_64& rng);

/// Every pair of encodings.
std::vector<IndexEncoding> all_encodings();
std::string to_text(IndexEncoding encoding);

std::vector<std::byte> encoded(const plan::Membership& membership, const MembershipForm& form,
                               IndexEncoding encoding);
inline std::vector<std::byte> encoded(const plan::Membership& membership, int num_columns,
                                      IndexEncoding encoding) {
  return encoded(membership, MembershipForm{.num_columns = num_columns}, encoding);
}

}  // namespace ferry::wire::test
