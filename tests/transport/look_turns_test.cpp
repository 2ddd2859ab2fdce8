// When MPI is asked: cheap questions at every idle poll, dear ones in turns.

#include "transport/mpi/look_turns.hpp"

#include <gtest/gtest.h>

namespace ferry::detail {
namespace {

using Look = LookTurns::Look;
constexpr double kCheap_s = 2e-6;
constexpr double kDear_s = 100e-6;

/// One poll of a rank that finds nothing in MPI; the looks it made.
struct Poll {
  bool payload = false;
  bool others = false;
};

class Rank {
 public:
  Poll poll(double look_s) {
    Poll made;
    made.others = look(Look::others, look_s);
    made.payload = look(Look::payload, look_s);
    turns_.poll_ends();
    return made;
  }
  bool rest() { return turns_.rest(); }
  void pass(double seconds) { now_ += seconds; }
  LookTurns& turns() { return turns_; }

 private:
  bool look(Look which, double look_s) {
    if (!turns_.is_due(which, now_)) return false;
    now_ += look_s;
    turns_.found_nothing(which, now_);
    return true;
  }
  LookTurns turns_;
  double now_ = 1000;
};

TEST(LookTurns, CheapQuestionsAreAllAskedAtEveryIdlePoll) {
  Rank rank;
  for (int i = 0; i < 5; ++i) {
    const Poll made = rank.poll(kCheap_s);
    EXPECT_TRUE(made.payload && made.others) << i;
    EXPECT_FALSE(rank.rest()) << i;
  }
}

TEST(LookTurns, DearQuestionsTakeTurns) {
  Rank rank;
  Poll last = rank.poll(kDear_s);
  for (int i = 0; i < 6; ++i) {
    EXPECT_TRUE(rank.rest()) << i;
    const Poll made = rank.poll(kDear_s);
    EXPECT_NE(made.payload, made.others) << i;
    EXPECT_NE(made.payload, last.payload) << i;
    last = made;
  }
}

TEST(LookTurns, WhoAsksOneQuestionOnlyIsNotKeptWaiting) {
  for (const Look only : {Look::payload, Look::others}) {
    LookTurns turns;
    double now = 1000;
    int looks = 0;
    for (int i = 0; i < 10; ++i, now += 1e-3) {
      if (!turns.is_due(only, now)) continue;
      ++looks;
      now += kDear_s;
      turns.found_nothing(only, now);
    }
    EXPECT_EQ(looks, 5);
  }
}

TEST(LookTurns, WithNothingToAskTheOtherQuestionIsAskedEveryTime) {
  LookTurns turns;
  double now = 1000;
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(turns.is_due(Look::others, now)) << i;
    now += kDear_s;
    turns.found_nothing(Look::others, now);
    turns.skip(Look::payload);
    turns.poll_ends();
    EXPECT_TRUE(turns.rest()) << i;
  }
}

TEST(LookTurns, APollWithoutALookGaveNothingAway) {
  Rank rank;
  rank.poll(kDear_s);
  EXPECT_TRUE(rank.rest());
  EXPECT_FALSE(rank.rest());
}

TEST(LookTurns, AQuestionThatBecomesCheapEndsTheTurns) {
  Rank rank;
  rank.poll(kDear_s);
  rank.rest();
  rank.poll(kCheap_s);
  EXPECT_FALSE(rank.rest());
  const Poll made = rank.poll(kCheap_s);
  EXPECT_TRUE(made.payload && made.others);
}

TEST(LookTurns, APollThatGotOnElsewhereDoesNotAskAgainAtOnce) {
  for (const double look_s : {kCheap_s, kDear_s}) {
    Rank rank;
    rank.poll(look_s);
    const Poll at_once = rank.poll(look_s);
    EXPECT_FALSE(at_once.payload || at_once.others) << look_s;
    rank.pass(1e-3);
    const Poll later = rank.poll(look_s);
    EXPECT_TRUE(later.payload || later.others) << look_s;
  }
}

TEST(LookTurns, WhatWasFoundMayBeFollowedByMore) {
  Rank rank;
  rank.poll(kDear_s);
  rank.pass(1e-3);
  rank.turns().found_something();
  const Poll made = rank.poll(kCheap_s);
  EXPECT_TRUE(made.payload && made.others);
}

}  // namespace
}  // namespace ferry::detail
