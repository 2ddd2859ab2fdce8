// Blocks go around; growing the pool drops what has become too small.

#include "exchange/blocks.hpp"

#include <gtest/gtest.h>

namespace ferry::detail {
namespace {

TEST(BlockPool, HandsOutReturnedMemoryAgain) {
  BlockPool pool(1024);
  const std::byte* first = nullptr;
  {
    const Block block = pool.take();
    first = block.memory().data();
    EXPECT_EQ(block.memory().size(), 1024U);
  }
  EXPECT_EQ(pool.take().memory().data(), first);
}

TEST(BlockPool, GrowsWithoutLosingWhatIsOut) {
  BlockPool pool(1024);
  Block old = pool.take();
  pool.grow(4096);
  EXPECT_EQ(pool.take().memory().size(), 4096U);
  old = Block();  // too small by now: freed, not handed out again
  EXPECT_EQ(pool.take().memory().size(), 4096U);
  pool.grow(512);
  EXPECT_EQ(pool.block_bytes(), 4096U);
}

TEST(BlockPool, TakesBackReleasedMemory) {
  BlockPool pool(256);
  const std::span<std::byte> memory = pool.take().release();
  { const Block block = pool.adopt(memory); }
  EXPECT_EQ(pool.take().memory().data(), memory.data());
}

}  // namespace
}  // namespace ferry::detail
