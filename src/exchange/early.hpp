#pragma once
// The part of a dispatch that works before its plan is made: it sends rows whose way needs no
// answer from other ranks, and stages what they send. It has credit of its own, because a plan
// could not grant any yet.

#include <cstdint>
#include <vector>

#include "exchange/flow.hpp"
#include "exchange/operation.hpp"
#include "plan/rank_plan.hpp"
#include "plan/traffic.hpp"

namespace ferry::detail {

class EarlySide {
 public:
  /// A dispatch before routing is known (start_gather): the receiver grants step by step, up to its
  /// staging budget.
  static std::unique_ptr<EarlySide> for_gather(ExchangeState& exchange, std::uint64_t num_tokens);
  /// A dispatch beside its plan (plan_and_dispatch): both ends know without a grant how much may be
  /// under way.
  static std::unique_ptr<EarlySide> for_plan(ExchangeState& exchange, std::uint32_t plan_number,
                                             std::vector<plan::LanePair> lanes);

  Operation::PlanUse plan_use() const { return plan_use_; }
  std::uint32_t plan_number() const { return plan_number_; }
  const std::vector<plan::LanePair>& lanes() const { return lanes_; }
  KindFlow& flow() { return flow_; }

  /// Asks for fragments. Called once, when the operation has started.
  void open(const Operation& operation);
  /// Keeps a fragment; false when it came out of turn or without credit.
  bool stage(const Operation& operation, int source, ArrivedFragment fragment);
  void take_grant(int source, const wire::Grant& grant);
  /// Hands over to the flow of the finished plan. False when more has come than the plan has.
  bool hand_over(ExchangeState& exchange, KindFlow& to);
  /// Takes back what was asked for.
  void close(ExchangeState& exchange);
  std::vector<plan::LanePair> take_lanes() { return std::move(lanes_); }

 private:
  EarlySide() = default;
  void grant(const Operation& operation, LaneInbox& inbox, std::uint32_t fragments);

  Operation::PlanUse plan_use_ = Operation::PlanUse::opens;
  std::uint32_t plan_number_ = kNoPlan;
  std::vector<plan::LanePair> lanes_;
  KindFlow flow_;
  bool grants_ = false;            ///< sends grants; else the credit is agreed
  std::uint32_t most_staged_ = 0;  ///< fragments of one source
};

}  // namespace ferry::detail
