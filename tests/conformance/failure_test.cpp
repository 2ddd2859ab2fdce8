// Cases about ranks that fail: one throws, one never comes, a message is damaged. The others end
// with an error that names the cause, and nothing hangs.

#include <fmt/format.h>

#include "conformance/scenario.hpp"

namespace ferry::conformance {
namespace {

using support::Failure;
using support::failure_of;

/// Where in a layer something happens.
enum class Place : std::uint8_t { plan, dispatch, combine };
constexpr Place kPlaces[] = {Place::plan, Place::dispatch, Place::combine};

std::string name_of_place(Place place) {
  switch (place) {
    case Place::plan: return "plan";
    case Place::dispatch: return "dispatch";
    case Place::combine: return "combine";
  }
  return "";
}

class Failing : public Conformance {
 protected:
  Layer layer() const {
    // Enough tokens with many experts: every rank needs every other one.
    const RoutingSpec spec{.num_experts = 2 * num_ranks(), .num_topk = 4};
    return {group(spec.num_experts), make_all_routing(spec, ragged(12), 3)};
  }
  Layer quantised_layer() const {
    const Layer plain = layer();
    Group group = plain.group();
    group.wire_dispatch = WireFormat::fp8_e4m3fn;
    group.wire_combine = WireFormat::int8;
    return {group, plain.all_routing()};
  }
};

/// plan, dispatch, combine; `before` is called before each.
Task run_with(RankContext& context, const Layer& layer,
              const std::function<void(Place)>& before) {
  Exchange exchange = make_exchange(context, layer.group());
  RankLayer memory(context, layer, 5);
  before(Place::plan);
  const Plan plan = co_await exchange.start_plan(memory.routing());
  before(Place::dispatch);
  const ExpertRows rows = co_await exchange.start_dispatch(plan, memory.x());
  before(Place::combine);
  co_await exchange.start_combine(plan, rows.matrix(), memory.out());
}

TEST_P(Failing, ARankThatThrowsFreesTheOthers) {
  const Layer plain = layer();
  const Layer quantised = quantised_layer();
  const int culprit = num_ranks() / 2;
  struct Case {
    const Layer& layer;
    Place place;
  };
  for (const Case& one : {Case{plain, Place::plan}, Case{plain, Place::dispatch},
                          Case{plain, Place::combine}, Case{quantised, Place::dispatch},
                          Case{quantised, Place::combine}}) {
    SCOPED_TRACE(fmt::format("{}, {} back", name_of_place(one.place),
                             to_string(one.layer.group().wire_combine)));
    const ProgramResult result =
        support::run_program(program(), [&](RankContext& context) -> Task {
          co_await run_with(context, one.layer, [&](Place now) {
            if (now == one.place && context.rank() == culprit) {
              throw std::runtime_error("the model went wrong");
            }
          });
        });
    EXPECT_TRUE(result.hang.empty()) << result.hang;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      const auto& failure = result.failures[static_cast<std::size_t>(rank)];
      ASSERT_TRUE(failure.has_value()) << "rank " << rank << " ended well";
      EXPECT_NE(failure->text.find("the model went wrong"), std::string::npos) << failure->text;
      if (rank == culprit) continue;
      EXPECT_EQ(failure->code, ErrorCode::peer_failed) << failure->text;
      EXPECT_NE(failure->text.find(fmt::format("rank {}", culprit)), std::string::npos)
          << failure->text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Matrix, Failing,
                         ::testing::ValuesIn(few_points({"1x8", "2x4", "8x1", "3+5"})), name_of);

std::vector<Point> only(TransportKind transport, const std::vector<std::string>& topologies) {
  std::vector<Point> points = few_points(topologies);
  std::erase_if(points, [&](const Point& point) { return point.transport != transport; });
  return points;
}

class Missing : public Failing {};

TEST_P(Missing, RankIsNamedWhenTheDeadlinePasses) {
  const Layer shared = layer();
  for (const Place place : kPlaces) {
    const int missing = num_ranks() - 1;
    SCOPED_TRACE(fmt::format("rank {} never comes to {}", missing, name_of_place(place)));
    std::vector<std::optional<Failure>> failures(static_cast<std::size_t>(num_ranks()));
    ProgramOptions options = program();
    options.deadline_s = 0.3;
    const ProgramResult result = support::run_program(options, [&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      RankLayer memory(context, shared, 5);
      const bool stays_away = context.rank() == missing;
      std::optional<Failure>& failure = failures[static_cast<std::size_t>(context.rank())];
      // A refusal of a later call than the one that is missing would be another fault.
      if (place == Place::plan) {
        if (!stays_away) {
          failure = co_await failure_of([&] { return exchange.start_plan(memory.routing()); });
        }
        co_await support::meet();
        co_return;
      }
      const Plan plan = co_await exchange.start_plan(memory.routing());
      if (place == Place::dispatch) {
        if (!stays_away) {
          failure = co_await failure_of([&] { return exchange.start_dispatch(plan, memory.x()); });
        }
        co_await support::meet();
        co_return;
      }
      const ExpertRows rows = co_await exchange.start_dispatch(plan, memory.x());
      if (!stays_away) {
        failure = co_await failure_of(
            [&] { return exchange.start_combine(plan, rows.matrix(), memory.out()); });
      }
      co_await support::meet();
    });
    EXPECT_TRUE(result.ok()) << result.describe();
    support::gather_by_rank(failures);
    for (int rank = 0; rank < num_ranks() - 1; ++rank) {
      const auto& failure = failures[static_cast<std::size_t>(rank)];
      ASSERT_TRUE(failure.has_value()) << "rank " << rank << " ended well";
      EXPECT_EQ(failure->code, ErrorCode::timeout) << failure->text;
      EXPECT_NE(failure->text.find(fmt::format("for rank {}", missing)), std::string::npos)
          << failure->text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Matrix, Missing,
    ::testing::ValuesIn(only(TransportKind::threads, {"1x8", "2x4", "8x1", "3+5"})), name_of);

class Damaged : public Failing {};

TEST_P(Damaged, MessageIsRefusedAndNeverUsed) {
  // A bit flips anywhere in a fragment: the call fails with one text where it is noticed and where
  // it is missed; whoever ends well has the right rows.
  const Layer plain = layer();
  const Layer quantised = quantised_layer();
  int refused = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    const Layer& shared = seed % 2 == 0 ? plain : quantised;
    ProgramOptions options = program();
    options.seed = seed;
    options.corrupt_first = {0, GetParam().topology.topology().rail_rank(0, 1)};
    const ProgramResult result = support::run_program(options, [&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      co_await run_layer(context, exchange, shared, {.check_bytes = false});
    });
    EXPECT_TRUE(result.hang.empty()) << "seed " << seed << "\n" << result.hang;
    for (const auto& failure : result.failures) {
      if (!failure) continue;
      ++refused;
      // The first rank to end its body with the error ends the job with that text.
      EXPECT_TRUE(failure->code == ErrorCode::corrupt_message ||
                  failure->code == ErrorCode::peer_failed)
          << "seed " << seed << ": " << failure->text;
      EXPECT_NE(failure->text.find("received a message from rank 0"), std::string::npos)
          << "seed " << seed << ": " << failure->text;
    }
  }
  EXPECT_GT(refused, 40);
}

INSTANTIATE_TEST_SUITE_P(Matrix, Damaged,
                         ::testing::ValuesIn(only(TransportKind::stepped, {"2x4", "8x1"})),
                         name_of);

}  // namespace
}  // namespace ferry::conformance
