#pragma once
// The calls of a rank, one after the other: where the network is an enemy, all that counts is how
// they end.

#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "exchange/stepped_ranks.hpp"

namespace ferry::testing {

enum class Call : std::uint8_t {
  plan,
  plan_and_dispatch,
  dispatch,
  combine,  ///< of experts that give back what they get
  combine_backward,
  dispatch_backward,
};

class RankCalls {
 public:
  RankCalls(SteppedRanks& ranks, int rank, std::span<const Call> calls)
      : ranks_(ranks), rank_(rank), calls_(calls.begin(), calls.end()) {}

  /// Takes the result of a call that is done, and starts the next one.
  void advance();
  /// All calls ended well, or one failed.
  bool ended() const { return error_ || (at_ == calls_.size() && !running()); }
  const std::optional<Error>& error() const { return error_; }
  /// Gives the running call up, as a wait does at its deadline.
  void cancel(const std::string& reason);

 private:
  using Running = std::variant<std::monostate, Pending<Plan>, Pending<Dispatched>,
                               Pending<ExpertRows>, Pending<GradRows>, Pending<void>>;

  bool running() const { return running_.index() != 0; }
  Running start(Call call);
  void take(Pending<Plan>& pending) { plan_ = pending.wait(); }
  void take(Pending<Dispatched>& pending);
  void take(Pending<ExpertRows>& pending) { rows_.emplace(pending.wait()); }
  void take(Pending<GradRows>& pending) { grads_.emplace(pending.wait()); }
  void take(Pending<void>& pending) { pending.wait(); }

  SteppedRanks& ranks_;
  const int rank_;
  const std::vector<Call> calls_;
  std::size_t at_ = 0;  ///< the next one
  std::optional<Plan> plan_;
  std::optional<ExpertRows> rows_;
  std::optional<GradRows> grads_;
  Running running_;
  std::optional<Error> error_;
};

/// The same calls on every rank.
std::vector<RankCalls> calls_of_all(SteppedRanks& ranks, std::span<const Call> calls);
/// Far more steps than the calls of a test need.
inline constexpr int kManySteps = 3000;
/// Ranks work and go on with their calls for so many steps, or until all have ended: true then.
bool run(SteppedRanks& ranks, std::vector<RankCalls>& calls, int steps = kManySteps);

}  // namespace ferry::testing
