// The window pool, its limit and its errors; handles and their slots; one thread at a time.

#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ferry/ferry.hpp"

namespace ferry {
namespace {

constexpr int kManyTokens = 64;
constexpr int kWideHidden = 256;

/// One rank with one expert: every token comes back as it is.
class OneRank {
 public:
  explicit OneRank(Transport& transport)
      : exchange_(transport, Placement::contiguous(1, 1),
                  {.hidden = kWideHidden, .dtype = DType::f32}),
        ids_(kManyTokens, 0),
        x_(kManyTokens * kWideHidden, 1.5F) {}

  Exchange& exchange() { return exchange_; }
  Plan plan() {
    return exchange_.plan(Routing::of(kManyTokens, 1, std::span<const std::int32_t>(ids_)));
  }
  Matrix x() { return {x_.data(), DType::f32, kManyTokens, kWideHidden, 0}; }

 private:
  Exchange exchange_;
  std::vector<std::int32_t> ids_;
  std::vector<float> x_;
};

ErrorCode code_of(const std::function<void()>& call, std::string* text = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    if (text != nullptr) *text = error.what();
    return error.code();
  }
  ADD_FAILURE() << "no error";
  return ErrorCode::unsupported;
}

TEST(Limits, PoolGrowsUpToItsLimitAndNamesTheHolders) {
  threads::run({}, [](Transport& transport) {
    OneRank rank(transport);
    const Plan plan = rank.plan();
    set_limits(transport,
               {.pool_limit_bytes = pool_bytes(transport) + 2 * plan.summary().window_bytes});
    std::vector<OutputRows> held;
    held.push_back(rank.exchange().output(plan));
    held.push_back(rank.exchange().output(plan));
    std::string text;
    EXPECT_EQ(code_of([&] { held.push_back(rank.exchange().output(plan)); }, &text),
              ErrorCode::limit_exceeded);
    EXPECT_NE(text.find("output of plan 0"), std::string::npos) << text;
    EXPECT_NE(text.find("pool_limit_bytes"), std::string::npos) << text;
    held.pop_back();
    EXPECT_NO_THROW(held.push_back(rank.exchange().output(plan)));
  });
}

TEST(Limits, FreeSlotsMakeRoomBeforeThePoolRefuses) {
  threads::run({}, [](Transport& transport) {
    OneRank rank(transport);
    const std::vector<std::int32_t> ids(4 * kManyTokens, 0);
    std::vector<float> x(ids.size() * kWideHidden, 2.5F);
    const auto num_tokens = static_cast<std::int64_t>(ids.size());
    const Plan small = rank.plan();
    const Plan large =
        rank.exchange().plan(Routing::of(num_tokens, 1, std::span<const std::int32_t>(ids)));
    rank.exchange().dispatch(small, rank.x());
    // Room for the large window, but not beside the small one, which nobody holds.
    const std::uint64_t limit = pool_bytes(transport) + large.summary().window_bytes - 1;
    set_limits(transport, {.pool_limit_bytes = limit});
    EXPECT_NO_THROW(
        rank.exchange().dispatch(large, {x.data(), DType::f32, num_tokens, kWideHidden, 0}));
    EXPECT_LE(pool_bytes(transport), limit);
  });
}

TEST(Limits, WindowBytesAreExactAndSlotsAreUsedAgain) {
  threads::run({}, [](Transport& transport) {
    OneRank rank(transport);
    const Plan plan = rank.plan();
    EXPECT_EQ(plan.summary().window_bytes,
              static_cast<std::uint64_t>(kManyTokens) * kWideHidden * 4);
    rank.exchange().dispatch(plan, rank.x());
    const std::uint64_t reserved = pool_bytes(transport);
    for (int i = 0; i < 100; ++i) rank.exchange().dispatch(plan, rank.x());
    for (int i = 0; i < 100; ++i) rank.plan();
    EXPECT_EQ(pool_bytes(transport), reserved);
  });
}

TEST(Limits, RowsThatSomebodyHoldsAreNotWrittenAgain) {
  threads::run({}, [](Transport& transport) {
    OneRank rank(transport);
    const Plan plan = rank.plan();
    Matrix x = rank.x();
    const ExpertRows first = rank.exchange().dispatch(plan, x);
    static_cast<float*>(x.data)[0] = 7.0F;
    const ExpertRows second = rank.exchange().dispatch(plan, x);
    EXPECT_EQ(*reinterpret_cast<const float*>(first.matrix().row(0)), 1.5F);
    EXPECT_EQ(*reinterpret_cast<const float*>(second.matrix().row(0)), 7.0F);
  });
}

TEST(Limits, OutputsMayBePackedInTheirWindow) {
  // The window's rows are 64 bytes apart; a caller may use its memory for rows that are not.
  constexpr int kShort = 5;
  threads::run({}, [](Transport& transport) {
    Exchange exchange(transport, Placement::contiguous(1, 1),
                      {.hidden = kShort, .dtype = DType::f32});
    const std::vector<std::int32_t> ids(kManyTokens, 0);
    const std::vector<float> weights(kManyTokens, 1.0F);
    const Plan plan = exchange.plan(
        Routing::of(kManyTokens, 1, std::span<const std::int32_t>(ids), std::span(weights)));
    const OutputRows output = exchange.output(plan);
    auto* const packed = static_cast<float*>(output.matrix().data);
    for (int i = 0; i < kManyTokens * kShort; ++i) packed[i] = static_cast<float>(i);
    std::vector<float> out(kManyTokens * kShort);
    exchange.combine(plan, {packed, DType::f32, kManyTokens, kShort, 0},
                     {out.data(), DType::f32, kManyTokens, kShort, 0});
    for (int i = 0; i < kManyTokens * kShort; ++i) ASSERT_EQ(out[i], static_cast<float>(i)) << i;
  });
}

TEST(Limits, ASecondThreadIsRefused) {
  threads::run({.nodes = 1, .ranks_per_node = 2}, [](Transport& transport) {
    if (transport.rank() == 1) {
      // Rank 0 is inside its barrier until this rank comes.
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      barrier(transport);
      return;
    }
    set_limits(transport, {});  // what both threads use is made before the second one starts
    auto other = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      std::string text;
      EXPECT_EQ(code_of([&] { barrier(transport); }, &text), ErrorCode::wrong_thread);
      EXPECT_NE(text.find("one thread"), std::string::npos) << text;
    });
    barrier(transport);
    other.get();
  });
}

TEST(Limits, OptionsOutOfRangeAreRefusedWithTheAllowedRange) {
  threads::run({}, [](Transport& transport) {
    const auto make = [&](RowShape shape, ExchangeOptions options) {
      std::string text;
      EXPECT_EQ(
          code_of([&] { Exchange(transport, Placement::contiguous(1, 1), shape, options); }, &text),
          ErrorCode::invalid_argument);
      EXPECT_NE(text.find("allowed"), std::string::npos) << text;
    };
    make({.hidden = 0}, {});
    make({.hidden = 8}, {.fragment_bytes = -1});
    make({.hidden = 8}, {.range_tokens = -1});
    make({.hidden = 8}, {.ranges_in_flight = 0});
  });
}

TEST(Limits, RangesAreAsLongAsRowsForwardAllow) {
  threads::run({}, [](Transport& transport) {
    const auto range_tokens = [&](ExchangeOptions options) {
      options.fragment_bytes = 61440;
      return Exchange(transport, Placement::contiguous(1, 1), {.hidden = 512, .dtype = DType::f32},
                      options)
          .options()
          .range_tokens;
    };
    constexpr auto kFp8 = WireFormat::fp8_e4m3fn;
    // Rows of 528, 1024 and 2048 bytes; gradients cross in f32, the dtype.
    EXPECT_EQ(range_tokens({.wire_dispatch = kFp8, .wire_combine = kFp8}), 8 * 116);
    EXPECT_EQ(range_tokens({.wire_dispatch = kFp8, .wire_combine = WireFormat::bf16}), 8 * 59);
    EXPECT_EQ(range_tokens({.wire_combine = kFp8}), 8 * 29);
    EXPECT_EQ(range_tokens({.range_tokens = 3}), 3);
  });
}

TEST(Limits, MetadataBeyondItsLimitIsRefusedOnEveryRank) {
  threads::run({.nodes = 2, .ranks_per_node = 1}, [](Transport& transport) {
    // The other rank has no tokens: what it sends is small.
    const std::int64_t num_tokens = transport.rank() == 0 ? 1000 : 0;
    if (transport.rank() == 0) set_limits(transport, {.metadata_limit_bytes = 1000});
    Exchange exchange(transport, Placement::contiguous(2, 2), {.hidden = 8});
    const std::vector<std::int32_t> ids(1000, 1);
    std::string text;
    EXPECT_EQ(
        code_of(
            [&] { exchange.plan(Routing::of(num_tokens, 1, std::span<const std::int32_t>(ids))); },
            &text),
        ErrorCode::limit_exceeded);
    EXPECT_NE(text.find("metadata of rank 0 for node 1"), std::string::npos) << text;
  });
}

TEST(Limits, MoreTokensThanAllowedAreRefusedOnEveryRank) {
  threads::run({.nodes = 2, .ranks_per_node = 1}, [](Transport& transport) {
    if (transport.rank() == 0) set_limits(transport, {.num_tokens_limit = 99});
    Exchange exchange(transport, Placement::contiguous(2, 2), {.hidden = 8});
    const std::vector<std::int32_t> ids(100, 1);
    const auto plan_where = [&](int rank, std::int64_t num_tokens) {
      exchange.plan(Routing::of(transport.rank() == rank ? num_tokens : 0, 1,
                                std::span<const std::int32_t>(ids)));
    };
    EXPECT_NO_THROW(plan_where(0, 99));
    std::string text;
    EXPECT_EQ(code_of([&] { plan_where(0, 100); }, &text), ErrorCode::limit_exceeded);
    EXPECT_NE(text.find("num_tokens = 100 on rank 0; allowed: 99"), std::string::npos) << text;
    // Rank 1 may send more than rank 0 takes, and may have made its plan before it hears of that.
    Pending<Plan> pending = exchange.start_plan(
        Routing::of(transport.rank() == 1 ? 100 : 0, 1, std::span<const std::int32_t>(ids)));
    if (transport.rank() == 0) {
      EXPECT_EQ(code_of([&] { pending.wait(); }, &text), ErrorCode::corrupt_message);
      EXPECT_NE(text.find("num_tokens is 100; allowed: 99"), std::string::npos) << text;
    }
    barrier(transport);
  });
}

TEST(Limits, AllGatherBringsEveryRanksBytes) {
  threads::run({.nodes = 2, .ranks_per_node = 2}, [](Transport& transport) {
    const std::vector<std::byte> mine(static_cast<std::size_t>(transport.rank()) * 1000,
                                      static_cast<std::byte>(transport.rank()));
    const auto all = all_gather(transport, mine);
    ASSERT_EQ(all.size(), 4U);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      ASSERT_EQ(all[rank].size(), rank * 1000);
      for (const std::byte value : all[rank]) ASSERT_EQ(value, static_cast<std::byte>(rank));
    }
  });
}

}  // namespace
}  // namespace ferry
