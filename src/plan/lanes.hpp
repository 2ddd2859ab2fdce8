#pragma once
// The lanes of one source to one remote node, made at both of their ends from the same membership.
// Invariant: both ends derive items only from (membership, strategy, placement), so that tokens and
// range_begin agree without a message.

#include <cstdint>
#include <span>
#include <vector>

#include "plan/rank_plan.hpp"

namespace ferry::plan {

/// Tokens of `source` that go to `node`.
struct Crossing {
  const PlanContext& context;
  int source = -1;
  int node = -1;
  const Membership& membership;
};

/// Gives out the rows of one source on one node, column by column, token by token.
struct RowCursor {
  std::span<Target> next;  ///< per column, without a weight

  Target take(std::uint16_t column, float weight) {
    Target target = next[column];
    ++next[column].row;
    target.weight = weight;
    return target;
  }
};

/// Whether the way back of a pair is a lane of its own.
enum class Directions : std::uint8_t { same, apart };

/// Lanes that are made over those of an earlier plan, so that their memory is used again.
class LaneList {
 public:
  explicit LaneList(std::vector<LanePair>& lanes) : lanes_(lanes) {}

  /// One more, valid until the next one; empty but for targets of landing lanes, which are written
  /// as a whole.
  LanePair& add(Directions directions);
  void drop_last() { --used_; }
  std::size_t size() const { return used_; }
  LanePair& operator[](std::size_t at) { return lanes_[at]; }
  /// Drops lanes that were not used. Called once, at the end.
  void end() { lanes_.resize(used_); }

 private:
  std::vector<LanePair>& lanes_;
  std::size_t used_ = 0;
};

/// Appends the source ends, ascending rank; none where nothing crosses.
void add_outgoing(const Crossing& crossing, LaneList& outgoing);

/// Appends the end at the landing rank `rank`; nothing where no row of the source lands there.
void add_landing(const Crossing& crossing, int rank, RowCursor cursor, LaneList& landing);

}  // namespace ferry::plan
