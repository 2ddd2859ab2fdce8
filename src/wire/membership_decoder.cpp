// The decoder of memberships. Every section's size follows from the one before it and is checked
// against the bytes that are left before anything is allocated for it; every index is checked
// before it is used.

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "plan/memory.hpp"
#include "wire/membership_layout.hpp"

namespace ferry::wire {

namespace {

/// Reads one membership section by section; a step returns the text of an error, or nothing.
class Decoder {
 public:
  Decoder(Bytes bytes, const MembershipLimits& limits, plan::Membership& out)
      : rest_(bytes), limits_(limits), result_(out) {
    result_.num_tokens = limits.num_tokens;
    result_.slots.clear();
  }

  std::optional<std::string> run() {
    if (auto error = read_prefix()) return error;
    if (auto error = take_token_list(rest_, encoding_.tokens, limits_, result_,
                                     fewest_expert_bits(encoding_.experts, limits_.form))) {
      return error;
    }
    if (auto error = take_expert_list(rest_, encoding_.experts, limits_, result_)) return error;
    if (auto error = read_slots()) return error;
    if (auto error = read_weights()) return error;
    if (encoding_.experts == ListEncoding::bitmask && limits_.form.weights) order_by_weight();
    return std::nullopt;
  }

 private:
  std::optional<std::string> read_prefix();
  std::optional<std::string> check_form(std::uint8_t form) const;
  std::optional<std::string> read_slots();
  std::optional<std::string> read_weights();
  void order_by_weight();

  /// Requires: `bytes` are left; the lists were checked to leave exactly slots and weights.
  const std::byte* take_block(std::size_t bytes) {
    const std::byte* at = rest_.data();
    rest_ = rest_.subspan(bytes);
    return at;
  }

  Bytes rest_;
  const MembershipLimits& limits_;
  IndexEncoding encoding_;
  plan::Membership& result_;
};

std::optional<std::string> Decoder::read_prefix() {
  if (limits_.num_tokens > kMaxTokens) {
    return fmt::format("membership: num_tokens is {}; expected at most {}", limits_.num_tokens,
                       kMaxTokens);
  }
  if (rest_.size() < kMembershipPrefixBytes) {
    return fmt::format("membership: size is {} bytes; expected at least {}", rest_.size(),
                       kMembershipPrefixBytes);
  }
  const auto version = std::to_integer<int>(rest_[0]);
  if (version != kMembershipVersion) {
    return fmt::format(
        "membership: version is {}; expected {}; fix: run one version of Ferry on all ranks",
        version, kMembershipVersion);
  }
  const auto form = std::to_integer<std::uint8_t>(rest_[1]);
  encoding_.tokens = static_cast<ListEncoding>(form & kListMask);
  encoding_.experts = static_cast<ListEncoding>(form >> kExpertsShift & kListMask);
  take_block(kMembershipPrefixBytes);
  return check_form(form);
}

std::optional<std::string> Decoder::check_form(std::uint8_t form) const {
  if ((form & kReservedForm) != 0) {
    return fmt::format("membership: the form is {:#04x}; expected only bits of {:#04x}", form,
                       static_cast<std::uint8_t>(~kReservedForm));
  }
  if (((form & kSlots) != 0) != limits_.form.slots ||
      ((form & kNoWeights) == 0) != limits_.form.weights) {
    return fmt::format(
        "membership: slots are {}sent and weights are {}sent; expected slots {} and weights {}, "
        "from the options",
        (form & kSlots) != 0 ? "" : "not ", (form & kNoWeights) == 0 ? "" : "not ",
        limits_.form.slots, limits_.form.weights);
  }
  if (encoding_.experts == ListEncoding::runs && entry_bytes(limits_.form) == 0) {
    return std::string(
        "membership: experts are listed in runs; expected another encoding where neither slots nor "
        "weights are sent");
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
  const std::size_t entries = result_.columns.size();
  plan::resize_for_overwrite(result_.weights, entries);
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

/// A bitmask gave the columns of each token by number: this is the order they are meant in.
void Decoder::order_by_weight() {
  std::uint16_t* const columns = result_.columns.data();
  float* const weights = result_.weights.data();
  for (std::size_t i = 0; i < result_.tokens.size(); ++i) {
    const std::uint32_t first = result_.entry_begin[i];
    for (std::uint32_t e = first + 1; e < result_.entry_begin[i + 1]; ++e) {
      for (std::uint32_t at = e; at > first && weights[at - 1] < weights[at]; --at) {
        std::swap(weights[at - 1], weights[at]);
        std::swap(columns[at - 1], columns[at]);
      }
    }
  }
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
