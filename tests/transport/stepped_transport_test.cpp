// What only the stepped world does: seeded delays, late completions, damage, no blocking.

#include "transport/stepped.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "ferry/error.hpp"

namespace ferry::stepped {
namespace {

/// Who is received when, and when sends end, while ranks 1.. send ten messages each to rank 0.
struct Trace {
  std::vector<int> sources;
  std::vector<std::uint64_t> steps;
  std::vector<std::uint64_t> sent_steps;
  bool operator==(const Trace&) const = default;
};

Trace trace_of(std::uint64_t seed, int max_delay_steps) {
  constexpr int kRanks = 4;
  constexpr int kMessages = 10;
  World world(
      {.topology = Topology::uniform(kRanks, 1), .seed = seed, .max_delay_steps = max_delay_steps});
  Transport& receiver = world.transport(0);
  std::vector<std::byte> memory(kRanks * kMessages);
  const std::byte byte{1};
  std::vector<std::pair<Transport*, std::uint64_t>> tickets;
  for (int i = 0; i < kMessages; ++i) {
    for (int source = 1; source < kRanks; ++source) {
      receiver.post_receive(source, std::span(memory).subspan(source * kMessages + i, 1));
      Transport& sender = world.transport(source);
      tickets.emplace_back(&sender, sender.send(0, MessageKind::payload, {&byte, 1}));
    }
  }
  Trace trace;
  for (int step = 0; step <= max_delay_steps + 1; ++step) {
    while (const auto got = receiver.poll_received()) {
      trace.sources.push_back(got->source);
      trace.steps.push_back(world.now());
    }
    std::erase_if(tickets, [&](const auto& send) {
      if (!send.first->sent(send.second)) return false;
      trace.sent_steps.push_back(world.now());
      return true;
    });
    world.step();
  }
  EXPECT_TRUE(tickets.empty()) << "a send took longer than the longest delay";
  EXPECT_EQ(trace.sources.size(), (kRanks - 1U) * kMessages) << "a message took longer";
  return trace;
}

TEST(Stepped, OneSeedGivesOneSchedule) {
  EXPECT_EQ(trace_of(3, 40), trace_of(3, 40));
  EXPECT_NE(trace_of(3, 40), trace_of(4, 40));
}

TEST(Stepped, PeersOvertakeEachOtherAndSendsEndEarlyOrLate) {
  const Trace trace = trace_of(5, 40);
  EXPECT_GE(trace.steps.front(), 1U) << "nothing arrives in the step it was sent";
  EXPECT_FALSE(std::is_sorted(trace.sources.begin(), trace.sources.end()));
  EXPECT_GT(trace.steps.back() - trace.steps.front(), 5U);
  EXPECT_EQ(trace.sent_steps.front(), 0U) << "some sends complete at once";
  EXPECT_GT(trace.sent_steps.back(), 1U) << "some complete late";
  const Trace hasty = trace_of(5, 0);
  EXPECT_EQ(hasty.steps.back(), 1U) << "without delay all arrive with the next step";
}

TEST(Stepped, CorruptNextFlipsOneBitOfOneMessage) {
  World world({.topology = Topology::uniform(3, 1)});
  const std::vector<std::byte> zeros(64);
  std::vector<std::vector<std::byte>> memory;
  world.corrupt_next(0, 1);
  for (const int target : {1, 1, 2}) {
    memory.emplace_back(64);
    world.transport(target).post_receive(0, memory.back());
    world.transport(0).send(target, MessageKind::payload, zeros);
  }
  for (int step = 0; step < 41; ++step) world.step();
  std::vector<int> flipped;
  for (const int target : {1, 1, 2}) {
    const auto got = world.transport(target).poll_received();
    ASSERT_TRUE(got);
    int bits = 0;
    for (const std::byte byte : got->buffer) bits += std::popcount(std::to_integer<unsigned>(byte));
    flipped.push_back(bits);
  }
  EXPECT_EQ(flipped, (std::vector<int>{1, 0, 0}));
}

class OnePoll final : public Waiter {
 public:
  explicit OnePoll(Progress says) : says_(says) {}
  Progress poll() override { return says_; }
  std::uint64_t life_sign() override { return 0; }
  double quiet_limit_s() const override { return 1; }
  double stuck_limit_s() const override { return 1; }

 private:
  Progress says_;
};

TEST(Stepped, RefusesToBlock) {
  World world({.topology = Topology::uniform(2, 1)});
  OnePoll done(Progress::done);
  EXPECT_EQ(world.transport(0).wait_until(done), WaitOutcome::done);
  for (const Progress says : {Progress::idle, Progress::advanced}) {
    OnePoll waiter(says);
    try {
      world.transport(1).wait_until(waiter);
      ADD_FAILURE() << "it waited";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
      EXPECT_NE(std::string(error.what()).find("a blocking call of rank 1"), std::string::npos);
    }
  }
}

TEST(Stepped, CatchesMemoryThatChangesBeforeItsSendEnds) {
  World world({.topology = Topology::uniform(2, 1)});
  std::vector<std::byte> memory(8);
  for (int i = 0; i < 20; ++i) world.transport(0).send(1, MessageKind::payload, memory);
  memory[3] = std::byte{1};
  EXPECT_THROW(
      {
        for (int step = 0; step < 41; ++step) world.step();
      },
      std::logic_error);
}

TEST(Stepped, StatesItsFragmentSizeAndRefusesANegativeDelay) {
  World world({.fragment_bytes = 256});
  EXPECT_EQ(world.transport(0).preferred_fragment_bytes(), 256U);
  EXPECT_EQ(world.transport(0).name(), "stepped");
  EXPECT_THROW(World({.max_delay_steps = -1}), Error);
}

/// Uses another rank's transport and memory when it goes.
struct LastWord : TransportAttachment {
  LastWord(Transport& own, int other) : transport(own), peer(other) {}
  ~LastWord() override {
    transport.map_region(peer, 1)[0] = std::byte{1};
    ++num_gone;
  }
  Transport& transport;
  int peer;
  static inline int num_gone = 0;
};

TEST(Stepped, AttachmentsGoBeforeAnyMemory) {
  {
    World world({.topology = Topology::single_node(2)});
    for (const int rank : {0, 1}) {
      world.transport(rank).create_region(1, 8);
      world.transport(rank).attachment =
          std::make_unique<LastWord>(world.transport(1 - rank), rank);
    }
  }
  EXPECT_EQ(LastWord::num_gone, 2);
}

}  // namespace
}  // namespace ferry::stepped
