// What the library tells of itself, at each level.

#include "ferry/log.hpp"

#include <cstdlib>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "exchange/stepped_ranks.hpp"

namespace ferry::testing {
namespace {

class Log : public ::testing::Test {
 protected:
  Log() {
    set_log_sink([this](LogLevel level, std::string_view line) {
      lines_.push_back(std::string(to_string(level)) + ": " + std::string(line));
    });
  }
  ~Log() override {
    set_log_level(LogLevel::off);
    set_log_sink(nullptr);
  }
  std::size_t count(const std::string& words) const {
    return static_cast<std::size_t>(std::ranges::count_if(
        lines_, [&](const std::string& line) { return line.find(words) != std::string::npos; }));
  }

  std::vector<std::string> lines_;
};

TEST_F(Log, InfoTellsOfExchangesOnceAndDebugOfPlansOnEveryRank) {
  set_log_level(LogLevel::info);
  SteppedRanks ranks(nodes(2));
  ranks.plan_all();
  ASSERT_EQ(lines_.size(), 1U);
  EXPECT_EQ(count("info: exchange 1: node_dedup, expert_major"), 1U) << lines_[0];
  EXPECT_EQ(count("ranges of 2 tokens, 2 in flight"), 1U) << lines_[0];

  set_log_level(LogLevel::debug);
  ranks.plan_all();
  EXPECT_EQ(count("debug: plan 1 of exchange 1 on rank 0: 24 tokens; 24 rows"), 1U) << lines_[1];
  EXPECT_EQ(count("debug: plan 1 of exchange 1 on rank 1: 24 tokens; 24 rows"), 1U);

  set_log_level(LogLevel::off);
  const std::size_t before = lines_.size();
  ranks.plan_all();
  EXPECT_EQ(lines_.size(), before);
}

TEST_F(Log, InfoTellsOfCallsThatFailedOnEveryRank) {
  SteppedRanks ranks(nodes(2));
  set_log_level(LogLevel::info);
  Routing bad = ranks.routing(0);
  bad.num_topk = 65;
  auto first = ranks.exchange(0).start_plan(bad);
  auto second = ranks.exchange(1).start_plan(ranks.routing(1));
  ASSERT_TRUE(ranks.work_until(ranks.all(), [&] { return first.done() && second.done(); }));
  EXPECT_EQ(count("on rank 0 failed (invalid_argument): plan: num_topk = 65 on rank 0"), 1U);
  EXPECT_EQ(count("on rank 1 failed (invalid_argument): plan: num_topk = 65 on rank 0"), 1U);
}

TEST_F(Log, ASinkThatThrowsEndsNothing) {
  set_log_sink([](LogLevel, std::string_view) { throw 1; });
  set_log_level(LogLevel::debug);
  SteppedRanks ranks(nodes(2));
  ranks.use(ranks.plan_all());
}

}  // namespace
}  // namespace ferry::testing
