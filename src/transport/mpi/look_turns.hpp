#pragma once
// When to ask MPI whether something has arrived. A question costs microseconds, and where ranks
// share cores, an MPI that yields when idle gives the core away inside every question that finds
// nothing: a turn of all ranks on that core. So a poll that got on elsewhere does not ask again at
// once, and where questions give the core away, an idle poll asks only one, in turns.

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

namespace ferry::detail {

class LookTurns {
 public:
  enum class Look : std::size_t { payload, others };

  // Times of all: base::now_s()
  bool is_due(Look look, double now) {
    began_ = now;
    const double last = std::max(nothing_at_[index(look)], gave_away_at_);
    if (!rested_ && began_ - last < kPause_s) return false;
    if (!gives_away_ || look != last_) return true;
    return std::exchange(passed_over_, !passed_over_);  // the other one may never be asked
  }
  /// Of a look that is_due() allowed.
  void found_nothing(Look look, double now) {
    nothing_at_[index(look)] = now;
    last_ = look;
    passed_over_ = false;
    gives_away_ = now - began_ > kGaveAway_s;
    if (gives_away_) {
      gave_away_ = true;
      gave_away_at_ = now;
      rested_ = false;
    }
  }
  /// In place of a look that could find nothing.
  void skip(Look look) { last_ = look; }
  void found_something() { gives_away_ = false; }

  /// After a poll that found nothing to do anywhere; true when a look has given the core away since
  /// the last rest.
  bool rest() {
    rested_ = true;
    return std::exchange(gave_away_, false);
  }
  /// After the last look of a poll.
  void poll_ends() { rested_ = false; }

 private:
  // A question takes a few microseconds, a turn of other ranks many.
  static constexpr double kGaveAway_s = 12e-6;
  // As long as a few polls that find nothing to do.
  static constexpr double kPause_s = 20e-6;

  static std::size_t index(Look look) { return static_cast<std::size_t>(look); }

  bool rested_ = true;
  bool gives_away_ = false;   // the last look that found nothing did
  bool gave_away_ = false;    // since the last rest
  bool passed_over_ = false;  // last_, since it was asked
  Look last_ = Look::others;
  double began_ = 0;
  double gave_away_at_ = -1;
  std::array<double, 2> nothing_at_{-1, -1};
};

}  // namespace ferry::detail
