// See rank_calls.hpp.

#include "exchange/rank_calls.hpp"

#include <algorithm>

namespace ferry::testing {
namespace {

/// Needs the result of no other call.
bool begins(Call call) {
  switch (call) {
    case Call::all_gather:
    case Call::plan:
    case Call::plan_and_dispatch:
    case Call::gather_and_plan: return true;
    case Call::end_gather:
    case Call::dispatch:
    case Call::combine:
    case Call::combine_backward:
    case Call::dispatch_backward: return false;
  }
  return false;
}

}  // namespace

void RankCalls::advance() {
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
    if (!error_) error_ = error;
    running_ = Running();
    while (at_ < calls_.size() && !begins(calls_[at_])) ++at_;
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
    case Call::all_gather: {
      const std::vector<std::byte> mine(static_cast<std::size_t>(rank_) + 1,
                                        static_cast<std::byte>(rank_));
      return start_all_gather(ranks_.transport(rank_), mine);
    }
    case Call::gather_and_plan:
      gathering_ = exchange.start_gather(ranks_.x(rank_));
      return exchange.start_plan(ranks_.routing(rank_), *gathering_);
    case Call::end_gather: return std::move(*gathering_);
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
