#pragma once
// Which encodings a membership is written in: chosen before it is, from sizes that are known at
// once and from a look at some of its tokens and at those of earlier plans; and what the choice is
// to be measured by.

#include <cstddef>

#include "plan/membership.hpp"
#include "wire/membership_codec.hpp"

namespace ferry::wire {

/// How the tokens for one node lie in the plans of an exchange: in the last one, and where that is
/// too long to be looked at as a whole, in those before.
class MembershipHistory {
 public:
  /// Cost: a pass over a few hundred tokens at most
  void learn(const plan::Membership& membership);

  /// Bits of runs of tokens, over what they take where tokens come at random.
  double token_runs() const { return random_run_bits_ > 0 ? run_bits_ / random_run_bits_ : 1; }
  /// Share of the tokens that name other experts than the token before.
  double new_experts() const { return lists_ > 0 ? new_lists_ / lists_ : 1; }

 private:
  void look_at(const plan::Membership& membership, std::size_t begin, std::size_t length);

  double run_bits_ = 0;
  double random_run_bits_ = 0;
  double new_lists_ = 0;
  double lists_ = 0;
};

/// The encodings that promise the fewest bytes, after the history has learnt from the membership.
/// Cost: that, a pass over the counts, and one over the entries where a bitmask of experts would be
/// smallest
IndexEncoding choose_encoding(const plan::Membership& membership, const MembershipForm& form,
                              MembershipHistory& history);

/// The encodings that take the fewest bytes. Cost: a pass over the entries for each of them.
IndexEncoding best_encoding(const plan::Membership& membership, const MembershipForm& form);

/// Entropy of both lists, in bits: which tokens come, how many entries each of them has, and which
/// columns these name, either all as often or, where that is less, as often as they do here (and
/// then 1/2 log2 of the tokens for each column, which is what such frequencies take to be known).
/// Where the order of a token's entries does not follow from what else is sent, that order, too.
double index_entropy_bits(const plan::Membership& membership, const MembershipForm& form);

}  // namespace ferry::wire
