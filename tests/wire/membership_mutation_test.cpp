// Random damage to encoded memberships: the decoder reads nothing outside its buffer (run this with
// FERRY_SANITIZE=address), and what it accepts is a membership within the limits that the encoder
// writes again byte for byte.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <map>
#include <set>

#include "samples.hpp"

namespace ferry::wire::test {
namespace {

constexpr std::uint64_t kMutationSeed = 8675309;
constexpr int kMutations = 100'000;

/// Independent of the decoder's own checks.
bool is_within(const plan::Membership& membership, const MembershipLimits& limits) {
  const auto& [num_tokens, tokens, entry_begin, columns, weights, slots] = membership;
  if (num_tokens != limits.num_tokens || entry_begin.size() != tokens.size() + 1 ||
      entry_begin.front() != 0 || entry_begin.back() != columns.size() ||
      columns.size() != weights.size() ||
      slots.size() != (limits.form.slots ? columns.size() : 0)) {
    return false;
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= num_tokens || (i > 0 && tokens[i] <= tokens[i - 1])) return false;
    if (entry_begin[i + 1] <= entry_begin[i] || entry_begin[i + 1] > columns.size()) return false;
    const std::uint32_t count = entry_begin[i + 1] - entry_begin[i];
    if (count > static_cast<std::uint32_t>(limits.num_topk)) return false;
    const std::set<int> distinct(columns.begin() + entry_begin[i],
                                 columns.begin() + entry_begin[i + 1]);
    if (distinct.size() != count || *distinct.rbegin() >= limits.form.num_columns) return false;
    for (std::uint32_t e = entry_begin[i]; limits.form.slots && e < entry_begin[i + 1]; ++e) {
      if (slots[e] >= limits.num_topk) return false;
      if (e > entry_begin[i] && slots[e] <= slots[e - 1]) return false;
    }
  }
  for (const float weight : weights) {
    if (std::isnan(weight)) return false;
  }
  return true;
}

/// As the second byte says.
IndexEncoding encoding_of(const std::vector<std::byte>& bytes) {
  const auto form = std::to_integer<unsigned>(bytes[1]);
  return {static_cast<ListEncoding>(form % 4), static_cast<ListEncoding>(form / 4 % 4)};
}

void mutate(std::vector<std::byte>& bytes, std::mt19937_64& rng) {
  // Half of the damage goes to the front, where flags, tokens and counts are.
  const auto place = [&](std::size_t size) {
    const std::size_t within = rng() % 2 == 0 ? std::min<std::size_t>(size, 24) : size;
    return within == 0 ? 0 : rng() % within;
  };
  switch (rng() % 5) {
    case 0:
      if (!bytes.empty()) bytes[place(bytes.size())] ^= static_cast<std::byte>(1U << (rng() % 8));
      break;
    case 1:
      if (!bytes.empty()) bytes[place(bytes.size())] = static_cast<std::byte>(rng());
      break;
    case 2:
      bytes.insert(bytes.begin() + place(bytes.size() + 1), static_cast<std::byte>(rng()));
      break;
    case 3:
      if (!bytes.empty()) bytes.erase(bytes.begin() + place(bytes.size()));
      break;
    case 4: bytes.resize(rng() % (bytes.size() + 16)); break;
  }
}

TEST(MembershipMutation, NothingOutOfRangeIsAccepted) {
  std::printf("seed %llu\n", static_cast<unsigned long long>(kMutationSeed));
  std::mt19937_64 rng(kMutationSeed);
  const std::vector<IndexEncoding> encodings = all_encodings();
  std::map<std::byte, int> accepted;  // by form
  int tried = 0;
  for (int i = 0; i < kMutations; ++i) {
    const IndexEncoding encoding = encodings[static_cast<std::size_t>(i) % encodings.size()];
    const MembershipShape shape{.num_tokens = rng() % 80,
                                .num_topk = 1 + static_cast<int>(rng() % (i % 3 == 0 ? 40 : 8)),
                                .num_columns = 1 + static_cast<int>(rng() % 400),
                                .density = static_cast<double>(rng() % 5) / 4,
                                .slots = rng() % 2 == 0,
                                .weights = rng() % 3 != 0,
                                .ordered = encoding.experts == ListEncoding::bitmask,
                                .repeats = static_cast<double>(rng() % 3) / 2};
    const plan::Membership membership = random_membership(shape, rng);
    if (!can_hold(encoding.experts, membership, shape.form())) continue;
    ++tried;
    auto bytes = encoded(membership, shape.form(), encoding);
    for (auto n = 1 + rng() % 3; n > 0; --n) mutate(bytes, rng);
    const ExactBytes exact(bytes);
    plan::Membership decoded;
    const auto error = decode_membership(exact.span(), shape.limits(), decoded);
    if (error) {
      ASSERT_EQ(decoded, plan::Membership{}) << "mutation " << i;
      continue;
    }
    ++accepted[bytes[1]];
    ASSERT_TRUE(is_within(decoded, shape.limits()))
        << "mutation " << i << ", seed " << kMutationSeed;
    ASSERT_EQ(encoded(decoded, shape.form(), encoding_of(bytes)), bytes)
        << "mutation " << i << ", seed " << kMutationSeed;
  }
  // Damage to a weight or a column often makes another right membership: both ends are exercised,
  // for each encoding.
  int all = 0;
  for (const auto& [form, times] : accepted) all += times;
  EXPECT_GT(tried, kMutations / 2);
  EXPECT_GT(all, tried / 20);
  EXPECT_LT(all, tried / 2);
  for (const IndexEncoding encoding : encodings) {
    int times = 0;
    for (const auto& [form, of_form] : accepted) {
      if (encoding_of({std::byte{2}, form}) == encoding) times += of_form;
    }
    EXPECT_GT(times, kMutations / 1000) << to_text(encoding);
  }
}

}  // namespace
}  // namespace ferry::wire::test
