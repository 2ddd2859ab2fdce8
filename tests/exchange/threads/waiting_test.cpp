// What the error of a call says that waited in vain: it names the rank at the end of the chain, not
// one that waits itself.

#include <future>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ferry/ferry.hpp"

namespace ferry {
namespace {

constexpr int kChainHidden = 16;
constexpr int kChainTokens = 4;

TEST(Waiting, TheRankAtTheEndOfTheChainIsNamed) {
  // Tokens go from rank 0 to 1 and from rank 1 to 2. Rank 2 dispatches nothing, so rank 1 cannot
  // end its dispatch, and rank 0 gets no outputs from it.
  std::promise<void> over;
  std::shared_future<void> is_over = over.get_future().share();
  threads::run({.nodes = 1, .ranks_per_node = 3}, [&](Transport& transport) {
    const int rank = transport.rank();
    Exchange exchange(transport, Placement::contiguous(3, 3),
                      {.hidden = kChainHidden, .dtype = DType::f32});
    const std::int64_t tokens = rank == 2 ? 0 : kChainTokens;
    const std::vector<std::int32_t> ids(kChainTokens, rank + 1);
    const Plan plan = exchange.plan(
        Routing::of(tokens, 1, std::span(ids).first(static_cast<std::size_t>(tokens))));
    barrier(transport);
    if (rank == 2) {
      is_over.wait();
      return;
    }
    // Rank 1 gives signs of life, so rank 0 waits for ten times as long.
    set_limits(transport, {.deadline_s = rank == 0 ? 0.15 : 60});
    std::vector<float> x(kChainTokens * kChainHidden, 1.0F);
    const Matrix rows{x.data(), DType::f32, kChainTokens, kChainHidden, 0};
    std::string text;
    try {
      const ExpertRows there = exchange.dispatch(plan, rows);
      exchange.combine(plan, there.matrix(), rows);
      ADD_FAILURE() << "rank " << rank << " ended well";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
      text = error.what();
    }
    EXPECT_NE(text.find("for rank 2 on node 0"), std::string::npos) << text;
    EXPECT_NE(text.find("rank 1 itself waits for rank 2"), std::string::npos) << text;
    if (rank == 0) over.set_value();
  });
}

}  // namespace
}  // namespace ferry
