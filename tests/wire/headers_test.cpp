// Headers come back as they went, texts are cut between characters, and ranks that differ are told
// in what.

#include <gtest/gtest.h>

#include <functional>

#include "samples.hpp"

namespace ferry::wire::test {
namespace {

constexpr std::uint64_t kHeadersSeed = 20240607;

template <typename Header>
void expect_round_trip(const Header& header) {
  const ExactBytes bytes(encoded(header));
  Header decoded;
  const auto error = decode(bytes.span(), decoded);
  ASSERT_FALSE(error) << *error;
  EXPECT_EQ(decoded, header);
}

TEST(Headers, SamplesComeBack) {
  expect_round_trip(sample_fragment());
  expect_round_trip(sample_metadata());
  expect_round_trip(sample_grant());
  expect_round_trip(sample_poison());
}

TEST(Headers, DefaultsComeBack) {
  expect_round_trip(FragmentHeader{});
  expect_round_trip(MetadataHeader{});
  expect_round_trip(GrantMessage{});
  expect_round_trip(PoisonMessage{});
}

TEST(Headers, RandomValuesComeBack) {
  SCOPED_TRACE(::testing::Message() << "seed " << kHeadersSeed);
  std::mt19937_64 rng(kHeadersSeed);
  const auto u32 = [&] { return static_cast<std::uint32_t>(rng()); };
  const auto kind = [&] { return static_cast<OpKind>(rng() % 8); };
  const auto dtype = [&] { return static_cast<DType>(rng() % 3); };
  const auto wire = [&] { return static_cast<WireFormat>(rng() % 8); };
  const auto block = [&] { return static_cast<std::uint16_t>(64U << rng() % 6); };
  for (int i = 0; i < 1000; ++i) {
    const CallId call{u32(), u32(), rng(), u32(), u32(), kind(), rng() % 2 == 0};
    const auto stream = [&] { return static_cast<Stream>(rng() % 2); };
    const Grant grant{u32(), u32(), u32(), u32(), kind(), stream()};
    const bool has_crc = rng() % 2 == 0;
    const Stream of_rows = stream();
    const auto packing =
        of_rows == Stream::rows ? static_cast<RowPacking>(rng() % 5) : RowPacking::plain;
    expect_round_trip(FragmentHeader{call, of_rows, u32(), u32(), u32(), has_crc ? u32() : 0,
                                     has_crc, packing, grant});
    const SharedOptions options{rng(),
                                rng(),
                                rng(),
                                rng(),
                                u32(),
                                u32(),
                                u32(),
                                u32(),
                                static_cast<std::uint16_t>(rng()),
                                dtype(),
                                wire(),
                                wire(),
                                wire(),
                                wire(),
                                block(),
                                static_cast<float>(rng() % 1000) / 1000,
                                static_cast<float>(rng() % 1000 + 1) / 1000,
                                static_cast<Strategy>(rng() % 4),
                                rng() % 2 == 0,
                                static_cast<Layout>(rng() % 2),
                                static_cast<WeightMode>(rng() % 3),
                                rng() % 2 == 0,
                                static_cast<std::uint16_t>(rng()),
                                u32()};
    expect_round_trip(MetadataHeader{call, u32(), static_cast<std::uint16_t>(rng()), rng(), options,
                                     rng(), u32()});
    expect_round_trip(GrantMessage{u32(), grant});
    expect_round_trip(PoisonMessage{call, static_cast<ErrorCode>(rng() % 11),
                                    std::string(rng() % (kPoisonTextBytes + 1), 'x')});
  }
}

TEST(Headers, PayloadCrcTravelsOnlyWithItsFlag) {
  FragmentHeader header = sample_fragment();
  header.has_crc = false;
  FragmentHeader decoded;
  ASSERT_FALSE(decode(encoded(header), decoded));
  EXPECT_EQ(decoded.payload_crc, 0U);
}

TEST(Headers, EnumsEndWhereTheDecodersThink) {
  EXPECT_EQ(to_string(OpKind::gather), "gather");
  EXPECT_EQ(to_string(kLastOpKind), "dispatch_backward with grad_weights");
  EXPECT_EQ(to_string(OpKind{8}), "unknown");
  EXPECT_EQ(to_string(DType{3}), "unknown");
  EXPECT_EQ(to_string(static_cast<ErrorCode>(11)), "unknown");
}

std::string text_after_trip(const std::string& text) {
  PoisonMessage message = sample_poison();
  message.text = text;
  const auto bytes = encoded(message);
  EXPECT_LE(bytes.size(), kControlLimitBytes);
  PoisonMessage decoded;
  const auto error = decode(bytes, decoded);
  EXPECT_FALSE(error) << *error;
  return decoded.text;
}

TEST(Headers, LongPoisonIsCutBetweenCharacters) {
  const std::string full(kPoisonTextBytes, 'a');
  EXPECT_EQ(text_after_trip(full), full);
  EXPECT_EQ(text_after_trip(full + "b"), full);
  // A character of 2, 3 or 4 bytes across the limit goes as a whole; one that ends there stays.
  for (const std::string character : {"é", "€", "🚢"}) {
    for (std::size_t inside = 0; inside <= character.size(); ++inside) {
      const std::string before(kPoisonTextBytes - inside, 'a');
      const std::string expected = inside == character.size() ? before + character : before;
      EXPECT_EQ(text_after_trip(before + character + "zzzzz"), inside == 0 ? before : expected)
          << character << inside;
    }
  }
  // Not UTF-8: cut at the limit, nothing lost before it.
  const std::string noise(kPoisonTextBytes + 9, '\x80');
  EXPECT_EQ(text_after_trip(noise), noise.substr(0, kPoisonTextBytes));
}

TEST(Headers, ControlMessagesAreWhatTheirTypeSays) {
  ControlMessage message;
  EXPECT_FALSE(decode(encoded(sample_grant()), message));
  EXPECT_EQ(message, ControlMessage(sample_grant()));
  EXPECT_FALSE(decode(encoded(sample_poison()), message));
  EXPECT_EQ(message, ControlMessage(sample_poison()));
  for (const auto& bytes : {encoded(sample_grant()), encoded(sample_poison())}) {
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      EXPECT_TRUE(decode(ExactBytes(Bytes(bytes).first(size)).span(), message)) << size;
    }
  }
  EXPECT_EQ(decode(encoded(sample_metadata()), message).value_or(""),
            "grant message: type is 2; expected 3");
  EXPECT_EQ(decode(Bytes(encoded(sample_poison())).first(43), message).value_or(""),
            "poison message: size is 43 bytes; expected 44..1068");
}

TEST(Headers, DifferenceNamesOptionValuesAndRanks) {
  const SharedOptions base = sample_metadata().options;
  EXPECT_FALSE(find_difference(base, 0, base, 3));
  const auto difference = [&](const std::function<void(SharedOptions&)>& change) {
    SharedOptions other = base;
    change(other);
    EXPECT_NE(other, base);
    return find_difference(base, 0, other, 3).value_or("none");
  };
  using O = SharedOptions;
  EXPECT_EQ(difference([](O& o) { o.hidden = 2048; }),
            "hidden is 7168 on rank 0 and 2048 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.dtype = DType::f32; }),
            "dtype is bf16 on rank 0 and f32 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.num_experts = 64; }),
            "num_experts is 256 on rank 0 and 64 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.num_topk = 2; }), "num_topk is 8 on rank 0 and 2 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.strategy = Strategy::flat; }),
            "strategy is node_dedup on rank 0 and flat on rank 3");
  EXPECT_EQ(difference([](O& o) { o.layout = Layout::expert_major; }),
            "layout is token_major on rank 0 and expert_major on rank 3");
  EXPECT_EQ(difference([](O& o) { o.weights = WeightMode::at_combine; }),
            "weights is none on rank 0 and at_combine on rank 3");
  EXPECT_EQ(difference([](O& o) { o.row_alignment = 8; }),
            "row_alignment is 513 on rank 0 and 8 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.extra_bytes = 4; }),
            "extra_bytes is 12 on rank 0 and 4 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.row_sources = false; }),
            "row_sources is true on rank 0 and false on rank 3");
  EXPECT_EQ(difference([](O& o) { o.wire_dispatch = WireFormat::bf16; }),
            "wire_dispatch is f16 on rank 0 and bf16 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.wire_combine = WireFormat::int8; }),
            "wire_combine is f32 on rank 0 and int8 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.wire_combine_backward = WireFormat::bf16; }),
            "wire_combine_backward is int8 on rank 0 and bf16 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.wire_dispatch_backward = WireFormat::bf16; }),
            "wire_dispatch_backward is fp8_e4m3fn on rank 0 and bf16 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.max_relative_error = 0.25F; }),
            "max_relative_error is 0.5 on rank 0 and 0.25 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.wire_sparse_ratio = 1; }),
            "wire_sparse_ratio is 0.25 on rank 0 and 1 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.wire_block_columns = 64; }),
            "wire_block_columns is 256 on rank 0 and 64 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.fragment_bytes = 1; }),
            "fragment_bytes is 61440 on rank 0 and 1 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.range_tokens = 1; }),
            "range_tokens is 512 on rank 0 and 1 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.ranges_in_flight = 4; }),
            "ranges_in_flight is 3 on rank 0 and 4 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.checksum_payload = false; }),
            "checksum_payload is true on rank 0 and false on rank 3");
  EXPECT_EQ(difference([](O& o) { o.placement_version = 14; }),
            "placement_version is 13 on rank 0 and 14 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.topology_hash = 1; }),
            "topology_hash is 0xa1a2a3a4a5a6a7a8 on rank 0 and 0x0000000000000001 on rank 3");
  EXPECT_EQ(difference([](O& o) { o.placement_hash = 1; }),
            "placement_hash is 0xb1b2b3b4b5b6b7b8 on rank 0 and 0x0000000000000001 on rank 3");
  // Two differences: the one that a user can act on.
  EXPECT_EQ(difference([](O& o) { o.hidden = 1, o.placement_hash = 1; }),
            "hidden is 7168 on rank 0 and 1 on rank 3");
}

}  // namespace
}  // namespace ferry::wire::test
