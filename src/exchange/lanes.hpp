#pragma once
// The fragments of one call: which to send next, and which have come. Ranges go in ascending order;
// a lane waits for credit while others go on.

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "exchange/flow.hpp"
#include "exchange/operation.hpp"
#include "plan/traffic.hpp"

namespace ferry::detail {

/// Which of a pair's lanes: rows from the source or back to it, or numbers back to it.
enum class Way : std::uint8_t { out, back, values };
const plan::Lane& lane_of(const plan::LanePair& pair, Way way);

/// The sending side of one stream of one call.
class LaneSenders {
 public:
  /// Writes the rows of a fragment; `lane` counts the pairs.
  using Fill = std::function<Packed(std::size_t lane, const plan::Fragment&, std::byte* payload)>;
  /// True when what a fragment holds is there.
  using Ready = std::function<bool(std::size_t lane, const plan::Fragment&)>;

  /// `pairs` are the plan's landing or outgoing lanes.
  LaneSenders(const std::vector<plan::LanePair>& pairs, Way way, const plan::Framing& framing);

  /// Fills and sends a few fragments that have credit: of the lowest range first, lanes in turn.
  /// True when there were any.
  bool send(Operation& operation, KindFlow& flow, const Fill& fill, const Ready& ready = nullptr);
  const plan::Lane& lane(std::size_t at) const { return *lanes_[at].lane; }
  bool done() const { return open_ == 0; }
  /// The peer of a lane that has more to send and no credit; -1 if none.
  int starved_peer(const KindFlow& flow, std::uint32_t ordinal) const;

 private:
  struct Lane {
    const plan::Lane* lane;
    plan::FragmentCursor cursor;
  };
  Lane* pick(const Operation& operation, const KindFlow& flow, const Ready& ready);

  const wire::Stream stream_;
  std::vector<Lane> lanes_;  ///< same order as the flow's outboxes
  std::size_t turn_ = 0;     ///< lane after the one that sent last
  std::size_t open_ = 0;     ///< lanes with fragments left
};

/// The receiving side of one lane in one call.
class LaneReceiver {
 public:
  LaneReceiver(const plan::LanePair& pair, Way way, std::uint64_t rows_per_fragment);

  const plan::Lane& lane() const { return *lane_; }
  bool done() const { return cursor_.at_end(); }
  /// Range of the next fragment. Requires: !done()
  std::uint64_t range() const { return cursor_.current().range; }

  struct Taken {
    plan::Fragment fragment;
    ArrivedFragment arrived;
    ArrivedRows rows;
  };
  /// The next fragment of this call, if it is here. Refuses the operation where it is not what the
  /// plan says.
  std::optional<Taken> take(Operation& operation, LaneInbox& inbox, const Crossing& crossing);
  /// Grants the peer all fragments up to `ranges` ranges after range `working_on`.
  void grant_through(Operation& operation, LaneInbox& inbox, std::uint64_t working_on);
  /// Every fragment is consumed: the peer may send the first ones of the next use.
  void end_use(Operation& operation, LaneInbox& inbox);

 private:
  const plan::Lane* lane_;
  wire::Stream stream_;
  std::uint64_t rows_per_fragment_;
  plan::FragmentCursor cursor_;
  std::uint64_t granted_range_ = 0;      ///< ranges below this are granted
  std::uint64_t granted_fragments_ = 0;  ///< fragments of those ranges
  bool ended_ = false;
};

/// The receiving side of one stream of one call whose fragments are used up as they come.
class LaneReceivers {
 public:
  /// Uses up one fragment; `lane` counts the pairs.
  using Land = std::function<void(std::size_t lane, const LaneReceiver::Taken&)>;

  LaneReceivers() = default;
  /// `crossing` outlives this.
  LaneReceivers(const std::vector<plan::LanePair>& pairs, Way way, const plan::Framing& framing,
                const Crossing& crossing);

  /// Grants what comes next and lands a few fragments of each lane. True when there were any.
  bool land(Operation& operation, KindFlow& flow, const Land& land);
  const plan::Lane& lane(std::size_t at) const { return lanes_[at].lane(); }
  bool done() const { return missing_rank() < 0; }
  /// A peer whose fragments have not all come; -1 if none.
  int missing_rank() const;

 private:
  const Crossing* crossing_ = nullptr;
  std::vector<LaneReceiver> lanes_;  ///< same order as the flow's inboxes
};

}  // namespace ferry::detail
