// The samples that golden_test.cpp knows byte by byte, and random ones.

#include "samples.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

namespace ferry::wire::test {

std::vector<std::byte> from_hex(std::string_view text) {
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i + 1 < text.size(); ++i) {
    if (text[i] == ' ') continue;
    unsigned value = 0;
    std::from_chars(text.data() + i, text.data() + i + 2, value, 16);
    bytes.push_back(static_cast<std::byte>(value));
    ++i;
  }
  return bytes;
}

ExactBytes::ExactBytes(std::span<const std::byte> bytes)
    : bytes_(new std::byte[bytes.size()]), size_(bytes.size()) {
  std::copy(bytes.begin(), bytes.end(), bytes_.get());
}

FragmentHeader sample_fragment() {
  return {
      .call = {2, 3, 0x1122334455667788, 4, 5, OpKind::dispatch, true},
      .index = 6,
      .num_rows = 7,
      .payload_bytes = 0x01020304,
      .payload_crc = 0xDEADBEEF,
      .has_crc = true,
      .packing = RowPacking::coo,
      .grant = {9, 10, 11, 12, OpKind::combine},
  };
}

MetadataHeader sample_metadata() {
  return {
      .call = {2, 3, 0x1122334455667788, 4, 14, OpKind::plan, false},
      .source = 5,
      .failures_digest = 0x0F0E,
      .num_tokens = 4096,
      .options = {.hidden = 7168,
                  .topology_hash = 0xA1A2A3A4A5A6A7A8,
                  .placement_hash = 0xB1B2B3B4B5B6B7B8,
                  .placement_version = 13,
                  .num_experts = 256,
                  .num_topk = 8,
                  .fragment_bytes = 61440,
                  .range_tokens = 512,
                  .ranges_in_flight = 3,
                  .dtype = DType::bf16,
                  .wire_dispatch = WireFormat::f16,
                  .wire_combine = WireFormat::f32,
                  .wire_combine_backward = WireFormat::int8,
                  .wire_dispatch_backward = WireFormat::fp8_e4m3fn,
                  .wire_block_columns = 256,
                  .max_relative_error = 0.5F,
                  .wire_sparse_ratio = 0.25F,
                  .strategy = Strategy::node_dedup,
                  .checksum_payload = true,
                  .layout = Layout::token_major,
                  .weights = WeightMode::none,
                  .row_sources = true,
                  .row_alignment = 0x0201,
                  .extra_bytes = 12},
      .body_bytes = 0x0102030405,
      .body_crc = 0xCAFEF00D,
  };
}

GrantMessage sample_grant() { return {2, {9, 10, 11, 12, OpKind::dispatch_backward}}; }

PoisonMessage sample_poison() {
  return {{2, 3, 0x1122334455667788, 4, 5, OpKind::combine, true}, ErrorCode::peer_failed, "no: é"};
}

void reseal(std::vector<std::byte>& message) {
  // Bit by bit, not the library's kernel: the two must agree.
  std::uint32_t crc = 0xFFFFFFFF;
  for (std::size_t i = 0; i + 4 < message.size(); ++i) {
    crc ^= std::to_integer<std::uint32_t>(message[i]);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0x82F63B78 : 0);
  }
  crc = ~crc;
  std::memcpy(message.data() + message.size() - 4, &crc, 4);
}

plan::Membership empty_membership(std::uint64_t num_tokens) {
  plan::Membership membership;
  membership.num_tokens = num_tokens;
  return membership;
}

namespace {

/// Any bit pattern that is not NaN: zeros, subnormals and infinities included.
float random_weight(std::mt19937_64& rng) {
  auto bits = static_cast<std::uint32_t>(rng());
  if ((bits & 0x7F800000) == 0x7F800000) bits &= 0xFF800000;
  float weight;
  std::memcpy(&weight, &bits, sizeof(weight));
  return weight;
}

/// The entries of the last token, weights descending, and equal ones by column.
void order_last_token(plan::Membership& membership, std::size_t first) {
  std::vector<std::pair<float, std::uint16_t>> entries;
  for (std::size_t e = first; e < membership.columns.size(); ++e) {
    entries.emplace_back(-membership.weights[e], membership.columns[e]);
  }
  std::sort(entries.begin(), entries.end());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    membership.weights[first + i] = -entries[i].first;
    membership.columns[first + i] = entries[i].second;
  }
}

}  // namespace

plan::Membership random_membership(const MembershipShape& shape, std::mt19937_64& rng) {
  plan::Membership membership = empty_membership(shape.num_tokens);
  const int most = std::min(shape.num_topk, shape.num_columns);
  std::vector<std::uint16_t> columns(shape.num_columns);
  for (int i = 0; i < shape.num_columns; ++i) columns[i] = static_cast<std::uint16_t>(i);
  for (std::uint64_t token = 0; token < shape.num_tokens && most > 0; ++token) {
    if (std::uniform_real_distribution<>(0, 1)(rng) >= shape.density) continue;
    membership.tokens.push_back(static_cast<std::uint32_t>(token));
    const std::size_t first = membership.columns.size();
    int count = 1 + static_cast<int>(rng() % most);
    if (first > 0 && std::uniform_real_distribution<>(0, 1)(rng) < shape.repeats) {
      const std::uint32_t before = membership.entry_begin[membership.entry_begin.size() - 2];
      count = static_cast<int>(first - before);
      for (int i = 0; i < count; ++i) membership.columns.push_back(membership.columns[before + i]);
    } else {
      for (int i = 0; i < count; ++i) {
        std::swap(columns[i], columns[i + rng() % (columns.size() - i)]);
        membership.columns.push_back(columns[i]);
      }
    }
    for (int i = 0; i < count; ++i) {
      membership.weights.push_back(shape.weights ? random_weight(rng) : 1.0F);
    }
    if (shape.ordered) order_last_token(membership, first);
    if (shape.slots) {
      // Ascending, with gaps where there is room for them.
      int next = 0;
      for (int i = 0; i < count; ++i) {
        next +=
            static_cast<int>(rng() % static_cast<unsigned>(shape.num_topk - next - count + i + 1));
        membership.slots.push_back(static_cast<std::uint8_t>(next++));
      }
    }
    membership.entry_begin.push_back(static_cast<std::uint32_t>(membership.columns.size()));
  }
  return membership;
}

std::vector<IndexEncoding> all_encodings() {
  std::vector<IndexEncoding> result;
  for (const ListEncoding tokens : kListEncodings) {
    for (const ListEncoding experts : kListEncodings) result.push_back({tokens, experts});
  }
  return result;
}

std::string to_text(IndexEncoding encoding) {
  return std::string(to_string(encoding.tokens)) + " tokens, " +
         std::string(to_string(encoding.experts)) + " experts";
}

std::vector<std::byte> encoded(const plan::Membership& membership, const MembershipForm& form,
                               IndexEncoding encoding) {
  std::vector<std::byte> bytes;
  encode_membership(membership, form, encoding, bytes);
  return bytes;
}

}  // namespace ferry::wire::test
