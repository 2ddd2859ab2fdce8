// Delivery times of the link model, on times that the tests make up.

#include "transport/link_model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace ferry::detail {
namespace {

// 8e6 bits/s: one byte takes a microsecond.
constexpr double kBits_per_s = 8e6;
constexpr double kByte_s = 1e-6;

TEST(LinkModel, AnIdleLinkCostsOnlyTheTransmission) {
  LinkModel links(Topology::uniform(2, 1), kBits_per_s);
  const LinkTimes times = links.transmit({0, 1, MessageKind::payload, 5000}, 10.0);
  EXPECT_DOUBLE_EQ(times.left_s, 10.0 + 5000 * kByte_s);
  EXPECT_DOUBLE_EQ(times.here_s, times.left_s);
  const LinkTimes empty = links.transmit({0, 1, MessageKind::payload, 0}, 20.0);
  EXPECT_DOUBLE_EQ(empty.here_s, 20.0);
}

// Four ranks keep four sends in flight each; together they get the rate of one link.
TEST(LinkModel, RanksOfANodeShareItsRate) {
  LinkModel links(Topology::uniform(2, 4), kBits_per_s);
  constexpr std::uint64_t kBytes = 61440;
  constexpr int kMessages = 100;
  std::vector<std::vector<double>> left(4);
  double last_here = 0;
  for (int i = 0; i < kMessages; ++i) {
    for (int rank = 0; rank < 4; ++rank) {
      const double now = i < 4 ? 0 : left[rank][i - 4];
      const LinkTimes times = links.transmit({rank, 4 + rank, MessageKind::payload, kBytes}, now);
      left[rank].push_back(times.left_s);
      last_here = std::max(last_here, times.here_s);
    }
  }
  const double ideal = 4.0 * kMessages * kBytes * kByte_s;
  EXPECT_GE(last_here, ideal * 0.999);
  EXPECT_LE(last_here, ideal * 1.05);
}

TEST(LinkModel, BothDirectionsAreIndependent) {
  LinkModel links(Topology::uniform(2, 1), kBits_per_s);
  const LinkTimes there = links.transmit({0, 1, MessageKind::payload, 1000}, 0);
  const LinkTimes back = links.transmit({1, 0, MessageKind::payload, 1000}, 0);
  EXPECT_DOUBLE_EQ(there.here_s, back.here_s);
}

TEST(LinkModel, ManySendersShareTheReceiversLink) {
  LinkModel links(Topology::uniform(4, 1), kBits_per_s);
  std::vector<double> here;
  for (int source = 1; source < 4; ++source) {
    const LinkTimes times = links.transmit({source, 0, MessageKind::payload, 10000}, 0);
    EXPECT_DOUBLE_EQ(times.left_s, 10000 * kByte_s) << "its own link is free";
    here.push_back(times.here_s);
  }
  for (int i = 0; i < 3; ++i) EXPECT_DOUBLE_EQ(here[i], (i + 1) * 10000 * kByte_s);
}

TEST(LinkModel, ControlQueuesBehindItsOwnRankOnly) {
  LinkModel links(Topology::uniform(2, 2), kBits_per_s);
  for (int i = 0; i < 10; ++i) links.transmit({0, 2, MessageKind::payload, 60000}, 0);
  const LinkTimes idle_rank = links.transmit({1, 3, MessageKind::control, 100}, 0);
  EXPECT_DOUBLE_EQ(idle_rank.here_s, 100 * kByte_s);
  const LinkTimes busy_rank = links.transmit({0, 2, MessageKind::control, 100}, 0);
  EXPECT_DOUBLE_EQ(busy_rank.here_s, (600000 + 100) * kByte_s);
  const LinkTimes large = links.transmit({1, 3, MessageKind::metadata, 2048}, 0);
  EXPECT_GT(large.here_s, 600000 * kByte_s) << "only small messages pass";
}

TEST(LinkModel, ControlTakesItsShareOfTheLink) {
  LinkModel links(Topology::uniform(2, 2), kBits_per_s);
  for (int i = 0; i < 100; ++i) links.transmit({1, 3, MessageKind::control, 1000}, 0);
  const LinkTimes bulk = links.transmit({0, 2, MessageKind::payload, 1000}, 0);
  EXPECT_NEAR(bulk.left_s, 101000 * kByte_s, 1e-9);
  EXPECT_NEAR(bulk.here_s, bulk.left_s, 1e-9);
}

}  // namespace
}  // namespace ferry::detail
