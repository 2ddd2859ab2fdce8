// Cases about numbers of tokens: none on a rank, none for a rank, one in all, ragged, and ranges
// and fragments that do not divide them. Every case runs at every point of the matrix.

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

class Tokens : public Conformance {
 protected:
  /// Uniform top-3 routing over two experts per rank and one more.
  Layer layer(const std::vector<std::int64_t>& tokens, std::uint64_t seed = 3) const {
    const RoutingSpec spec{.num_experts = 2 * num_ranks() + 1, .num_topk = 3};
    return {group(spec.num_experts), make_all_routing(spec, tokens, seed)};
  }
  std::vector<std::int64_t> all_have(std::int64_t tokens) const {
    return std::vector<std::int64_t>(static_cast<std::size_t>(num_ranks()), tokens);
  }
};

TEST_P(Tokens, OneRankHasNone) {
  for (int idle = 0; idle < num_ranks(); ++idle) {
    std::vector<std::int64_t> tokens = ragged(9);
    tokens[static_cast<std::size_t>(idle)] = 0;
    SCOPED_TRACE("rank " + std::to_string(idle) + " has no tokens");
    run(layer(tokens));
  }
}

TEST_P(Tokens, NobodyHasAny) { run(layer(all_have(0))); }

TEST_P(Tokens, OneRankReceivesNone) {
  // Only the first rank holds experts: all others get an empty [0, hidden].
  const RoutingSpec spec{.num_experts = 4, .num_topk = 2};
  Layer layer(group(4), make_all_routing(spec, ragged(8), 5));
  Group everything_on_one = layer.group();
  everything_on_one.placement = Placement::from_map({0, 0, 0, 0});
  run(Layer(everything_on_one, make_all_routing(spec, ragged(8), 5)));
}

TEST_P(Tokens, OneTokenInTheWholeGroup) {
  std::vector<std::int64_t> tokens = all_have(0);
  tokens.front() = 1;
  run(layer(tokens));
}

TEST_P(Tokens, EmptyRankHundredTimes) {
  for (const support::WeightKind weights :
       {support::WeightKind::softmax, support::WeightKind::none}) {
    std::vector<std::int64_t> tokens = all_have(2);
    tokens.back() = 0;
    const RoutingSpec spec{
        .num_experts = num_ranks() + 1, .num_topk = 2, .weights = weights};
    const Layer layer(group(spec.num_experts, 3), make_all_routing(spec, tokens, 7));
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, layer.group());
      for (std::uint64_t repeat = 0; repeat < 100; ++repeat) {
        co_await run_layer(context, exchange, layer, {.seed = repeat});
      }
    });
  }
}

TEST_P(Tokens, RaggedCounts) {
  std::vector<std::int64_t> tokens;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    constexpr std::int64_t kCounts[] = {7, 96, 0, 53, 1, 31, 64, 2};
    tokens.push_back(kCounts[rank % std::ssize(kCounts)]);
  }
  run(layer(tokens));
}

TEST_P(Tokens, FragmentsAndRangesOfAnySize) {
  // A range larger than any count, one token a range, ranks with different numbers of ranges; a
  // fragment of one row, and one that holds everything.
  std::vector<std::int64_t> tokens = ragged(6);
  tokens.front() = 21;
  const Layer shared = layer(tokens);
  for (const std::int64_t range_tokens : {0, 1, 5, 1000}) {
    for (const std::int64_t fragment_bytes : {200, 512, 65536}) {
      SCOPED_TRACE("range_tokens " + std::to_string(range_tokens) + ", fragment_bytes " +
                   std::to_string(fragment_bytes));
      run([&](RankContext& context) -> Task {
        ExchangeOptions options = options_of(shared.group());
        options.range_tokens = range_tokens;
        options.fragment_bytes = fragment_bytes;
        Exchange exchange(context.transport(), shared.group().placement,
                          {shared.group().hidden, shared.group().dtype}, options);
        co_await run_layer(context, exchange, shared, {});
      });
    }
  }
}

TEST_P(Tokens, FreshCountsEveryStep) {
  // Windows, staging and credit of one step are used again by the next, larger or smaller one.
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, group(2 * num_ranks() + 1));
    for (const std::int64_t base : {3, 40, 2, 25, 9}) {
      const Layer step = layer(ragged(base), static_cast<std::uint64_t>(base));
      co_await run_layer(context, exchange, step, {.seed = 11});
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Matrix, Tokens, ::testing::ValuesIn(all_points()), name_of);

}  // namespace
}  // namespace ferry::conformance
