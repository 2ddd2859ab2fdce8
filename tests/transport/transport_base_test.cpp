// The parts of Transport that every implementation inherits: counting, kernel hooks, the wait loop.

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <stdexcept>

#include "ferry/error.hpp"
#include "ferry/transport.hpp"
#include "kernels/row_kernels.hpp"

namespace ferry {
namespace {

/// Rank 0 of two nodes of one rank, with a network that takes everything.
class FakeTransport final : public Transport {
 public:
  FakeTransport() : Transport(0, Topology::uniform(2, 1)) {}

  std::string_view name() const override { return "fake"; }
  std::byte* create_region(std::uint64_t, std::uint64_t) override { return nullptr; }
  std::byte* map_region(int, std::uint64_t) override { return nullptr; }
  void retire_region(std::uint64_t) override {}
  std::shared_ptr<const void> hold_region(std::uint64_t) override { return nullptr; }
  bool sent(std::uint64_t) override { return true; }
  void post_receive(int, std::span<std::byte>) override {}
  std::vector<std::span<std::byte>> withdraw_receives(int) override { return {}; }
  std::optional<Received> poll_received() override { return std::nullopt; }
  std::optional<Incoming> probe() override { return std::nullopt; }
  void accept(const Incoming&, std::span<std::byte>) override {}
  void abort(const std::string& text) override { ended = text; }
  std::optional<std::string> aborted() const override { return ended; }

  std::optional<std::string> ended;
  bool refuses = false;
  int open = 0;
  int num_kernels = 0;
  std::vector<int> rests;

 protected:
  std::uint64_t start_send(int, MessageKind, std::span<const std::byte>) override {
    if (refuses) throw Error(ErrorCode::resource_exhausted, "no");
    return 1;
  }
  void begin_kernel() override { ++open, ++num_kernels; }
  void end_kernel() override { --open; }
  void rest(int round) override {
    rests.push_back(round);
    Transport::rest(round);
  }
};

/// Says what it is told to, poll by poll; then idle for ever.
class ListWaiter final : public Waiter {
 public:
  Progress poll() override {
    const auto at = static_cast<std::size_t>(num_polls++);
    return at < polls.size() ? polls[at] : after;
  }
  std::uint64_t life_sign() override { return lives ? ++life : 0; }
  double quiet_limit_s() const override { return quiet_s; }
  double stuck_limit_s() const override { return stuck_s; }

  std::vector<Progress> polls;
  Progress after = Progress::idle;
  bool lives = false;
  std::uint64_t life = 0;
  double quiet_s = std::numeric_limits<double>::infinity();
  double stuck_s = std::numeric_limits<double>::infinity();
  int num_polls = 0;
};

TEST(TransportBase, CountsWhatItSent) {
  FakeTransport t;
  const std::vector<std::byte> bytes(100);
  const std::span<const std::byte> all(bytes);
  t.send(1, MessageKind::payload, all);
  t.send(1, MessageKind::metadata, all.first(20));
  t.send(1, MessageKind::control, all.first(3));
  t.send(1, MessageKind::control, {});
  t.refuses = true;
  EXPECT_THROW(t.send(1, MessageKind::payload, all), Error);
  EXPECT_EQ(t.counters().payload_bytes, 100U);
  EXPECT_EQ(t.counters().metadata_bytes, 20U);
  EXPECT_EQ(t.counters().control_bytes, 3U);
  EXPECT_EQ(t.counters().messages, 4U);
}

TEST(TransportBase, KernelsRunBetweenTheirHooks) {
  FakeTransport t;
  const std::vector<std::byte> bytes(9, std::byte{7});
  EXPECT_EQ(t.checksum(bytes), kernels::crc32c(bytes));
  kernels::PushJob push;
  kernels::PackJob pack;
  kernels::SumJob sum;
  push.hidden = pack.hidden = sum.hidden = 1;
  t.push_rows(push);
  t.pack_rows(pack);
  t.sum_rows(sum);
  EXPECT_EQ(t.num_kernels, 4);
  EXPECT_EQ(t.open, 0);
  push.hidden = -1;
  EXPECT_ANY_THROW(t.push_rows(push));
  EXPECT_EQ(t.open, 0) << "a kernel that refuses its job closes the memory as well";
}

TEST(TransportBase, RestsOnlyWhenIdleAndStartsAnewAfterAnAdvance) {
  FakeTransport t;
  ListWaiter waiter;
  waiter.polls = {Progress::idle,     Progress::idle, Progress::advanced,
                  Progress::advanced, Progress::idle, Progress::done};
  EXPECT_EQ(t.wait_until(waiter), WaitOutcome::done);
  EXPECT_EQ(waiter.num_polls, 6);
  EXPECT_EQ(t.rests, (std::vector<int>{0, 1, 0}));
}

TEST(TransportBase, WhatTheCheckThrowsEndsTheWait) {
  FakeTransport t;
  ListWaiter waiter;
  int num_checks = 0;
  t.set_wait_check([&] {
    if (++num_checks == 2) throw std::runtime_error("a signal came");
  });
  EXPECT_THROW(t.wait_until(waiter), std::runtime_error);
  EXPECT_EQ(num_checks, 2);
  EXPECT_GT(waiter.num_polls, num_checks) << "it is asked now and then, not each time";
  t.set_wait_check(nullptr);
  waiter.quiet_s = 0.02;
  EXPECT_EQ(t.wait_until(waiter), WaitOutcome::timed_out);
}

TEST(TransportBase, SubgroupsAreRefusedWhereThereAreNone) {
  FakeTransport t;
  try {
    t.subgroup({0});
    ADD_FAILURE() << "a transport without sub-groups gave one";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
  }
}

TEST(TransportBase, SilenceTimesOut) {
  FakeTransport t;
  ListWaiter waiter;
  waiter.quiet_s = 0.02;
  EXPECT_EQ(t.wait_until(waiter), WaitOutcome::timed_out);
  EXPECT_GT(waiter.num_polls, 1);
}

// Limits of zero: the first idle poll starts the clocks, the next one is past them unless what it
// counts from happened in between.
TEST(TransportBase, SignsOfLifeHoldOffTheQuietLimitOnly) {
  FakeTransport t;
  ListWaiter silent;
  silent.polls = {Progress::idle, Progress::idle, Progress::done};
  silent.quiet_s = 0;
  EXPECT_EQ(t.wait_until(silent), WaitOutcome::timed_out);
  ListWaiter alive;
  alive.polls = {Progress::idle, Progress::idle, Progress::idle, Progress::done};
  alive.lives = true;
  alive.quiet_s = 0;
  EXPECT_EQ(t.wait_until(alive), WaitOutcome::done);
  ListWaiter alive_but_stuck = alive;
  alive_but_stuck.num_polls = 0;
  alive_but_stuck.stuck_s = 0;
  EXPECT_EQ(t.wait_until(alive_but_stuck), WaitOutcome::timed_out);
}

TEST(TransportBase, AnAdvanceHoldsOffTheStuckLimitOnly) {
  FakeTransport t;
  ListWaiter advancing;
  advancing.polls = {Progress::idle,     Progress::advanced, Progress::idle,
                     Progress::advanced, Progress::idle,     Progress::done};
  advancing.stuck_s = 0;
  EXPECT_EQ(t.wait_until(advancing), WaitOutcome::done);
  advancing.num_polls = 0;
  advancing.quiet_s = 0;
  EXPECT_EQ(t.wait_until(advancing), WaitOutcome::timed_out);
}

TEST(TransportBase, AnAbortEndsAWaitAfterOneMorePoll) {
  FakeTransport t;
  t.abort("rank 1 failed: disk");
  ListWaiter idle;
  try {
    t.wait_until(idle);
    ADD_FAILURE() << "the wait ended well";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::peer_failed);
    EXPECT_STREQ(error.what(), "rank 1 failed: disk");
  }
  EXPECT_EQ(idle.num_polls, 1);
  ListWaiter ends_itself;
  ends_itself.polls = {Progress::advanced, Progress::done};
  EXPECT_EQ(t.wait_until(ends_itself), WaitOutcome::done);
}

TEST(TransportBase, FlagsAreAtLeast) {
  FakeTransport t;
  std::atomic<std::uint64_t> flag{0};
  EXPECT_TRUE(t.reached(flag, 0));
  EXPECT_FALSE(t.reached(flag, 1));
  t.raise_flag(flag, 3);
  EXPECT_TRUE(t.reached(flag, 3));
  EXPECT_FALSE(t.reached(flag, 4));
}

}  // namespace
}  // namespace ferry
