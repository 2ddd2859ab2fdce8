// Buffers and statistics of a measurement.

#include "bench/memory.hpp"

#include <cstdint>

#include <gtest/gtest.h>

#include "bench/result.hpp"
#include "common/failures.hpp"
#include "common/memory_check.hpp"

namespace ferry::bench {
namespace {

TEST(HugeBuffer, StartsOnAHugePageAndCanBeEmpty) {
  const HugeBuffer buffer(3'000'000);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % (2U << 20), 0U);
  EXPECT_EQ(buffer.data()[2'999'999], std::byte{0});
  EXPECT_EQ(HugeBuffer(0).data(), nullptr);
}

TEST(CheckMemory, RefusesMoreThanTheMachineHas) {
  EXPECT_NO_THROW(tools::check_memory(1, "less"));
  EXPECT_THROW(tools::check_memory(std::uint64_t{1} << 60, "less"), tools::EnvironmentError);
}

TEST(MemcpyReference, CopiesAnyNumberOfRows) {
  for (const std::int64_t rows : {0, 1, 5, 100}) {
    MemcpyReference reference({rows, 48});
    for (int i = 0; i < 3; ++i) reference.copy();
  }
}

TEST(Spread, IsMedianAndPercentiles) {
  const Spread spread = spread_of({5, 1, 4, 2, 3});
  EXPECT_DOUBLE_EQ(spread.median, 3);
  EXPECT_DOUBLE_EQ(spread.p10, 1.4);
  EXPECT_DOUBLE_EQ(spread.p90, 4.6);
  EXPECT_DOUBLE_EQ(spread_of({7}).p90, 7);
}

}  // namespace
}  // namespace ferry::bench
