// See rank_calls.hpp.

#include "exchange/rank_calls.hpp"

#include <algorithm>

namespace ferry::testing {

void RankCalls::advance() {
  if (error_) return;
  try {
    const bool done = std::visit(
        [this](auto& pending) {
          if constexpr (std::is_same_v<decltype(pending), std::monostate&>) {
            return true;
          } else {
            if (!pending.done()) return false;
            take(pending);
            return true;
          }
        },
        running_);
    if (!done) return;
    running_ = Running();
    if (at_ < calls_.size()) running_ = start(calls_[at_++]);
  } catch (const Error& error) {
    error_ = error;
    running_ = Running();
  }
}

void RankCalls::cancel(const std::string& reason) {
  std::visit(
      [&](auto& pending) {
        if constexpr (!std::is_same_v<decltype(pending), std::monostate&>) {
          if (!pending.done()) pending.cancel(reason);
        }
      },
      running_);
}

RankCalls::Running RankCalls::start(Call call) {
  Exchange& exchange = ranks_.exchange(rank_);
  switch (call) {
    case Call::plan: return exchange.start_plan(ranks_.routing(rank_));
    case Call::plan_and_dispatch:
      return exchange.start_plan_and_dispatch(ranks_.routing(rank_), ranks_.x(rank_));
    case Call::dispatch: return exchange.start_dispatch(*plan_, ranks_.x(rank_));
    case Call::combine: return exchange.start_combine(*plan_, rows_->matrix(), ranks_.out(rank_));
    case Call::combine_backward:
      return exchange.start_combine_backward(*plan_, {.grad_out = ranks_.x(rank_)}, std::nullopt);
    case Call::dispatch_backward:
      return exchange.start_dispatch_backward(*plan_, {.grad_rows = grads_->matrix()},
                                              {.grad_x = ranks_.out(rank_)});
  }
  return Running();
}

void RankCalls::take(Pending<Dispatched>& pending) {
  Dispatched dispatched = pending.wait();
  plan_ = dispatched.plan;
  rows_.emplace(std::move(dispatched.rows));
}

std::vector<RankCalls> calls_of_all(SteppedRanks& ranks, std::span<const Call> calls) {
  std::vector<RankCalls> all;
  for (const int rank : ranks.all()) all.emplace_back(ranks, rank, calls);
  return all;
}

bool run(SteppedRanks& ranks, std::vector<RankCalls>& calls, int steps) {
  const auto ended = [&] { return std::ranges::all_of(calls, &RankCalls::ended); };
  for (int step = 0; step < steps && !ended(); ++step) {
    for (RankCalls& one : calls) one.advance();
    ranks.work(ranks.all(), 1);
  }
  return ended();
}

}  // namespace ferry::testing
