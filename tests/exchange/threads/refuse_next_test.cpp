// A call that a binding refuses: it ends with the binding's text on every rank, whichever call it
// is, and the calls after it are as ever.

#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ferry/ferry.hpp"

namespace ferry::refusing {
namespace {

constexpr std::int64_t kTokens = 4;
constexpr std::int64_t kHidden = 16;
const std::string kText = "x on rank 1 is a bird; fix: pass rows";

template <typename Call>
void expect_refused(const Call& call) {
  try {
    call();
    ADD_FAILURE() << "a refused call ended well";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(error.what(), kText);
  }
}

TEST(RefuseNext, ReachesEveryRankOfEachCall) {
  threads::run({.nodes = 2, .ranks_per_node = 2}, [](Transport& transport) {
    Exchange exchange(transport, Placement::contiguous(4, 4),
                      {.hidden = kHidden, .dtype = DType::f32});
    const std::vector<std::int32_t> ids{0, 1, 2, 3};
    const auto routing = Routing::of(kTokens, 1, std::span<const std::int32_t>(ids));
    const std::vector<float> x(kTokens * kHidden, 1.0F);
    std::vector<float> out(x.size());
    const ConstMatrix rows_of_x{x.data(), DType::f32, kTokens, kHidden};
    const Matrix sums{out.data(), DType::f32, kTokens, kHidden};
    const bool bad = transport.rank() == 1;
    const auto refuse = [&] {
      if (bad) exchange.refuse_next(Error(ErrorCode::invalid_argument, kText));
    };

    refuse();
    expect_refused([&] { exchange.plan(bad ? Routing{.num_tokens = -1} : routing); });
    refuse();
    expect_refused(
        [&] { exchange.plan_and_dispatch(bad ? Routing{.num_tokens = -1} : routing, rows_of_x); });
    // A call on a plan may end well where it needs nothing of rank 1; the next one does not.
    const Plan first = exchange.plan(routing);
    refuse();
    expect_refused([&] {
      exchange.dispatch(first, bad ? ConstMatrix{} : rows_of_x);
      barrier(transport);
      exchange.dispatch(first, rows_of_x);
    });
    barrier(transport);

    const Plan plan = exchange.plan(routing);
    const ExpertRows rows = exchange.dispatch(plan, rows_of_x);
    exchange.combine(plan, rows.matrix(), sums);
    EXPECT_EQ(out, x);
  });
}

}  // namespace
}  // namespace ferry::refusing
