// What the receiver knows (12 bytes: tokens, top-k, columns, form), then a membership.

#include <algorithm>
#include <cstring>
#include <random>

#include "fuzz/fuzz.hpp"
#include "wire/samples.hpp"

namespace ferry::fuzz {
namespace {

constexpr std::size_t kLimitsBytes = 12;
constexpr std::size_t kMostBytes = 1 << 16;
constexpr unsigned kSlots = 1;
constexpr unsigned kNoWeights = 2;

wire::MembershipLimits read_limits(Input input) {
  std::uint64_t num_tokens = 0;
  std::uint16_t num_columns = 0;
  std::memcpy(&num_tokens, input.data(), sizeof num_tokens);
  std::memcpy(&num_columns, &input[9], sizeof num_columns);
  const auto form = std::to_integer<unsigned>(input[11]);
  return {.num_tokens = num_tokens,
          .num_topk = std::to_integer<int>(input[8]),
          .form = {.num_columns = num_columns,
                   .slots = (form & kSlots) != 0,
                   .weights = (form & kNoWeights) == 0}};
}

std::vector<std::byte> write_limits(const wire::MembershipLimits& limits) {
  std::vector<std::byte> bytes(kLimitsBytes);
  const auto num_columns = static_cast<std::uint16_t>(limits.form.num_columns);
  std::memcpy(bytes.data(), &limits.num_tokens, sizeof limits.num_tokens);
  bytes[8] = static_cast<std::byte>(limits.num_topk);
  std::memcpy(&bytes[9], &num_columns, sizeof num_columns);
  bytes[11] = static_cast<std::byte>((limits.form.slots ? kSlots : 0) |
                                     (limits.form.weights ? 0 : kNoWeights));
  return bytes;
}

/// What users of a membership take for granted.
void check_range(const plan::Membership& membership, const wire::MembershipLimits& limits) {
  const std::size_t tokens = membership.tokens.size();
  const std::size_t entries = membership.columns.size();
  require(membership.num_tokens == limits.num_tokens, "num_tokens");
  require(membership.entry_begin.size() == tokens + 1, "one offset for each token, and the end");
  require(membership.entry_begin.front() == 0 && membership.entry_begin.back() == entries,
          "offsets from 0 to the end");
  require(membership.weights.size() == entries, "one weight for each entry");
  require(membership.slots.size() == (limits.form.slots ? entries : 0), "slots where wanted");
  for (std::size_t i = 0; i < tokens; ++i) {
    const std::uint32_t begin = membership.entry_begin[i];
    const std::uint32_t end = membership.entry_begin[i + 1];
    require(membership.tokens[i] < limits.num_tokens, "a token beyond the last");
    require(i == 0 || membership.tokens[i - 1] < membership.tokens[i], "tokens ascend");
    require(begin < end && end <= entries, "an entry at least");
    require(end - begin <= static_cast<std::uint32_t>(limits.num_topk), "more than num_topk");
    for (std::uint32_t entry = begin; entry < end; ++entry) {
      require(membership.columns[entry] < limits.form.num_columns, "a column beyond the last");
    }
  }
}

/// How the lists of a membership that was decoded are written.
wire::IndexEncoding read_encoding(Input membership) {
  const auto form = std::to_integer<unsigned>(membership[1]);
  return {static_cast<ListEncoding>(form & 3), static_cast<ListEncoding>(form >> 2 & 3)};
}

void check_round_trip(const plan::Membership& membership, const wire::MembershipLimits& limits,
                      wire::IndexEncoding encoding) {
  if (!wire::can_hold(encoding.experts, membership, limits.form)) return;
  const std::uint64_t size = wire::encoded_membership_bytes(membership, limits.form, encoding);
  // A bitmask of four billion tokens is no news.
  if (size > kMostBytes) return;
  const std::vector<std::byte> bytes = wire::test::encoded(membership, limits.form, encoding);
  require(bytes.size() == size, "another size: " + wire::test::to_text(encoding));
  plan::Membership decoded;
  const auto error = wire::decode_membership(bytes, limits, decoded);
  require(!error, "its own encoding is refused: " + error.value_or(""));
  require(decoded == membership, "another membership: " + wire::test::to_text(encoding));
}

}  // namespace

void run(Input input) {
  if (input.size() < kLimitsBytes) return;
  const wire::MembershipLimits limits = read_limits(input);
  const wire::test::ExactBytes bytes(input.subspan(kLimitsBytes));
  plan::Membership decoded;
  if (const auto error = wire::decode_membership(bytes.span(), limits, decoded)) {
    require(!error->empty(), "an error without a text");
    require(decoded == plan::Membership{}, "a refused membership was written");
    return;
  }
  check_range(decoded, limits);
  const wire::IndexEncoding encoding = read_encoding(bytes.span());
  require(wire::can_hold(encoding.experts, decoded, limits.form), "an encoding that loses order");
  const std::vector<std::byte> again = wire::test::encoded(decoded, limits.form, encoding);
  require(std::ranges::equal(again, bytes.span()), "one encoding gave two forms");
  for (const wire::IndexEncoding other : wire::test::all_encodings()) {
    check_round_trip(decoded, limits, other);
  }
}

// Each shape in every encoding of either list, one of both at a time.
std::vector<Seed> seeds() {
  std::mt19937_64 random(7);
  const std::vector<std::pair<std::string, wire::test::MembershipShape>> shapes{
      {"dense", {40, 8, 32, 1.0}},
      {"sparse", {900, 3, 300, 0.02}},
      {"wide", {30, 8, 400, 0.5}},
      {"many_entries", {12, 40, 64, 1.0}},
      {"ordered", {30, 8, 16, 0.5, false, true, true}},
      {"repeats", {.num_tokens = 60, .num_topk = 8, .num_columns = 32, .repeats = 0.7}},
      {"no_tokens", {0, 1, 1, 0}},
      {"none_come", {100, 8, 16, 0}},
      {"slots", {30, 8, 32, 0.7, true}},
      {"no_weights", {30, 8, 32, 0.7, false, false, true}},
      {"slots_only", {30, 8, 32, 0.7, true, false, true}}};
  std::vector<Seed> made;
  for (const auto& [name, shape] : shapes) {
    const plan::Membership membership = wire::test::random_membership(shape, random);
    for (const ListEncoding encoding : kListEncodings) {
      const bool holds = wire::can_hold(encoding, membership, shape.form());
      const ListEncoding experts = holds ? encoding : ListEncoding::packed;
      Seed seed{name + "_" + std::string(to_string(encoding)), write_limits(shape.limits())};
      wire::encode_membership(membership, shape.form(), {encoding, experts}, seed.bytes);
      made.push_back(seed);
    }
  }
  return made;
}

}  // namespace ferry::fuzz
