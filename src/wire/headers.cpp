// Encoders and decoders of the four headers. An encoder and its decoder list the same fields in the
// same order; what every header has in common is in fields.hpp.

#include "wire/headers.hpp"

#include <algorithm>
#include <bit>

#include "wire/fields.hpp"

namespace ferry::wire {

namespace {

constexpr std::uint8_t kHasCrc = 0x01;  // fragment flags
constexpr std::uint8_t kValues = 0x02;
constexpr std::uint8_t kGrantsValues = 0x04;
constexpr int kPackingShift = 3;  // three bits
constexpr std::uint8_t kPackingMask = 0x07;
constexpr std::uint8_t kChecksumPayload = 0x01;  // metadata flags
constexpr std::uint8_t kRowSources = 0x02;

constexpr MessageShape kFragment{MessageType::fragment, "fragment header", kFragmentHeaderBytes,
                                 kFragmentHeaderBytes};
constexpr MessageShape kMetadata{MessageType::metadata, "metadata header", kMetadataHeaderBytes,
                                 kMetadataHeaderBytes};
constexpr MessageShape kGrant{MessageType::grant, "grant message", kGrantMessageBytes,
                              kGrantMessageBytes};
constexpr MessageShape kPoison{MessageType::poison, "poison message", kPoisonFixedBytes,
                               kPoisonFixedBytes + kPoisonTextBytes};

static_assert(kPoison.max_bytes <= kControlLimitBytes);
static_assert(kGrant.max_bytes <= kControlLimitBytes);

/// Longest prefix within the limit that does not end inside a UTF-8 character. A text that is not
/// UTF-8 is cut at the limit.
std::string_view cut_text(std::string_view text) {
  if (text.size() <= kPoisonTextBytes) return text;
  constexpr std::size_t kMaxContinuationBytes = 3;
  for (std::size_t back = 0; back <= kMaxContinuationBytes; ++back) {
    const auto next = static_cast<unsigned char>(text[kPoisonTextBytes - back]);
    if ((next & 0xC0) != 0x80) return text.substr(0, kPoisonTextBytes - back);
  }
  return text.substr(0, kPoisonTextBytes);
}

std::string expected_size(const MessageShape& shape) {
  if (shape.min_bytes == shape.max_bytes) return fmt::format("{}", shape.min_bytes);
  return fmt::format("{}..{}", shape.min_bytes, shape.max_bytes);
}

}  // namespace

std::optional<std::string> FieldReader::find_frame_error(Bytes bytes, const MessageShape& shape) {
  // Magic and version come before the length, which may differ between versions.
  if (bytes.size() < kPrefixBytes) {
    return fmt::format("{}: size is {} bytes; expected {}", shape.name, bytes.size(),
                       expected_size(shape));
  }
  const auto magic = load<std::uint32_t>(bytes.data());
  if (magic != kMagic) {
    return fmt::format("{}: magic is {:#010x}; expected {:#010x}, as every message of Ferry begins",
                       shape.name, magic, kMagic);
  }
  const auto version = load<std::uint16_t>(bytes.data() + 4);
  if (version != kVersion) {
    return fmt::format("{}: version is {}; expected {}; fix: run one version of Ferry on all ranks",
                       shape.name, version, kVersion);
  }
  const auto type = load<std::uint16_t>(bytes.data() + 6);
  if (type != static_cast<std::uint16_t>(shape.type)) {
    return fmt::format("{}: type is {}; expected {}", shape.name, type,
                       static_cast<std::uint16_t>(shape.type));
  }
  if (bytes.size() < shape.min_bytes || bytes.size() > shape.max_bytes) {
    return fmt::format("{}: size is {} bytes; expected {}", shape.name, bytes.size(),
                       expected_size(shape));
  }
  const std::size_t checked = bytes.size() - kCrcBytes;
  const auto stated = load<std::uint32_t>(bytes.data() + checked);
  const std::uint32_t actual = kernels::crc32c(bytes.first(checked));
  if (stated != actual) {
    return fmt::format("{}: header_crc is {:#010x}; expected {:#010x}, the CRC32C of its {} bytes",
                       shape.name, stated, actual, checked);
  }
  return std::nullopt;
}

bool same_call(const CallId& a, const CallId& b) {
  return a.exchange == b.exchange && a.plan == b.plan && a.kind == b.kind && a.ordinal == b.ordinal;
}

std::string place_text(std::uint64_t place) {
  return fmt::format("{}.{}", place >> 32U, place & 0xFFFFFFFFU);
}

namespace {

std::uint8_t flags_of(const FragmentHeader& header) {
  return static_cast<std::uint8_t>((header.has_crc ? kHasCrc : 0) |
                                   (header.stream == Stream::values ? kValues : 0) |
                                   (header.grant.stream == Stream::values ? kGrantsValues : 0) |
                                   (static_cast<int>(header.packing) << kPackingShift));
}

Stream stream_of(std::uint8_t flags, std::uint8_t bit) {
  return (flags & bit) != 0 ? Stream::values : Stream::rows;
}

}  // namespace

void encode(const FragmentHeader& header, std::span<std::byte, kFragmentHeaderBytes> out) {
  FieldWriter to(out, MessageType::fragment);
  to.put_call(header.call);
  to.put_enum(header.grant.kind);
  to.put(flags_of(header));
  to.put(header.index);
  to.put(header.num_rows);
  to.put(header.payload_bytes);
  to.put(header.has_crc ? header.payload_crc : std::uint32_t{0});
  to.put_grant(header.grant);
  to.seal();
}

std::optional<std::string> decode(Bytes bytes, FragmentHeader& out) {
  FieldReader from(bytes, kFragment);
  FragmentHeader header;
  header.call = from.take_call();
  const OpKind grant_kind = from.take_enum("grant_kind", kLastOpKind);
  const std::uint8_t flags =
      from.take_flags("flags", kHasCrc | kValues | kGrantsValues | kPackingMask << kPackingShift);
  header.has_crc = (flags & kHasCrc) != 0;
  header.stream = stream_of(flags, kValues);
  const int packing = flags >> kPackingShift & kPackingMask;
  const RowPacking last = header.stream == Stream::values ? RowPacking::plain : kLastRowPacking;
  if (packing > static_cast<int>(last)) {
    from.fail("packing in flags", fmt::format("{}", packing),
              fmt::format("0..{}", static_cast<int>(last)));
  }
  header.packing = static_cast<RowPacking>(packing);
  header.index = from.take<std::uint32_t>();
  header.num_rows = from.take<std::uint32_t>();
  header.payload_bytes = from.take<std::uint32_t>();
  header.payload_crc = from.take<std::uint32_t>();
  if (!header.has_crc) from.require_zero("payload_crc without its flag", header.payload_crc);
  header.grant = from.take_grant();
  header.grant.kind = grant_kind;
  header.grant.stream = stream_of(flags, kGrantsValues);
  if (auto error = from.finish()) return error;
  out = header;
  return std::nullopt;
}

void encode(const MetadataHeader& header, std::span<std::byte, kMetadataHeaderBytes> out) {
  const SharedOptions& options = header.options;
  FieldWriter to(out, MessageType::metadata);
  to.put_call(header.call);
  to.put(static_cast<std::uint8_t>((options.checksum_payload ? kChecksumPayload : 0) |
                                   (options.row_sources ? kRowSources : 0)));
  to.put_enum(options.layout);
  to.put(options.ranges_in_flight);
  to.put(header.failures_digest);
  to.put(header.num_tokens);
  to.put(header.body_bytes);
  to.put(options.hidden);
  to.put(options.topology_hash);
  to.put(options.placement_hash);
  to.put(options.placement_version);
  to.put(header.source);
  to.put(header.body_crc);
  to.put(options.num_experts);
  to.put(options.num_topk);
  to.put(options.fragment_bytes);
  to.put(options.range_tokens);
  to.put_enum(options.dtype);
  to.put_enum(options.wire_dispatch);
  to.put_enum(options.wire_combine);
  to.put_enum(options.strategy);
  to.put_enum(options.weights);
  to.put(std::uint8_t{0});
  to.put(options.row_alignment);
  to.put(options.extra_bytes);
  to.put_enum(options.wire_combine_backward);
  to.put_enum(options.wire_dispatch_backward);
  to.put(options.wire_block_columns);
  to.put(std::bit_cast<std::uint32_t>(options.max_relative_error));
  to.put(std::bit_cast<std::uint32_t>(options.wire_sparse_ratio));
  to.seal();
}

std::optional<std::string> decode(Bytes bytes, MetadataHeader& out) {
  FieldReader from(bytes, kMetadata);
  MetadataHeader header;
  SharedOptions& options = header.options;
  header.call = from.take_call();
  const std::uint8_t flags = from.take_flags("flags", kChecksumPayload | kRowSources);
  options.checksum_payload = (flags & kChecksumPayload) != 0;
  options.row_sources = (flags & kRowSources) != 0;
  options.layout = from.take_enum("layout", Layout::token_major);
  options.ranges_in_flight = from.take<std::uint16_t>();
  header.failures_digest = from.take<std::uint16_t>();
  header.num_tokens = from.take<std::uint64_t>();
  header.body_bytes = from.take<std::uint64_t>();
  options.hidden = from.take<std::uint64_t>();
  options.topology_hash = from.take<std::uint64_t>();
  options.placement_hash = from.take<std::uint64_t>();
  options.placement_version = from.take<std::uint64_t>();
  header.source = from.take<std::uint32_t>();
  header.body_crc = from.take<std::uint32_t>();
  options.num_experts = from.take<std::uint32_t>();
  options.num_topk = from.take<std::uint32_t>();
  options.fragment_bytes = from.take<std::uint32_t>();
  options.range_tokens = from.take<std::uint32_t>();
  options.dtype = from.take_enum("dtype", DType::f16);
  options.wire_dispatch = from.take_enum("wire_dispatch", kLastWireFormat);
  options.wire_combine = from.take_enum("wire_combine", kLastWireFormat);
  options.strategy = from.take_enum("strategy", Strategy::node_dedup);
  options.weights = from.take_enum("weights", WeightMode::none);
  from.require_zero("reserved", from.take<std::uint8_t>());
  options.row_alignment = from.take<std::uint16_t>();
  options.extra_bytes = from.take<std::uint32_t>();
  options.wire_combine_backward = from.take_enum("wire_combine_backward", kLastWireFormat);
  options.wire_dispatch_backward = from.take_enum("wire_dispatch_backward", kLastWireFormat);
  options.wire_block_columns = from.take<std::uint16_t>();
  if (!is_block_size(options.wire_block_columns)) {
    from.fail("wire_block_columns", fmt::format("{}", options.wire_block_columns),
              fmt::format("a power of two from {} to {}", kFewestBlockColumns, kMostBlockColumns));
  }
  options.max_relative_error = std::bit_cast<float>(from.take<std::uint32_t>());
  if (!(options.max_relative_error >= 0 && options.max_relative_error < 1)) {
    from.fail("max_relative_error", fmt::format("{}", options.max_relative_error), "0 to below 1");
  }
  options.wire_sparse_ratio = std::bit_cast<float>(from.take<std::uint32_t>());
  if (!(options.wire_sparse_ratio > 0 && options.wire_sparse_ratio <= 1)) {
    from.fail("wire_sparse_ratio", fmt::format("{}", options.wire_sparse_ratio), "above 0, to 1");
  }
  if (auto error = from.finish()) return error;
  out = header;
  return std::nullopt;
}

void encode(const GrantMessage& message, std::span<std::byte, kGrantMessageBytes> out) {
  FieldWriter to(out, MessageType::grant);
  to.put(message.generation);
  to.put_grant(message.grant);
  to.put_enum(message.grant.kind);
  to.put_enum(message.grant.stream);
  to.put(std::uint16_t{0});
  to.seal();
}

std::optional<std::string> decode(Bytes bytes, GrantMessage& out) {
  FieldReader from(bytes, kGrant);
  GrantMessage message;
  message.generation = from.take<std::uint32_t>();
  message.grant = from.take_grant();
  message.grant.kind = from.take_enum("kind", kLastOpKind);
  message.grant.stream = from.take_enum("stream", Stream::values);
  from.require_zero("reserved", from.take<std::uint16_t>());
  if (auto error = from.finish()) return error;
  out = message;
  return std::nullopt;
}

std::vector<std::byte> encode(const PoisonMessage& message) {
  const std::string_view text = cut_text(message.text);
  std::vector<std::byte> out(kPoisonFixedBytes + text.size());
  FieldWriter to(out, MessageType::poison);
  to.put_call(message.call);
  to.put_enum(message.code);
  to.put(std::uint8_t{0});
  to.put(static_cast<std::uint32_t>(text.size()));
  to.put_text(text);
  to.seal();
  return out;
}

std::optional<std::string> decode(Bytes bytes, PoisonMessage& out) {
  FieldReader from(bytes, kPoison);
  PoisonMessage message;
  message.call = from.take_call();
  message.code = from.take_enum("code", ErrorCode::unsupported);
  from.require_zero("reserved", from.take<std::uint8_t>());
  const auto text_bytes = from.take<std::uint32_t>();
  if (text_bytes != from.remaining()) {
    from.fail("text_bytes", fmt::format("{}", text_bytes),
              fmt::format("{}, from the size of the message", from.remaining()));
  }
  message.text = from.take_text();
  if (auto error = from.finish()) return error;
  out = std::move(message);
  return std::nullopt;
}

namespace {

template <typename Message>
std::optional<std::string> decode_as(Bytes bytes, ControlMessage& out) {
  Message message;
  if (auto error = decode(bytes, message)) return error;
  out = std::move(message);
  return std::nullopt;
}

}  // namespace

std::optional<std::string> decode(Bytes bytes, ControlMessage& out) {
  constexpr auto kPoisonType = static_cast<std::uint16_t>(MessageType::poison);
  if (bytes.size() >= kPrefixBytes && load<std::uint16_t>(bytes.data() + 6) == kPoisonType) {
    return decode_as<PoisonMessage>(bytes, out);
  }
  return decode_as<GrantMessage>(bytes, out);  // what is neither is refused as that
}

}  // namespace ferry::wire
