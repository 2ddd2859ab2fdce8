// Sleeping and waking. A lost ring costs a whole sleep, and many of them the test's own time limit.

#include "transport/doorbell.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace ferry::detail {
namespace {

constexpr double kLong_s = 30;
constexpr int kRounds = 500;

TEST(Doorbell, ARingSinceArmingIsNotSleptOver) {
  Doorbell bell(3);
  std::atomic<std::uint64_t> flag{0};
  for (int round = 0; round < kRounds; ++round) {
    bell.arm(1);
    bell.ring_all(Doorbell::bit_of(&flag));
    bell.sleep(1, Doorbell::kMessageBit, kLong_s);
  }
}

TEST(Doorbell, SleepersAreWokenByWhatTheyLookFor) {
  Doorbell bell(2);
  std::atomic<std::uint64_t> flags[2] = {};
  const auto wait = [&](int place, std::uint64_t value) {
    while (true) {
      bell.arm(place);
      if (flags[place].load() >= value) break;
      bell.sleep(place, Doorbell::bit_of(&flags[place]), kLong_s);
    }
    bell.disarm(place);
  };
  const auto raise = [&](int place, std::uint64_t value) {
    flags[place].exchange(value);
    bell.ring_all(Doorbell::bit_of(&flags[place]));
  };
  std::jthread other([&] {
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      wait(1, round);
      raise(0, round);
    }
  });
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    raise(1, round);
    wait(0, round);
  }
}

TEST(Doorbell, ASleepEndsWithItsTime) {
  Doorbell bell(1);
  bell.arm(0);
  bell.sleep(0, Doorbell::kMessageBit, 0.001);
  bell.sleep(0, Doorbell::kMessageBit, kLong_s);  // not armed: returns at once
}

TEST(Doorbell, NoFlagStandsForMessages) {
  std::atomic<std::uint64_t> flags[200] = {};
  std::uint64_t bits = 0;
  for (const auto& flag : flags) bits |= Doorbell::bit_of(&flag);
  EXPECT_EQ(bits & Doorbell::kMessageBit, 0U);
  EXPECT_NE(bits & (bits - 1), 0U) << "flags differ in their bits";
}

}  // namespace
}  // namespace ferry::detail
