// Cases about bad input: one rank makes a call that cannot be served. The error carries one text on
// every rank, names what was wrong and where, and the exchange goes on.

#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

using support::Failure;
using support::failure_of;

using Failures = std::vector<std::optional<Failure>>;

class Refusals : public Conformance {
 protected:
  /// The rank that misbehaves.
  int culprit() const { return num_ranks() - 1; }
  Layer layer(std::uint64_t seed = 3) const {
    const RoutingSpec spec{.num_experts = 2 * num_ranks(), .num_topk = 2};
    return {group(spec.num_experts), make_all_routing(spec, ragged(6), seed)};
  }
  std::string culprit_name() const { return fmt::format("rank {}", culprit()); }

  /// Every rank failed with the culprit's code and text, which holds all of `words`.
  void expect_same_everywhere(const Failures& failures, ErrorCode code,
                              const std::vector<std::string>& words) const {
    const auto& own = failures[static_cast<std::size_t>(culprit())];
    ASSERT_TRUE(own.has_value()) << "the bad call was accepted";
    EXPECT_EQ(own->code, code) << own->text;
    for (const std::string& word : words) {
      EXPECT_NE(own->text.find(word), std::string::npos) << "no '" << word << "' in: " << own->text;
    }
    for (std::size_t rank = 0; rank < failures.size(); ++rank) {
      ASSERT_TRUE(failures[rank].has_value()) << "rank " << rank << " learned nothing";
      EXPECT_EQ(failures[rank]->text, own->text) << "rank " << rank;
      EXPECT_EQ(failures[rank]->code, own->code) << "rank " << rank;
    }
  }
};

/// A routing that is wrong, and words that the error must hold.
struct BadRouting {
  std::string name;
  std::function<void(Routing&, RoutingData&)> spoil;
  std::vector<std::string> words;
};

std::vector<BadRouting> bad_routings(int num_experts) {
  const auto put = [](std::int32_t id) {
    return [id](Routing&, RoutingData& data) { data.topk_idx[3] = id; };
  };
  const std::string range = fmt::format("0..{}", num_experts - 1);
  return {
      {"id is num_experts", put(num_experts),
       {"topk_idx[1,1]", fmt::format("{}", num_experts), range}},
      {"id is -2", put(-2), {"topk_idx[1,1]", "-2", range}},
      {"id is the largest", put(std::numeric_limits<std::int32_t>::max()), {"2147483647", range}},
      {"weight is NaN",
       [](Routing&, RoutingData& data) { data.topk_weights[2] = std::nanf(""); },
       {"topk_weights[1,0]", "nan"}},
      {"ids are too few",
       [](Routing& view, RoutingData& data) {
         view.topk_idx32 = view.topk_idx32.first(data.topk_idx.size() - 1);
       },
       {"topk_idx"}},
      {"weights are too few",
       [](Routing& view, RoutingData& data) {
         view.topk_weights = view.topk_weights.first(data.topk_weights.size() - 1);
       },
       {"topk_weights"}},
      {"no ids", [](Routing& view, RoutingData&) { view.topk_idx32 = {}; }, {"topk_idx"}},
      {"num_tokens is negative", [](Routing& view, RoutingData&) { view.num_tokens = -1; },
       {"num_tokens", "-1"}},
      {"num_topk is 0", [](Routing& view, RoutingData&) { view.num_topk = 0; },
       {"num_topk", "1..64"}},
      {"num_topk is 65", [](Routing& view, RoutingData&) { view.num_topk = 65; },
       {"num_topk", "65", "1..64"}},
  };
}

TEST_P(Refusals, OfARouting) {
  const Layer good = layer();
  for (const BadRouting& bad : bad_routings(good.group().placement.num_experts())) {
    SCOPED_TRACE(bad.name);
    Failures failures(static_cast<std::size_t>(num_ranks()));
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, good.group());
      Layer mine = good;
      RoutingData& data = mine.data(context.rank());
      Routing view = data.view();
      if (context.rank() == culprit()) bad.spoil(view, data);
      failures[static_cast<std::size_t>(context.rank())] =
          co_await failure_of([&] { return exchange.start_plan(view); });
      co_await run_layer(context, exchange, good, {.check_bytes = false});
    });
    support::gather_by_rank(failures);
    std::vector<std::string> words = bad.words;
    words.push_back(culprit_name());
    expect_same_everywhere(failures, ErrorCode::invalid_argument, words);
  }
}

/// Operands of dispatch and combine, to be spoiled.
struct Operands {
  ConstMatrix x;
  ConstMatrix y;
  Matrix out;
};
struct BadOperand {
  std::string name;
  bool in_dispatch;
  std::function<void(Operands&)> spoil;
};

std::vector<BadOperand> bad_operands() {
  const auto other = [](DType dtype) { return dtype == DType::f32 ? DType::f16 : DType::f32; };
  return {
      {"x has one row less", true, [](Operands& o) { --o.x.rows; }},
      {"x has one row more", true, [](Operands& o) { ++o.x.rows; }},
      {"x has one column less", true, [](Operands& o) { --o.x.columns; }},
      {"x is of another dtype", true, [=](Operands& o) { o.x.dtype = other(o.x.dtype); }},
      {"x is null", true, [](Operands& o) { o.x.data = nullptr; }},
      {"rows of x overlap", true, [](Operands& o) { o.x.row_stride_bytes = 2; }},
      {"y has one row more", false, [](Operands& o) { ++o.y.rows; }},
      {"y has one column more", false, [](Operands& o) { ++o.y.columns; }},
      {"y is of another dtype", false, [=](Operands& o) { o.y.dtype = other(o.y.dtype); }},
      {"out has one row less", false, [](Operands& o) { --o.out.rows; }},
      {"out has one column less", false, [](Operands& o) { --o.out.columns; }},
      {"out is of another dtype", false, [=](Operands& o) { o.out.dtype = other(o.out.dtype); }},
      {"out is null", false, [](Operands& o) { o.out.data = nullptr; }},
  };
}

TEST_P(Refusals, OfAnOperandPoisonsThePlanOnly) {
  const Layer good = layer();
  for (const BadOperand& bad : bad_operands()) {
    SCOPED_TRACE(bad.name);
    Failures before(static_cast<std::size_t>(num_ranks()));
    Failures first(static_cast<std::size_t>(num_ranks()));
    Failures last(static_cast<std::size_t>(num_ranks()));
    run([&](RankContext& context) -> Task {
      const auto rank = static_cast<std::size_t>(context.rank());
      Exchange exchange = make_exchange(context, good.group());
      RankLayer memory(context, good, 5);
      const Plan plan = co_await exchange.start_plan(memory.routing());
      GuardedMatrix y(plan.num_rows() + 1, good.group().hidden, good.group().dtype);
      Operands operands{memory.x(), y.matrix(), memory.out()};
      operands.y.rows = plan.num_rows();
      if (context.rank() == culprit()) bad.spoil(operands);
      if (!bad.in_dispatch) {
        // A rank that is slow here may already learn of a refusal that comes after this call.
        before[rank] =
            co_await failure_of([&] { return exchange.start_dispatch(plan, operands.x); });
      }
      if (bad.in_dispatch) {
        first[rank] =
            co_await failure_of([&] { return exchange.start_dispatch(plan, operands.x); });
      } else {
        first[rank] = co_await failure_of(
            [&] { return exchange.start_combine(plan, operands.y, operands.out); });
      }
      operands = {memory.x(), y.matrix(), memory.out()};
      operands.y.rows = plan.num_rows();
      for (int repeat = 0; repeat < 3; ++repeat) {
        co_await support::meet();
        co_await support::pause(2000);
        last[rank] = co_await failure_of(
            [&] { return exchange.start_combine(plan, operands.y, operands.out); });
      }
      co_await run_layer(context, exchange, good, {.check_bytes = false});
    });
    for (Failures* const seen : {&before, &first, &last}) support::gather_by_rank(*seen);
    const auto& own = first[static_cast<std::size_t>(culprit())];
    ASSERT_TRUE(own.has_value()) << "the bad call was accepted";
    // Where a rank needed nothing from the culprit the call itself may have ended well.
    for (const Failures& failures : {before, first}) {
      for (const auto& failure : failures) {
        if (failure) {
          EXPECT_EQ(failure->text, own->text);
        }
      }
    }
    expect_same_everywhere(last, ErrorCode::invalid_argument, {culprit_name()});
    if (HasFatalFailure()) return;
    EXPECT_EQ(last.front()->text, own->text);
  }
}

TEST_P(Refusals, OfAForeignPlan) {
  const Layer good = layer();
  Failures foreign(static_cast<std::size_t>(num_ranks()));
  run([&](RankContext& context) -> Task {
    Exchange a = make_exchange(context, good.group());
    Exchange b = make_exchange(context, good.group());
    RankLayer memory(context, good, 5);
    const Plan of_a = co_await a.start_plan(memory.routing());
    const Plan of_b = co_await b.start_plan(memory.routing());
    foreign[static_cast<std::size_t>(context.rank())] =
        co_await failure_of([&] { return a.start_dispatch(of_b, memory.x()); });
    co_await use_plan(context, a, of_a, memory, {.y = OutputPlace::window});
    co_await use_plan(context, b, of_b, memory, {.y = OutputPlace::window});
  });
  support::gather_by_rank(foreign);
  for (const auto& failure : foreign) {
    ASSERT_TRUE(failure.has_value()) << "a foreign plan was accepted";
    EXPECT_EQ(failure->code, ErrorCode::stale_plan) << failure->text;
  }
}

TEST_P(Refusals, OfAShapeOrOptionThatCannotBe) {
  // These are refused where the exchange is made; no other rank takes part.
  const Layer later = layer();
  const Group& good = later.group();
  run([&](RankContext& context) -> Task {
    const auto refused = [&](const Placement& placement, RowShape shape, ExchangeOptions options) {
      try {
        const Exchange exchange(context.transport(), placement, shape, options);
      } catch (const Error& error) {
        return error.code() == ErrorCode::invalid_argument ||
               error.code() == ErrorCode::unsupported;
      }
      return false;
    };
    const RowShape shape{good.hidden, good.dtype};
    support::require(refused(good.placement, {0, good.dtype}, {}), "hidden 0 was accepted");
    support::require(refused(good.placement, {-4, good.dtype}, {}), "hidden -4 was accepted");
    support::require(refused(Placement::from_map({context.num_ranks()}), shape, {}),
                     "an expert on a rank that is not there was accepted");
    support::require(refused(good.placement, shape, {.fragment_bytes = -1}),
                     "fragment_bytes -1 was accepted");
    support::require(refused(good.placement, shape, {.range_tokens = -1}),
                     "range_tokens -1 was accepted");
    support::require(refused(good.placement, shape, {.ranges_in_flight = 0}),
                     "ranges_in_flight 0 was accepted");
    Exchange exchange = make_exchange(context, good);
    co_await run_layer(context, exchange, later, {});
  });
}

INSTANTIATE_TEST_SUITE_P(Matrix, Refusals,
                         ::testing::ValuesIn(few_points({"1x1", "1x8", "2x4", "8x1", "1+2+4"})),
                         name_of);

}  // namespace
}  // namespace ferry::conformance
