// Ranks that need nothing of the others run far ahead, or leave early: nobody waits for them, and
// what they refuse, or do in another order, is still found.

#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "ferry/ferry.hpp"

namespace ferry {
namespace {

constexpr int kReplayHidden = 64;
constexpr int kReplayTokens = 4;
constexpr int kReplays = 200;

/// Three ranks of one node; the last has no expert and no token.
class Rank {
 public:
  explicit Rank(Transport& transport)
      : idle_(transport.rank() == 2),
        exchange_(transport, Placement::from_map({0, 1}),
                  {.hidden = kReplayHidden, .dtype = DType::f32}),
        ids_(idle_ ? 0 : kReplayTokens * 2),
        x_(num_tokens() * kReplayHidden, 1.0F),
        out_(x_.size()) {
    set_limits(transport, {.deadline_s = 2});
    for (std::size_t i = 0; i < ids_.size(); ++i) ids_[i] = static_cast<std::int32_t>(i % 2);
  }

  bool idle() const { return idle_; }
  Exchange& exchange() { return exchange_; }
  std::int64_t num_tokens() const { return idle_ ? 0 : kReplayTokens; }
  Routing routing() const {
    return Routing::of(num_tokens(), 2, std::span<const std::int32_t>(ids_));
  }
  Matrix x() { return {x_.data(), DType::f32, num_tokens(), kReplayHidden, 0}; }
  Matrix out() { return {out_.data(), DType::f32, num_tokens(), kReplayHidden, 0}; }
  void use(const Plan& plan) {
    const ExpertRows rows = exchange_.dispatch(plan, x());
    exchange_.combine(plan, rows.matrix(), out());
  }

 private:
  bool idle_;
  Exchange exchange_;
  std::vector<std::int32_t> ids_;
  std::vector<float> x_;
  std::vector<float> out_;
};

TEST(FarAhead, ARankThatNeedsNothingHoldsNobodyBack) {
  for (const bool stays : {false, true}) {
    threads::run({.nodes = 1, .ranks_per_node = 3}, [&](Transport& transport) {
      {
        Rank rank(transport);
        const Plan plan = rank.exchange().plan(rank.routing());
        for (int i = 0; i < kReplays; ++i) rank.use(plan);
      }
      if (stays) barrier(transport);
    });
  }
}

TEST(FarAhead, ItsRefusalReachesTheOthersThoughItLeavesAtOnce) {
  threads::run({.nodes = 1, .ranks_per_node = 3}, [&](Transport& transport) {
    Rank rank(transport);
    const Plan plan = rank.exchange().plan(rank.routing());
    for (int i = 0; i < kReplays; ++i) rank.use(plan);
    const std::vector<std::int32_t> bad{77};
    const Routing routing =
        rank.idle() ? Routing::of(1, 1, std::span<const std::int32_t>(bad)) : rank.routing();
    try {
      rank.exchange().plan(routing);
      ADD_FAILURE() << "rank " << transport.rank() << " has a plan";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    }
  });
}

TEST(FarAhead, AnotherOrderIsFoundThoughARankIsFarAhead) {
  threads::run({.nodes = 1, .ranks_per_node = 3}, [&](Transport& transport) {
    Rank rank(transport);
    const Plan a = rank.exchange().plan(rank.routing());
    const Plan b = rank.exchange().plan(rank.routing());
    try {
      // The idle rank may be done before the others begin, or learn of it on the way.
      for (int i = 0; i < (rank.idle() ? kReplays : 5); ++i) rank.use(a);
      if (rank.idle()) return;
      rank.use(transport.rank() == 0 ? a : b);
      ADD_FAILURE() << "rank " << transport.rank() << " noticed nothing";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::mismatch) << error.what();
    }
  });
}

TEST(FarAhead, ARefusalWithoutAPlanEndsCallsThoughPlacesSayNothing) {
  // Rank 0 gives its dispatch up and leaves the plan there; rank 1 may leave it at combine. Then
  // rank 0 passes a plan of another exchange where rank 1 uses a good one.
  threads::run({.nodes = 1, .ranks_per_node = 3}, [&](Transport& transport) {
    Rank rank(transport);
    Rank other(transport);
    const Plan lost = rank.exchange().plan(rank.routing());
    const Plan good = rank.exchange().plan(rank.routing());
    const Plan foreign = other.exchange().plan(other.routing());
    try {
      Matrix x = rank.x();
      if (transport.rank() == 0) x.columns = 3;
      const ExpertRows rows = rank.exchange().dispatch(lost, x);
      rank.exchange().combine(lost, rows.matrix(), rank.out());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    }
    if (rank.idle()) return;
    try {
      rank.use(transport.rank() == 0 ? foreign : good);
      ADD_FAILURE() << "rank " << transport.rank() << " ended well";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::stale_plan) << error.what();
    }
  });
}

/// Rank 0 makes a second exchange and sends rows with its first plan, while rank 1 still waits in
/// the first one and has memory set aside for that.
TEST(FarAhead, RowsThatComeBeforeTheirExchangeAreKept) {
  for (const std::int64_t hidden : {16, 200'000}) {  // the second: a row is more than a fragment
    SCOPED_TRACE(hidden);
    threads::run({.nodes = 2, .ranks_per_node = 1}, [&](Transport& transport) {
      const std::vector<std::int32_t> ids{0, 1};
      const auto routing = Routing::of(2, 1, std::span<const std::int32_t>(ids));
      std::vector<float> x(static_cast<std::size_t>(2 * hidden),
                           static_cast<float>(transport.rank()));
      const ConstMatrix rows{x.data(), DType::f32, 2, hidden, 0};
      const auto make = [&](std::int64_t columns) {
        return Exchange(transport, Placement::from_map({0, 1}),
                        {.hidden = columns, .dtype = DType::f32});
      };
      Exchange first = make(16);
      const Plan kept = first.plan(routing);
      std::optional<Exchange> second;
      std::optional<Pending<Dispatched>> early;
      const auto begin_second = [&] {
        second.emplace(make(hidden));
        early.emplace(second->start_plan_and_dispatch(routing, rows));
      };
      if (transport.rank() == 0) begin_second();
      first.plan(routing);
      if (transport.rank() == 1) begin_second();
      const Dispatched got = early->wait();
      ASSERT_EQ(got.rows.num_rows(), 2);
      for (const int source : {0, 1}) {
        const ConstMatrix all = got.rows.matrix();
        const auto* const row = reinterpret_cast<const float*>(all.row(source));
        EXPECT_EQ(row[0], static_cast<float>(source));
        EXPECT_EQ(row[hidden - 1], static_cast<float>(source));
      }
    });
  }
}

}  // namespace
}  // namespace ferry
