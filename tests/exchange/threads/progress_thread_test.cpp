// Progress by a thread: calls end with nobody inside, handles may go at any moment, and what cannot
// have such a thread says so.

#include "ferry/progress_thread.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ferry/ferry.hpp"
#include "transport/sole_use.hpp"
#include "transport/stepped.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kHidden = 64;
constexpr std::int64_t kTokens = 96;
constexpr int kRanks = 4;

/// A layer of one exchange; token t goes to the experts of two ranks, and experts give back what
/// they get, so each sum is the row that was sent.
class Layer {
 public:
  explicit Layer(Transport& transport)
      : rank_(transport.rank()),
        exchange_(transport, Placement::contiguous(kRanks, kRanks),
                  {.hidden = kHidden, .dtype = DType::f32}) {
    for (int t = 0; t < kTokens; ++t) {
      ids_.push_back((rank_ + t) % kRanks);
      ids_.push_back((rank_ + t + 1 + t % 2) % kRanks);
    }
    weights_.assign(ids_.size(), 0.5F);
  }

  Exchange& exchange() { return exchange_; }
  Routing routing() const {
    return Routing::of(kTokens, 2, std::span<const std::int32_t>(ids_), weights_);
  }
  void set(float value) {
    x_.assign(kTokens * kHidden, value);
    out_.assign(x_.size(), -1);
  }
  ConstMatrix x() const { return {x_.data(), DType::f32, kTokens, kHidden}; }
  Matrix out() { return {out_.data(), DType::f32, kTokens, kHidden}; }
  bool is_right() const { return out_ == x_; }

 private:
  int rank_;
  Exchange exchange_;
  std::vector<std::int32_t> ids_;
  std::vector<float> weights_, x_, out_;
};

/// Waits for the end of a call without being inside: true when it came.
template <typename Result>
bool ends_by_itself(const Pending<Result>& pending, std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!pending.done()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

constexpr std::chrono::seconds kLong{60};

TEST(ProgressThread, CallsEndWithNobodyInside) {
  threads::run({.nodes = 2, .ranks_per_node = 2}, [](Transport& transport) {
    const ProgressThread progress(transport);
    Layer layer(transport);
    for (int round = 0; round < 20; ++round) {
      layer.set(static_cast<float>(round + transport.rank()));
      Pending<Plan> planning = layer.exchange().start_plan(layer.routing());
      ASSERT_TRUE(ends_by_itself(planning, kLong));
      const Plan plan = planning.wait();
      Pending<ExpertRows> dispatching = layer.exchange().start_dispatch(plan, layer.x());
      ASSERT_TRUE(ends_by_itself(dispatching, kLong));
      const ExpertRows rows = dispatching.wait();
      Pending<void> combining = layer.exchange().start_combine(plan, rows.matrix(), layer.out());
      ASSERT_TRUE(ends_by_itself(combining, kLong));
      combining.wait();
      ASSERT_TRUE(layer.is_right());
    }
  });
}

TEST(ProgressThread, WithoutItNothingEndsByItself) {
  threads::run({.nodes = 2, .ranks_per_node = 2}, [](Transport& transport) {
    Layer layer(transport);
    Pending<Plan> planning = layer.exchange().start_plan(layer.routing());
    EXPECT_FALSE(ends_by_itself(planning, std::chrono::milliseconds(100)));
    planning.wait();
  });
}

// Only some ranks have one, and handles go while the thread works.
TEST(ProgressThread, HandlesGoAtAnyMoment) {
  threads::run({.nodes = 2, .ranks_per_node = 2}, [](Transport& transport) {
    std::optional<ProgressThread> progress;
    if (transport.rank() != 2) progress.emplace(transport);
    std::optional<ExpertRows> kept;
    for (int round = 0; round < 60; ++round) {
      Layer layer(transport);
      layer.set(static_cast<float>(round));
      std::optional<Plan> plan(layer.exchange().plan(layer.routing()));
      kept.reset();
      kept.emplace(layer.exchange().dispatch(*plan, layer.x()));
      Pending<void> combining = layer.exchange().start_combine(*plan, kept->matrix(), layer.out());
      plan.reset();
      combining.wait();
      ASSERT_TRUE(layer.is_right());
      const Plan next = layer.exchange().plan(layer.routing());
      Pending<ExpertRows> dropped = layer.exchange().start_dispatch(next, layer.x());
      if (round % 4 == 3) dropped.cancel("this round is not wanted");
      if (round % 2 == 0) dropped.wait();
      EXPECT_GE(layer.exchange().metadata_rounds(), 2U);
      EXPECT_GT(pool_bytes(transport), 0U);
    }
    barrier(transport);
  });
}

TEST(ProgressThread, AFailureOfAnotherRankEndsTheCall) {
  threads::run({.nodes = 2, .ranks_per_node = 2}, [](Transport& transport) {
    const ProgressThread progress(transport);
    Layer layer(transport);
    layer.set(1);
    const Plan plan = layer.exchange().plan(layer.routing());
    ConstMatrix x = layer.x();
    if (transport.rank() == 3) x.columns = kHidden / 2;
    Pending<ExpertRows> pending = layer.exchange().start_dispatch(plan, x);
    EXPECT_TRUE(ends_by_itself(pending, kLong));
    try {
      pending.wait();
      FAIL() << "a dispatch that one rank refused ended well";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("on rank 3"), std::string::npos) << error.what();
    }
  });
}

TEST(ProgressThread, OneForEachTransport) {
  threads::run({}, [](Transport& transport) {
    std::optional<ProgressThread> first(transport);
    EXPECT_THROW(ProgressThread second(transport), Error);
    first.reset();
    const ProgressThread again(transport);
    barrier(transport);
  });
}

TEST(ProgressThread, IsRefusedWhereRanksWorkStepByStep) {
  stepped::World world({.topology = Topology::single_node(1)});
  try {
    const ProgressThread progress(world.transport(0));
    FAIL() << "a stepped rank got a progress thread";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
  }
}

/// How a child that runs `body` ends; killed after 20 s.
int status_of_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    ::_exit(body());
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

bool is_refused_as_forked(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code() == ErrorCode::peer_failed &&
           std::string(error.what()).find("forked") != std::string::npos;
  }
  return false;
}

TEST(ProgressThread, AChildForkedBeforeTheFirstCallMakesNothing) {
  threads::run({.nodes = 1, .ranks_per_node = 2}, [](Transport& transport) {
    if (transport.rank() == 0) {
      EXPECT_EQ(status_of_child([&] {
                  const bool refused = is_refused_as_forked([&] { barrier(transport); }) &&
                                       is_refused_as_forked([&] { ProgressThread{transport}; });
                  return refused && transport.attachment == nullptr ? 0 : 1;
                }),
                0);
    }
    barrier(transport);
  });
}

// A thread that waits at the fork waits in the child's copy for ever.
TEST(ProgressThread, WhatItWaitsInCanGoInAChild) {
  auto use = std::make_shared<detail::SoleUse>();
  std::atomic<bool> stop{false};
  std::thread waiting([&] {
    const detail::UseHold hold(use);
    use->wait_for_work(stop);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(status_of_child([&] {
              { const detail::UseHold hold(use); }
              use->~SoleUse();
              return 0;
            }),
            0);
  stop = true;
  use->wake();
  waiting.join();
}

// The child has no such thread, and whatever it held is held for ever.
TEST(ProgressThread, AForkedChildDropsItsHandlesAndIsRefused) {
  threads::run({.nodes = 1, .ranks_per_node = 1}, [](Transport& transport) {
    auto progress = std::make_unique<ProgressThread>(transport);
    auto exchange = std::make_unique<Exchange>(transport, Placement::contiguous(1, 1),
                                               RowShape{.hidden = 8, .dtype = DType::f32});
    barrier(transport);
    EXPECT_EQ(status_of_child([&] {
                const bool refused = is_refused_as_forked([&] { barrier(transport); });
                exchange.reset();
                progress.reset();
                return refused ? 0 : 1;
              }),
              0);
    barrier(transport);
  });
}

}  // namespace
}  // namespace ferry
