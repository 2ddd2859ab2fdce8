// What a decoder of headers must refuse, and the texts it does it with.

#include <gtest/gtest.h>

#include "samples.hpp"

namespace ferry::wire::test {
namespace {

constexpr std::uint64_t kRefusalSeed = 777;

template <typename Header>
Header sample();
template <>
FragmentHeader sample() { return sample_fragment(); }
template <>
MetadataHeader sample() { return sample_metadata(); }
template <>
GrantMessage sample() { return sample_grant(); }
template <>
PoisonMessage sample() { return sample_poison(); }

template <typename Header>
std::string refusal(std::span<const std::byte> bytes) {
  const ExactBytes exact(bytes);
  const Header untouched = sample<Header>();
  Header out = untouched;
  const auto error = decode(exact.span(), out);
  if (error) {
    EXPECT_EQ(out, untouched);
  }
  return error.value_or("accepted");
}

/// The refusal of a sample with one byte changed and the checksum put right.
template <typename Header>
std::string refusal_with(std::size_t at, int value) {
  auto bytes = encoded(sample<Header>());
  bytes[at] = static_cast<std::byte>(value);
  reseal(bytes);
  return refusal<Header>(bytes);
}

template <typename Header>
class EveryHeader : public ::testing::Test {};
using Headers = ::testing::Types<FragmentHeader, MetadataHeader, GrantMessage, PoisonMessage>;
TYPED_TEST_SUITE(EveryHeader, Headers);

TYPED_TEST(EveryHeader, OtherLengthsAreRefused) {
  auto bytes = encoded(sample<TypeParam>());
  ASSERT_EQ(refusal<TypeParam>(bytes), "accepted");
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_NE(refusal<TypeParam>(std::span(bytes).first(size)), "accepted") << size;
    auto cut = std::vector(bytes.begin(), bytes.begin() + size);
    if (size < 12) continue;
    reseal(cut);
    EXPECT_NE(refusal<TypeParam>(cut), "accepted") << size;
  }
  for (int more = 1; more < 80; ++more) {
    bytes.push_back(std::byte{0});
    EXPECT_NE(refusal<TypeParam>(bytes), "accepted") << more;
    auto longer = bytes;
    reseal(longer);
    EXPECT_NE(refusal<TypeParam>(longer), "accepted") << more;
  }
}

TYPED_TEST(EveryHeader, EveryFlippedBitIsRefused) {
  const auto bytes = encoded(sample<TypeParam>());
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    auto flipped = bytes;
    flipped[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    EXPECT_NE(refusal<TypeParam>(flipped), "accepted") << "bit " << bit;
  }
}

// With a right checksum too, a byte is a field that comes back the same, or a refusal: one header
// has one encoding.
TYPED_TEST(EveryHeader, AcceptedBytesEncodeToThemselves) {
  SCOPED_TRACE(::testing::Message() << "seed " << kRefusalSeed);
  std::mt19937_64 rng(kRefusalSeed);
  const auto bytes = encoded(sample<TypeParam>());
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    auto changed = bytes;
    for (auto n = 1 + rng() % 3; n > 0; --n) {
      changed[rng() % changed.size()] = static_cast<std::byte>(rng());
    }
    reseal(changed);
    TypeParam out;
    if (decode(ExactBytes(changed).span(), out)) continue;
    ++accepted;
    EXPECT_EQ(encoded(out), changed);
  }
  EXPECT_GT(accepted, 1000);
}

TYPED_TEST(EveryHeader, TextsNameFieldValueAndExpectation) {
  using Header = TypeParam;
  EXPECT_NE(refusal_with<Header>(0, 'X').find("magic is 0x31595258; expected 0x31595246"),
            std::string::npos);
  EXPECT_NE(refusal_with<Header>(4, 2).find("version is 2; expected 1"), std::string::npos);
  EXPECT_NE(refusal_with<Header>(6, 9).find("type is 9; expected "), std::string::npos);
  auto bytes = encoded(sample<Header>());
  bytes.back() ^= std::byte{1};
  EXPECT_NE(refusal<Header>(bytes).find("header_crc is 0x"), std::string::npos);
}

TEST(HeaderRefusal, FieldsOfFragments) {
  using Header = FragmentHeader;
  EXPECT_EQ(refusal_with<Header>(32, 8), "fragment header: kind is 8; expected 0..7");
  EXPECT_EQ(refusal_with<Header>(34, 255), "fragment header: grant_kind is 255; expected 0..7");
  EXPECT_EQ(refusal_with<Header>(33, 2),
            "fragment header: call_flags is 0x02; expected only bits of 0x01");
  EXPECT_EQ(refusal_with<Header>(35, 0x81),
            "fragment header: flags is 0x81; expected only bits of 0x3f");
  EXPECT_EQ(refusal_with<Header>(35, 0x29),
            "fragment header: packing in flags is 5; expected 0..4");
  EXPECT_EQ(refusal_with<Header>(35, 0x0B),
            "fragment header: packing in flags is 1; expected 0..0");
  EXPECT_EQ(refusal_with<Header>(35, 0),
            "fragment header: payload_crc without its flag is 3735928559; expected 0");
  EXPECT_EQ(refusal<Header>({}), "fragment header: size is 0 bytes; expected 72");
}

TEST(HeaderRefusal, FieldsOfMetadata) {
  using Header = MetadataHeader;
  EXPECT_EQ(refusal_with<Header>(32, 8), "metadata header: kind is 8; expected 0..7");
  EXPECT_EQ(refusal_with<Header>(34, 4),
            "metadata header: flags is 0x04; expected only bits of 0x03");
  EXPECT_EQ(refusal_with<Header>(35, 2), "metadata header: layout is 2; expected 0..1");
  EXPECT_EQ(refusal_with<Header>(116, 3), "metadata header: weights is 3; expected 0..2");
  EXPECT_EQ(refusal_with<Header>(117, 1), "metadata header: reserved is 1; expected 0");
  EXPECT_EQ(refusal_with<Header>(112, 3), "metadata header: dtype is 3; expected 0..2");
  EXPECT_EQ(refusal_with<Header>(113, 8), "metadata header: wire_dispatch is 8; expected 0..7");
  EXPECT_EQ(refusal_with<Header>(114, 8), "metadata header: wire_combine is 8; expected 0..7");
  EXPECT_EQ(refusal_with<Header>(131, 0xBF),
            "metadata header: max_relative_error is -0.5; expected 0 to below 1");
  EXPECT_EQ(refusal_with<Header>(135, 0x40),
            "metadata header: wire_sparse_ratio is 4; expected above 0, to 1");
  EXPECT_EQ(refusal_with<Header>(115, 4), "metadata header: strategy is 4; expected 0..3");
  EXPECT_EQ(refusal_with<Header>(124, 8),
            "metadata header: wire_combine_backward is 8; expected 0..7");
  EXPECT_EQ(refusal_with<Header>(125, 8),
            "metadata header: wire_dispatch_backward is 8; expected 0..7");
  EXPECT_EQ(refusal_with<Header>(126, 1),
            "metadata header: wire_block_columns is 257; expected a power of two from 64 to 2048");
  for (const int upper_byte : {0, 3, 16, 255}) {
    EXPECT_NE(refusal_with<Header>(127, upper_byte).find("wire_block_columns is "),
              std::string::npos);
  }
}

TEST(HeaderRefusal, FieldsOfControlMessages) {
  EXPECT_EQ(refusal_with<GrantMessage>(28, 8), "grant message: kind is 8; expected 0..7");
  EXPECT_EQ(refusal_with<GrantMessage>(29, 2), "grant message: stream is 2; expected 0..1");
  for (const std::size_t at : {30, 31}) {
    EXPECT_NE(refusal_with<GrantMessage>(at, 1).find("grant message: reserved is "),
              std::string::npos);
  }
  EXPECT_EQ(refusal_with<PoisonMessage>(32, 8), "poison message: kind is 8; expected 0..7");
  EXPECT_EQ(refusal_with<PoisonMessage>(34, 11), "poison message: code is 11; expected 0..10");
  EXPECT_EQ(refusal_with<PoisonMessage>(36, 7),
            "poison message: text_bytes is 7; expected 6, from the size of the message");
  EXPECT_EQ(refusal_with<PoisonMessage>(39, 255),
            "poison message: text_bytes is 4278190086; expected 6, from the size of the message");
}

TEST(HeaderRefusal, PoisonLongerThanItsLimit) {
  auto bytes = encoded(sample_poison());
  const std::size_t text = kPoisonTextBytes + 1;
  bytes.resize(44 + text);
  bytes[36] = static_cast<std::byte>(text & 0xFF);
  bytes[37] = static_cast<std::byte>(text >> 8);
  reseal(bytes);
  EXPECT_EQ(refusal<PoisonMessage>(bytes), "poison message: size is 1069 bytes; expected 44..1068");
}

}  // namespace
}  // namespace ferry::wire::test
