// The token list of a membership in its four encodings: what it takes, how it is written, and how
// it is read from bytes that nobody vouches for.

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "plan/memory.hpp"
#include "wire/bytes.hpp"
#include "wire/membership_layout.hpp"

namespace ferry::wire {

namespace {

/// Bits of the bitmap with the upper parts of a packed list: token t, the i-th, has bit
/// (t >> width) + i.
std::uint64_t upper_bits(std::uint64_t num_tokens, std::uint64_t count, int width) {
  return count == 0 ? 0 : count + ((num_tokens - 1) >> width);
}

/// Calls visit(length) for runs of tokens that come and that do not, by turns, in [next, end).
template <typename Visit>
void for_each_run(std::span<const std::uint32_t> tokens, std::uint64_t next, std::uint64_t end,
                  const Visit& visit) {
  for (std::size_t i = 0; i < tokens.size();) {
    if (tokens[i] != next) visit(tokens[i] - next);
    const std::size_t first = i++;
    while (i < tokens.size() && tokens[i] - tokens[first] == i - first) ++i;
    visit(i - first);
    next = tokens[first] + (i - first);
  }
  if (next != end) visit(end - next);
}

class TokenDecoder {
 public:
  TokenDecoder(Bytes& rest, const MembershipLimits& limits, std::uint64_t bits_per_token,
               std::vector<std::uint32_t>& tokens)
      : rest_(rest),
        num_tokens_(limits.num_tokens),
        bits_per_token_(bits_per_token),
        tokens_(tokens) {}

  std::optional<std::string> take_raw();
  std::optional<std::string> take_bitmask();
  std::optional<std::string> take_packed();
  std::optional<std::string> take_runs();

 private:
  std::optional<std::string> take_count(std::uint64_t& count);
  template <typename Visit>
  std::optional<std::string> read_runs(BitReader& reader, const Visit& visit) const;
  /// Refuses a number of tokens whose list and experts cannot be there; else makes room for them.
  std::optional<std::string> make_room(std::uint64_t count, std::uint64_t list_bytes) {
    const std::uint64_t needed = list_bytes + bytes_of_bits(count * bits_per_token_);
    if (needed > rest_.size()) {
      return fmt::format("membership: {} bytes are left for {} tokens; expected at least {}",
                         rest_.size(), count, needed);
    }
    plan::resize_for_overwrite(tokens_, count);
    return std::nullopt;
  }
  std::optional<std::string> check_ascending() const {
    std::uint64_t fewest = 0;
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      if (tokens_[i] < fewest || tokens_[i] >= num_tokens_) {
        return fmt::format("membership: tokens[{}] is token {}; expected {}..{}", i, tokens_[i],
                           fewest, num_tokens_ - 1);
      }
      fewest = std::uint64_t{tokens_[i]} + 1;
    }
    return std::nullopt;
  }

  Bytes& rest_;
  const std::uint64_t num_tokens_;
  const std::uint64_t bits_per_token_;
  std::vector<std::uint32_t>& tokens_;
};

std::optional<std::string> TokenDecoder::take_count(std::uint64_t& count) {
  if (!take_varint(rest_, count)) {
    return fmt::format(
        "membership: the number of tokens at byte {} is not a varint; expected at most {} bytes, "
        "in the shortest form",
        kMembershipPrefixBytes, kMaxVarintBytes);
  }
  if (count > num_tokens_) {
    return fmt::format("membership: {} tokens are listed; expected at most num_tokens = {}", count,
                       num_tokens_);
  }
  return std::nullopt;
}

std::optional<std::string> TokenDecoder::take_raw() {
  std::uint64_t count = 0;
  if (auto error = take_count(count)) return error;
  const std::uint64_t size = raw_token_bytes(num_tokens_);
  if (auto error = make_room(count, count * size)) return error;
  for (std::uint64_t i = 0; i < count; ++i) {
    tokens_[i] = size == 2 ? load<std::uint16_t>(rest_.data() + i * 2)
                           : load<std::uint32_t>(rest_.data() + i * 4);
  }
  rest_ = rest_.subspan(count * size);
  return check_ascending();
}

std::optional<std::string> TokenDecoder::take_bitmask() {
  const std::uint64_t mask_bytes = bytes_of_bits(num_tokens_);
  if (mask_bytes > rest_.size()) {
    return fmt::format("membership: {} bytes are left; expected {} for the bitmask of {} tokens",
                       rest_.size(), mask_bytes, num_tokens_);
  }
  const Bytes mask = rest_.first(mask_bytes);
  if (auto error = make_room(count_set_bits(mask), mask_bytes)) return error;
  std::uint32_t* out = tokens_.data();
  for_each_set_bit(mask, [&out](std::uint64_t bit) { *out++ = static_cast<std::uint32_t>(bit); });
  if (!tokens_.empty() && tokens_.back() >= num_tokens_) {
    return fmt::format("membership: the bitmask names token {}; expected below num_tokens = {}",
                       tokens_.back(), num_tokens_);
  }
  rest_ = rest_.subspan(mask_bytes);
  return std::nullopt;
}

std::optional<std::string> TokenDecoder::take_packed() {
  std::uint64_t count = 0;
  if (auto error = take_count(count)) return error;
  const int width = low_token_width(num_tokens_, count);
  const std::uint64_t low_bytes = bytes_of_bits(count * static_cast<unsigned>(width));
  const std::uint64_t list_bytes = low_bytes + bytes_of_bits(upper_bits(num_tokens_, count, width));
  if (auto error = make_room(count, list_bytes)) return error;
  const Bytes low = rest_.first(low_bytes);
  const Bytes upper = rest_.subspan(low_bytes, list_bytes - low_bytes);
  if (const std::uint64_t set = count_set_bits(upper); set != count) {
    return fmt::format("membership: the upper parts name {} tokens; expected {}", set, count);
  }
  if (!ends_in_zeros(low, count * static_cast<unsigned>(width)) ||
      !ends_in_zeros(upper, upper_bits(num_tokens_, count, width))) {
    return std::string("membership: the bits after a part of the packed tokens are not 0");
  }
  std::uint64_t i = 0;
  std::uint64_t fewest = 0;  // smallest token that may follow
  bool wrong = false;
  for_each_set_bit(upper, [&](std::uint64_t bit) {
    // The i-th bit that is set is bit i at least.
    const std::uint64_t token =
        (bit - i) << width | load_bits(low, i * static_cast<unsigned>(width), width);
    wrong |= token < fewest || token >= num_tokens_;
    fewest = token + 1;
    tokens_[i++] = static_cast<std::uint32_t>(token);
  });
  if (wrong) return check_ascending();
  rest_ = rest_.subspan(list_bytes);
  return std::nullopt;
}

/// Calls visit(first, count) for each run of tokens that come.
template <typename Visit>
std::optional<std::string> TokenDecoder::read_runs(BitReader& reader, const Visit& visit) const {
  bool come = false;
  if (!reader.take_bit(come)) return std::string("membership: the runs of tokens are cut off");
  for (std::uint64_t next = 0, run = 0; next < num_tokens_; next += run, come = !come) {
    if (!reader.take_gamma(run) || run > num_tokens_ - next) {
      return fmt::format(
          "membership: the run from token {} on is cut off or too long; expected at most {} tokens",
          next, num_tokens_ - next);
    }
    if (come) visit(next, run);
  }
  if (!reader.rest_of_byte_is_zero()) {
    return std::string("membership: the bits after the runs of tokens are not 0");
  }
  return std::nullopt;
}

std::optional<std::string> TokenDecoder::take_runs() {
  tokens_.clear();
  if (num_tokens_ == 0) return std::nullopt;
  // Counted first: a run takes no more bits than its length does.
  BitReader reader(rest_);
  std::uint64_t count = 0;
  const auto add = [&count](std::uint64_t /*first*/, std::uint64_t run) { count += run; };
  if (auto error = read_runs(reader, add)) return error;
  if (auto error = make_room(count, reader.bytes_taken())) return error;
  BitReader again(rest_);
  std::uint32_t* out = tokens_.data();
  auto error = read_runs(again, [&out](std::uint64_t first, std::uint64_t run) {
    std::iota(out, out + run, static_cast<std::uint32_t>(first));
    out += run;
  });
  rest_ = rest_.subspan(again.bytes_taken());
  return error;
}

}  // namespace

std::uint64_t token_run_bits(std::span<const std::uint32_t> tokens, std::uint64_t first,
                             std::uint64_t end) {
  std::uint64_t bits = 0;
  for_each_run(tokens, first, end, [&bits](std::uint64_t length) { bits += gamma_bits(length); });
  return bits;
}

std::uint64_t token_list_bytes(const plan::Membership& membership, ListEncoding encoding) {
  const std::uint64_t num_tokens = membership.num_tokens;
  const std::uint64_t count = membership.tokens.size();
  switch (encoding) {
    case ListEncoding::raw: return varint_bytes(count) + count * raw_token_bytes(num_tokens);
    case ListEncoding::bitmask: return bytes_of_bits(num_tokens);
    case ListEncoding::packed: {
      const int width = low_token_width(num_tokens, count);
      return varint_bytes(count) + bytes_of_bits(count * static_cast<unsigned>(width)) +
             bytes_of_bits(upper_bits(num_tokens, count, width));
    }
    case ListEncoding::runs:
      return num_tokens == 0 ? 0
                             : bytes_of_bits(1 + token_run_bits(membership.tokens, 0, num_tokens));
  }
  return 0;
}

std::byte* store_token_list(std::byte* at, std::uint64_t bytes, const plan::Membership& membership,
                            ListEncoding encoding) {
  const std::vector<std::uint32_t>& tokens = membership.tokens;
  switch (encoding) {
    case ListEncoding::raw: {
      at = store_varint(at, tokens.size());
      if (raw_token_bytes(membership.num_tokens) == 4) {
        return store_block(at, tokens.data(), tokens.size() * sizeof(tokens[0]));
      }
      for (const std::uint32_t token : tokens) at = store(at, static_cast<std::uint16_t>(token));
      return at;
    }
    case ListEncoding::bitmask:
      return store_bitmap(at, bytes, tokens.size(), [&](std::uint64_t i) { return tokens[i]; });
    case ListEncoding::packed: {
      const std::byte* const end = at + bytes;
      const int width = low_token_width(membership.num_tokens, tokens.size());
      at = store_varint(at, tokens.size());
      BitWriter low(at);
      for (const std::uint32_t token : tokens) low.put(token & low_bits(width), width);
      at = low.end();
      return store_bitmap(at, static_cast<std::uint64_t>(end - at), tokens.size(),
                          [&](std::uint64_t i) { return (tokens[i] >> width) + i; });
    }
    case ListEncoding::runs: {
      if (membership.num_tokens == 0) return at;
      BitWriter writer(at);
      writer.put(!tokens.empty() && tokens.front() == 0 ? 1 : 0, 1);
      for_each_run(tokens, 0, membership.num_tokens,
                   [&writer](std::uint64_t length) { writer.put_gamma(length); });
      return writer.end();
    }
  }
  return at;
}

std::optional<std::string> take_token_list(Bytes& rest, ListEncoding encoding,
                                           const MembershipLimits& limits, plan::Membership& out,
                                           std::uint64_t fewest_bits_per_token) {
  TokenDecoder decoder(rest, limits, fewest_bits_per_token, out.tokens);
  return take_list(decoder, encoding);
}

}  // namespace ferry::wire
