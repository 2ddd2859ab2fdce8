#pragma once
// The calls of a rank, one after the other: where the network is an enemy, all that counts is how
// they end. After a call that fails, those that need its result are left out, and the next one that
// all ranks make goes on.

#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "exchange/stepped_ranks.hpp"

namespace ferry::testing {

enum class Call : std::uint8_t {
  all_gather,
  plan,
  plan_and_dispatch,
  gather_and_plan,  ///< node_gather: a dispatch that begins before its plan
  end_gather,
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
  bool ended() const { return at_ == calls_.size() && !running(); }
  /// Of the first call that failed.
  const std::optional<Error>& error() const { return error_; }
  /// What all ranks gave to the last all_gather: rank r gives r + 1 bytes of value r.
  const std::vector<std::vector<std::byte>>& gathered() const { return gathered_; }
  /// Gives the running call up, as a wait does at its deadline.
  void cancel(const std::string& reason);

 private:
  using Gathered = std::vector<std::vector<std::byte>>;
  using Running =
      std::variant<std::monostate, Pending<Gathered>, Pending<Plan>, Pending<Dispatched>,
                   Pending<ExpertRows>, Pending<GradRows>, Pending<void>>;

  bool running() const { return running_.index() != 0; }
  Running start(Call call);
  void take(Pending<Gathered>& pending) { gathered_ = pending.wait(); }
  void take(Pending<Plan>& pending) { plan_ = pending.wait(); }
  void take(Pending<Dispatched>& pending);
  void take(Pending<ExpertRows>& pending) { rows_.emplace(pending.wait()); }
  void take(Pending<GradRows>& pending) { grads_.emplace(pending.wait()); }
  void take(Pending<void>& pending) { pending.wait(); }

  SteppedRanks& ranks_;
  const int rank_;
  const std::vector<Call> calls_;
  std::size_t at_ = 0;  ///< the next one
  Gathered gathered_;
  std::optional<Plan> plan_;
  std::optional<Pending<ExpertRows>> gathering_;
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
