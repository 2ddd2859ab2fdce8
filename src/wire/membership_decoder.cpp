// The decoder of memberships. Every section's size follows from the one before it and is checked
// against the bytes that are left before anything is allocated for it; every index is checked
// before it is used.

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "plan/memory.hpp"
#include "wire/bytes.hpp"
#include "wire/membership_codec.hpp"
#include "wire/membership_layout.hpp"

namespace ferry::wire {

namespace {

/// Reads one membership section by section; a step returns the text of an error, or nothing.
class Decoder {
 public:
  Decoder(std::span<const std::byte> bytes, const MembershipLimits& limits, plan::Membership& out)
      : size_(bytes.size()), rest_(bytes), limits_(limits), result_(out) {
    result_.num_tokens = limits.num_tokens;
    result_.slots.clear();
  }

  std::optional<std::string> run() {
    if (auto error = read_prefix()) return error;
    if (auto error = (flags_ & kBitmask) != 0 ? read_bitmask() : read_gaps()) return error;
    if (auto error = read_counts()) return error;
    read_columns();
    if (auto error = check_columns()) return error;
    if (auto error = read_slots()) return error;
    return read_weights();
  }

 private:
  std::optional<std::string> read_prefix();
  std::optional<std::string> read_bitmask();
  std::optional<std::string> read_gaps();
  std::optional<std::string> read_counts();
  void read_columns();
  std::optional<std::string> check_columns() const;
  std::optional<std::string> read_slots();
  std::optional<std::string> read_weights();

  /// Refuses a number of tokens for which the bytes that are left cannot hold one entry each.
  std::optional<std::string> check_room(std::uint64_t tokens, std::uint64_t token_bytes) const {
    const std::uint64_t needed =
        token_bytes + count_bytes(tokens, flags_) + tokens * entry_bytes(flags_);
    if (needed <= rest_.size()) return std::nullopt;
    return fmt::format("membership: {} bytes are left for {} tokens; expected at least {}",
                       rest_.size(), tokens, needed);
  }

  /// Requires: `bytes` are left.
  const std::byte* take_block(std::size_t bytes) {
    const std::byte* at = rest_.data();
    rest_ = rest_.subspan(bytes);
    return at;
  }

  std::size_t size_;
  std::span<const std::byte> rest_;
  MembershipLimits limits_;
  std::uint8_t flags_ = 0;
  plan::Membership& result_;
};

std::optional<std::string> Decoder::read_prefix() {
  if (limits_.num_tokens > kMaxTokens) {
    return fmt::format("membership: num_tokens is {}; expected at most {}", limits_.num_tokens,
                       kMaxTokens);
  }
  if (rest_.size() < kMembershipPrefixBytes) {
    return fmt::format("membership: size is {} bytes; expected at least {}", size_,
                       kMembershipPrefixBytes);
  }
  const auto version = std::to_integer<int>(rest_[0]);
  if (version != kMembershipVersion) {
    return fmt::format(
        "membership: version is {}; expected {}; fix: run one version of Ferry on "
        "all ranks",
        version, kMembershipVersion);
  }
  flags_ = std::to_integer<std::uint8_t>(rest_[1]);
  if ((flags_ & ~kAllFlags) != 0) {
    return fmt::format("membership: flags are {:#04x}; expected only bits of {:#04x}", flags_,
                       kAllFlags);
  }
  if (((flags_ & kSlots) != 0) != limits_.form.slots ||
      ((flags_ & kNoWeights) == 0) != limits_.form.weights) {
    return fmt::format(
        "membership: slots are {}sent and weights are {}sent; expected slots {} and weights {}, "
        "from the options",
        (flags_ & kSlots) != 0 ? "" : "not ", (flags_ & kNoWeights) == 0 ? "" : "not ",
        limits_.form.slots, limits_.form.weights);
  }
  if (((flags_ & kWideColumns) != 0) != (limits_.form.num_columns > kMaxNarrowColumns)) {
    return fmt::format(
        "membership: columns take {} bytes; expected 1 up to {} columns, else 2; "
        "this node has {}",
        (flags_ & kWideColumns) != 0 ? 2 : 1, kMaxNarrowColumns, limits_.form.num_columns);
  }
  take_block(kMembershipPrefixBytes);
  return std::nullopt;
}

std::optional<std::string> Decoder::read_bitmask() {
  const std::uint64_t mask_bytes = bitmask_bytes(limits_.num_tokens);
  if (mask_bytes > rest_.size()) {
    return fmt::format("membership: {} bytes are left; expected {} for the bitmask of {} tokens",
                       rest_.size(), mask_bytes, limits_.num_tokens);
  }
  // Words of 8 bytes; the last one may be short.
  const auto word_at = [&](std::uint64_t at) {
    std::uint64_t word = 0;
    std::memcpy(&word, rest_.data() + at, std::min<std::uint64_t>(sizeof(word), mask_bytes - at));
    return word;
  };
  std::uint64_t tokens = 0;
  for (std::uint64_t at = 0; at < mask_bytes; at += 8) tokens += std::popcount(word_at(at));
  if (auto error = check_room(tokens, mask_bytes)) return error;

  plan::resize_for_overwrite(result_.tokens, tokens);
  std::uint32_t* out = result_.tokens.data();
  for (std::uint64_t at = 0; at < mask_bytes; at += 8) {
    for (std::uint64_t word = word_at(at); word != 0; word &= word - 1) {
      *out++ = static_cast<std::uint32_t>(at * 8 + std::countr_zero(word));
    }
  }
  if (tokens != 0 && result_.tokens.back() >= limits_.num_tokens) {
    return fmt::format("membership: the bitmask names token {}; expected below num_tokens = {}",
                       result_.tokens.back(), limits_.num_tokens);
  }
  take_block(mask_bytes);
  return std::nullopt;
}

std::optional<std::string> Decoder::read_gaps() {
  std::uint64_t tokens = 0;
  if (!take_varint(rest_, tokens)) {
    return fmt::format(
        "membership: the number of tokens at byte {} is not a varint; expected at "
        "most {} bytes, in the shortest form",
        kMembershipPrefixBytes, kMaxVarintBytes);
  }
  if (tokens > limits_.num_tokens) {
    return fmt::format("membership: {} tokens are listed; expected at most num_tokens = {}", tokens,
                       limits_.num_tokens);
  }
  if (auto error = check_room(tokens, tokens)) return error;

  plan::resize_for_overwrite(result_.tokens, tokens);
  std::uint64_t next = 0;  // smallest token that may follow: the list ascends by construction
  for (std::uint64_t i = 0; i < tokens; ++i) {
    std::uint64_t gap = 0;
    if (!take_varint(rest_, gap)) {
      return fmt::format(
          "membership: the gap before tokens[{}] at byte {} is not a varint; "
          "expected at most {} bytes, in the shortest form",
          i, size_ - rest_.size(), kMaxVarintBytes);
    }
    if (gap >= limits_.num_tokens - next) {
      return fmt::format("membership: tokens[{}] is token {} + {}; expected below num_tokens = {}",
                         i, next, gap, limits_.num_tokens);
    }
    result_.tokens[i] = static_cast<std::uint32_t>(next + gap);
    next += gap + 1;
  }
  return std::nullopt;
}

std::optional<std::string> Decoder::read_counts() {
  const std::uint64_t tokens = result_.tokens.size();
  // Gaps longer than a byte may have used what was there for the entries.
  if (auto error = check_room(tokens, 0)) return error;
  const std::byte* counts = take_block(count_bytes(tokens, flags_));
  const bool nibbles = (flags_ & kNibbleCounts) != 0;
  const auto max_count = static_cast<std::uint32_t>(std::max(limits_.num_topk, 0));

  plan::resize_for_overwrite(result_.entry_begin, tokens + 1);
  result_.entry_begin[0] = 0;
  std::uint64_t entries = 0;
  for (std::uint64_t i = 0; i < tokens; ++i) {
    const auto byte = std::to_integer<std::uint32_t>(counts[nibbles ? i / 2 : i]);
    const std::uint32_t count = nibbles ? (byte >> (i % 2 * 4)) & kMaxNibble : byte;
    if (count == 0 || count > max_count) {
      return fmt::format("membership: token {} has {} entries; expected 1..num_topk = {}",
                         result_.tokens[i], count, max_count);
    }
    entries += count;
    result_.entry_begin[i + 1] = static_cast<std::uint32_t>(entries);
  }
  if (nibbles && tokens % 2 != 0 && std::to_integer<int>(counts[tokens / 2]) > int{kMaxNibble}) {
    return fmt::format("membership: the 4 bits after the last count are {}; expected 0",
                       std::to_integer<int>(counts[tokens / 2]) >> 4);
  }
  if (entries > std::numeric_limits<std::uint32_t>::max()) {
    return fmt::format("membership: {} entries; expected fewer than 2^32", entries);
  }
  if (entries * entry_bytes(flags_) != rest_.size()) {
    return fmt::format("membership: {} bytes are left for {} entries; expected exactly {}",
                       rest_.size(), entries, entries * entry_bytes(flags_));
  }
  plan::resize_for_overwrite(result_.columns, entries);
  plan::resize_for_overwrite(result_.weights, entries);
  return std::nullopt;
}

void Decoder::read_columns() {
  const std::size_t entries = result_.columns.size();
  if ((flags_ & kWideColumns) != 0) {
    const std::size_t bytes = entries * sizeof(std::uint16_t);
    if (bytes != 0) std::memcpy(result_.columns.data(), take_block(bytes), bytes);
    return;
  }
  const std::byte* from = take_block(entries);
  for (std::size_t i = 0; i < entries; ++i) {
    result_.columns[i] = std::to_integer<std::uint16_t>(from[i]);
  }
}

std::optional<std::string> Decoder::check_columns() const {
  const std::uint16_t* columns = result_.columns.data();
  const auto num_columns = static_cast<std::uint32_t>(std::max(limits_.form.num_columns, 0));
  // last_user[c] = 1 + place of the last token that named column c.
  std::vector<std::uint32_t> last_user(result_.columns.empty() ? 0 : num_columns);
  for (std::uint32_t i = 0; i < result_.tokens.size(); ++i) {
    for (std::uint32_t e = result_.entry_begin[i]; e < result_.entry_begin[i + 1]; ++e) {
      const std::uint32_t column = columns[e];
      if (column >= num_columns) {
        return fmt::format("membership: token {} names column {}; expected below num_columns = {}",
                           result_.tokens[i], column, num_columns);
      }
      if (last_user[column] == i + 1) {
        return fmt::format("membership: token {} names column {} twice; expected once",
                           result_.tokens[i], column);
      }
      last_user[column] = i + 1;
    }
  }
  return std::nullopt;
}

std::optional<std::string> Decoder::read_slots() {
  const std::size_t entries = result_.columns.size();
  if (!limits_.form.slots || entries == 0) return std::nullopt;
  plan::resize_for_overwrite(result_.slots, entries);
  std::memcpy(result_.slots.data(), take_block(entries), entries);
  for (std::size_t i = 0; i < result_.tokens.size(); ++i) {
    int next = 0;
    for (std::uint32_t e = result_.entry_begin[i]; e < result_.entry_begin[i + 1]; ++e) {
      const int slot = result_.slots[e];
      if (slot < next || slot >= limits_.num_topk) {
        return fmt::format("membership: token {} has an entry in slot {}; expected {}..{}",
                           result_.tokens[i], slot, next, limits_.num_topk - 1);
      }
      next = slot + 1;
    }
  }
  return std::nullopt;
}

std::optional<std::string> Decoder::read_weights() {
  const std::size_t entries = result_.weights.size();
  if (!limits_.form.weights) std::ranges::fill(result_.weights, 1.0F);
  if (entries == 0 || !limits_.form.weights) return std::nullopt;
  std::memcpy(result_.weights.data(), take_block(entries * sizeof(float)), entries * sizeof(float));
  // Counted first, found after: a loop without an exit is a few SIMD instructions.
  std::uint32_t nans = 0;
  for (const float weight : result_.weights) nans += weight != weight ? 1 : 0;
  if (nans == 0) return std::nullopt;
  const auto nan = std::find_if(result_.weights.begin(), result_.weights.end(),
                                [](float weight) { return weight != weight; });
  const auto entry = static_cast<std::uint32_t>(nan - result_.weights.begin());
  const auto& begin = result_.entry_begin;
  const auto token = std::upper_bound(begin.begin(), begin.end(), entry) - begin.begin() - 1;
  return fmt::format("membership: the weight of token {} for column {} is NaN; expected a number",
                     result_.tokens[token], result_.columns[entry]);
}

}  // namespace

std::optional<std::string> decode_membership(std::span<const std::byte> bytes,
                                             const MembershipLimits& limits,
                                             plan::Membership& out) {
  Decoder decoder(bytes, limits, out);
  auto error = decoder.run();
  if (error) out = {};
  return error;
}

}  // namespace ferry::wire
