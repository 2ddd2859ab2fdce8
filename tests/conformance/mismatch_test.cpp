// Cases about ranks that disagree, on an option or on the order of calls: an error on every rank
// that names both values, never a hang.

#include <fmt/format.h>

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

using support::Failure;
using support::failure_of;

using Failures = std::vector<std::optional<Failure>>;

/// What one rank makes its exchange and plan with.
struct Wishes {
  Placement placement;
  RowShape shape;
  ExchangeOptions options;
  RoutingData routing;
};

struct Disagreement {
  std::string name;
  std::function<void(Wishes&)> change;
  std::string value_of_rank_0;
  std::string value_of_other;
};

std::vector<Disagreement> disagreements(const Wishes& wishes) {
  const int num_experts = wishes.placement.num_experts();
  return {
      {"hidden", [](Wishes& w) { w.shape.hidden = 20; }, "19", "20"},
      {"dtype", [](Wishes& w) { w.shape.dtype = DType::f16; }, "bf16", "f16"},
      {"strategy",
       [](Wishes& w) {
         w.options.strategy =
             w.options.strategy == Strategy::flat ? Strategy::node_dedup : Strategy::flat;
       },
       std::string(to_string(wishes.options.strategy)),
       wishes.options.strategy == Strategy::flat ? "node_dedup" : "flat"},
      {"wire_dispatch", [](Wishes& w) { w.options.wire_dispatch = WireFormat::f32; }, "bf16",
       "f32"},
      {"wire_combine", [](Wishes& w) { w.options.wire_combine = WireFormat::int8; }, "bf16",
       "int8"},
      {"wire_combine_backward",
       [](Wishes& w) { w.options.wire_combine_backward = WireFormat::fp8_e4m3fn; }, "bf16",
       "fp8_e4m3fn"},
      {"wire_dispatch_backward",
       [](Wishes& w) { w.options.wire_dispatch_backward = WireFormat::f16; }, "bf16", "f16"},
      {"wire_block_columns", [](Wishes& w) { w.options.wire_block_columns = 64; }, "128", "64"},
      {"fragment_bytes", [](Wishes& w) { w.options.fragment_bytes = 500; }, "400", "500"},
      {"range_tokens", [](Wishes& w) { w.options.range_tokens = 9; }, "4", "9"},
      {"ranges_in_flight", [](Wishes& w) { w.options.ranges_in_flight = 7; }, "3", "7"},
      {"checksum_payload", [](Wishes& w) { w.options.checksum_payload = false; }, "true", "false"},
      {"num_topk",
       [](Wishes& w) {
         w.routing.num_topk = 1;
         w.routing.num_tokens *= 2;
       },
       "2", "1"},
      {"num_experts",
       [num_experts](Wishes& w) {
         std::vector<int> ranks;
         for (int e = 0; e < num_experts; ++e) ranks.push_back(w.placement.rank_of(e));
         ranks.push_back(0);
         w.placement = Placement::from_map(ranks);
       },
       fmt::format("{}", num_experts), fmt::format("{}", num_experts + 1)},
      {"placement",
       [num_experts](Wishes& w) {
         std::vector<int> ranks;
         for (int e = 0; e < num_experts; ++e) {
           ranks.push_back(w.placement.rank_of(num_experts - 1 - e));
         }
         w.placement = Placement::from_map(ranks);
       },
       "0x", "0x"},
  };
}

class Mismatches : public Conformance {
 protected:
  Layer layer() const {
    const RoutingSpec spec{.num_experts = 2 * num_ranks(), .num_topk = 2};
    return {group(spec.num_experts), make_all_routing(spec, ragged(6), 3)};
  }
  Wishes wishes(const Layer& layer, int rank) const {
    Layer copy = layer;
    return {layer.group().placement,
            {layer.group().hidden, layer.group().dtype},
            options_of(layer.group()),
            copy.data(rank)};
  }
};

TEST_P(Mismatches, OfAnOptionNameBothValues) {
  const Layer good = layer();
  const int other = num_ranks() - 1;
  for (const Disagreement& disagreement : disagreements(wishes(good, 0))) {
    SCOPED_TRACE(disagreement.name);
    Failures failures(static_cast<std::size_t>(num_ranks()));
    run([&](RankContext& context) -> Task {
      Wishes mine = wishes(good, context.rank());
      if (context.rank() == other) disagreement.change(mine);
      Exchange exchange(context.transport(), mine.placement, mine.shape, mine.options);
      failures[static_cast<std::size_t>(context.rank())] =
          co_await failure_of([&] { return exchange.start_plan(mine.routing.view()); });
      // Another exchange, made alike, works on the same transport.
      Exchange agreed = make_exchange(context, good.group());
      co_await run_layer(context, agreed, good, {.check_bytes = false});
    });
    support::gather_by_rank(failures);
    for (std::size_t rank = 0; rank < failures.size(); ++rank) {
      ASSERT_TRUE(failures[rank].has_value()) << "rank " << rank << " saw no difference";
      const std::string& text = failures[rank]->text;
      EXPECT_EQ(failures[rank]->code, ErrorCode::mismatch) << text;
      EXPECT_EQ(text, failures.front()->text) << "rank " << rank;
      EXPECT_NE(text.find(disagreement.name), std::string::npos) << text;
      EXPECT_NE(text.find(disagreement.value_of_rank_0), std::string::npos) << text;
      EXPECT_NE(text.find(disagreement.value_of_other), std::string::npos) << text;
      EXPECT_NE(text.find(fmt::format("rank {}", other)), std::string::npos) << text;
    }
  }
}

/// One call of a rank, on one of two plans.
enum class Call : std::uint8_t { plan, dispatch_a, dispatch_b, combine_a };

std::string word_of(Call call) {
  switch (call) {
    case Call::plan: return "plan";
    case Call::dispatch_a: return "dispatch";
    case Call::dispatch_b: return "dispatch";
    case Call::combine_a: return "combine";
  }
  return "";
}

struct Order {
  Call others;
  Call last_rank;
};

TEST_P(Mismatches, OfTheOrderOfCallsNameBothCalls) {
  const Layer good = layer();
  const int other = num_ranks() - 1;
  for (const Order& order : {Order{Call::plan, Call::dispatch_a},
                             Order{Call::dispatch_a, Call::combine_a},
                             Order{Call::combine_a, Call::plan},
                             Order{Call::dispatch_a, Call::dispatch_b}}) {
    SCOPED_TRACE(word_of(order.others) + " against " + word_of(order.last_rank));
    Failures failures(static_cast<std::size_t>(num_ranks()));
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, good.group());
      RankLayer memory(context, good, 7);
      const Plan a = co_await exchange.start_plan(memory.routing());
      const Plan b = co_await exchange.start_plan(memory.routing());
      GuardedMatrix y(a.num_rows(), good.group().hidden, good.group().dtype);
      std::optional<Failure>& failure = failures[static_cast<std::size_t>(context.rank())];
      switch (context.rank() == other ? order.last_rank : order.others) {
        case Call::plan:
          failure = co_await failure_of([&] { return exchange.start_plan(memory.routing()); });
          break;
        case Call::dispatch_a:
          failure = co_await failure_of([&] { return exchange.start_dispatch(a, memory.x()); });
          break;
        case Call::dispatch_b:
          failure = co_await failure_of([&] { return exchange.start_dispatch(b, memory.x()); });
          break;
        case Call::combine_a:
          failure = co_await failure_of(
              [&] { return exchange.start_combine(a, y.matrix(), memory.out()); });
          break;
      }
      Exchange agreed = make_exchange(context, good.group());
      co_await run_layer(context, agreed, good, {.check_bytes = false});
    });
    support::gather_by_rank(failures);
    for (std::size_t rank = 0; rank < failures.size(); ++rank) {
      ASSERT_TRUE(failures[rank].has_value()) << "rank " << rank << " noticed nothing";
      const std::string& text = failures[rank]->text;
      EXPECT_EQ(failures[rank]->code, ErrorCode::mismatch) << text;
      EXPECT_NE(text.find(word_of(order.others)), std::string::npos) << text;
      EXPECT_NE(text.find(word_of(order.last_rank)), std::string::npos) << text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Matrix, Mismatches,
                         ::testing::ValuesIn(few_points({"1x8", "2x4", "8x1", "3+5"})), name_of);

}  // namespace
}  // namespace ferry::conformance
