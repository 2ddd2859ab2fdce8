// Cases about gradients: both backward operations of every strategy, layout and weight mode against
// their oracle, bit for bit; replayed, with several plans in flight, and as the transpose of the
// forward pass; what is refused, and ranks that disagree.

#include <cstring>

#include <fmt/format.h>

#include "conformance/scenario.hpp"
#include "support/rows.hpp"
#include "support/verify_backward.hpp"

namespace ferry::conformance {
namespace {

using support::Failure;
using support::failure_of;
using support::require;
using support::WeightKind;

class Backwards : public Conformance {
 protected:
  Mode mode() const {
    Mode mode = GetParam().mode;
    if (mode.layout == Layout::expert_major) mode.row_alignment = 4;
    mode.extra_bytes = 12;
    return mode;
  }
  Layer layer(const RoutingSpec& spec, std::uint64_t seed) const {
    return {with_mode(group(spec.num_experts), mode()), make_all_routing(spec, ragged(6), seed)};
  }
  Layer odd_layer(std::uint64_t seed) const {
    return layer({.num_experts = 3 * num_ranks() + 1,
                  .num_topk = 5,
                  .none_share = 0.2,
                  .repeat_share = 0.4,
                  .weights = WeightKind::odd},
                 seed);
  }
};

TEST_P(Backwards, GapsRepeatsAndOddWeights) {
  for (const Backward backward : {Backward::weights, Backward::rows}) {
    for (const OutputPlace place : {OutputPlace::window, OutputPlace::plain}) {
      run(odd_layer(3), {.y = place, .backward = backward, .uses = 3});
    }
  }
}

TEST_P(Backwards, NoTokensOnSomeRanksOrNoExpertsAtAll) {
  RoutingSpec spec{.num_experts = 2 * num_ranks() + 1, .num_topk = 3, .none_share = 0.1};
  std::vector<std::int64_t> tokens = ragged(5);
  tokens.front() = 0;
  tokens[tokens.size() / 2] = 0;
  run({with_mode(group(spec.num_experts), mode()), make_all_routing(spec, tokens, 13)},
      {.y = OutputPlace::dispatched_rows, .backward = Backward::weights, .uses = 2});
  spec.none_share = 1;
  run(layer(spec, 20), {.backward = Backward::weights, .uses = 2});
}

TEST_P(Backwards, EveryTokenToOneExpert) {
  const RoutingSpec spec{.num_experts = num_ranks() + 1, .num_topk = 3, .all_to_first = true};
  run(layer(spec, 19), {.backward = Backward::weights, .uses = 2});
}

TEST_P(Backwards, ManyExpertsOfARankPerToken) {
  const RoutingSpec spec{.num_experts = 2 * num_ranks(), .num_topk = 2 * num_ranks()};
  run(layer(spec, 11), {.backward = Backward::weights});
}

TEST_P(Backwards, WithAndWithoutWeightsInTurnOnOnePlan) {
  const Layer shared = odd_layer(5);
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    RankLayer memory(context, shared, 5);
    const Plan plan = co_await exchange.start_plan(memory.routing());
    for (const Backward backward :
         {Backward::rows, Backward::weights, Backward::weights, Backward::rows}) {
      co_await use_plan(context, exchange, plan, memory, {.backward = backward});
    }
    require(exchange.metadata_rounds() == 1, "more than one round of metadata");
  });
}

/// One batch whose backward passes are in flight with those of others.
struct Batch {
  Batch(const RankContext& context, const Layer& layer, std::uint64_t seed)
      : memory(context, layer, seed),
        reference(memory.backward()),
        grad_out(memory.routing().num_tokens, layer.group().hidden, layer.group().dtype),
        grad_x(memory.routing().num_tokens, layer.group().hidden, layer.group().dtype) {
    support::fill_grad_out(reference, context.rank(), grad_out.matrix());
  }
  RankLayer memory;
  support::BackwardReference reference;
  GuardedMatrix grad_out;
  GuardedMatrix grad_x;
  std::optional<Plan> plan;
  std::optional<ExpertRows> rows;
  std::optional<Pending<GradRows>> grads;
  std::optional<GradRows> grad_y;
  std::optional<Pending<void>> going_home;
};

TEST_P(Backwards, OfSeveralPlansAtOnceEndInAnyOrder) {
  // As autograd does it with layers: forward a, b, c, then backward c, b, a; here all are started
  // before the first is waited for.
  const std::vector<Layer> shared{odd_layer(31), odd_layer(32), odd_layer(33)};
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared[0].group());
    std::vector<Batch> batches;
    for (const Layer& one : shared) {
      Batch& batch = batches.emplace_back(context, one, 7);
      batch.plan.emplace(co_await exchange.start_plan(batch.memory.routing()));
      batch.rows.emplace(
          co_await exchange.start_dispatch(*batch.plan, batch.memory.x(), batch.memory.extra()));
    }
    const std::size_t first = static_cast<std::size_t>(context.rank()) % 3;
    for (const std::size_t at : {2U, 1U, 0U}) {
      Batch& batch = batches[at];
      batch.grads.emplace(
          exchange.start_combine_backward(*batch.plan, {.grad_out = batch.grad_out.matrix()}));
    }
    for (std::size_t i = 0; i < 3; ++i) {
      Batch& batch = batches[(first + i) % 3];
      batch.grad_y.emplace(co_await *batch.grads);
      require(support::check_grad_y(batch.reference, context.rank(), batch.grad_y->matrix()));
    }
    for (const std::size_t at : {1U, 0U, 2U}) {
      Batch& batch = batches[at];
      support::fill_grad_rows(batch.reference, context.rank(), batch.grad_y->matrix());
      batch.going_home.emplace(exchange.start_dispatch_backward(
          *batch.plan, {.grad_rows = batch.grad_y->matrix()}, {.grad_x = batch.grad_x.matrix()}));
    }
    for (std::size_t i = 0; i < 3; ++i) {
      Batch& batch = batches[(first + 2 * i) % 3];
      co_await *batch.going_home;
      require(support::check_grad_x(batch.reference, context.rank(), batch.grad_x.matrix()));
    }
  });
}

// Numbers stand behind the rows that are shown, so two calls on one window must not share them, and
// in a window of a larger plan there are rows of the caller.
TEST_P(Backwards, GradientsOfRowWeightsDisturbNobody) {
  if (GetParam().mode.weights != WeightMode::at_expert) return;
  const Layer small = odd_layer(51);
  const RoutingSpec more{.num_experts = 3 * num_ranks() + 1, .num_topk = 5};
  const Layer large{small.group(), make_all_routing(more, ragged(20), 52)};
  run([&](RankContext& context) -> Task {
    const Group& shape = small.group();
    Exchange exchange = make_exchange(context, shape);
    RankLayer memory(context, small, 7);
    const support::BackwardReference reference = memory.backward();
    const Routing routing = memory.routing();
    const Plan plan = co_await exchange.start_plan(routing);
    const Plan other = co_await exchange.start_plan(large.routing(context.rank()));
    OutputRows roomy = exchange.output(other);
    support::fill_rows(99, context.rank(), roomy.matrix());
    GuardedMatrix before(other.num_rows(), shape.hidden, shape.dtype);
    support::fill_rows(99, context.rank(), before.matrix());
    Matrix rows = roomy.matrix();
    rows.rows = plan.num_rows();
    support::fill_grad_rows(reference, context.rank(), rows);

    const std::vector<float> first = support::grad_row_weights(reference, context.rank(), plan);
    std::vector<float> second = first;
    for (float& value : second) value = -value;
    const auto size = static_cast<std::size_t>(routing.num_tokens * routing.num_topk);
    std::vector<float> of_first(size);
    std::vector<float> of_second(size);
    GuardedMatrix grad_x(routing.num_tokens, shape.hidden, shape.dtype);
    GuardedMatrix again(routing.num_tokens, shape.hidden, shape.dtype);
    auto one =
        exchange.start_dispatch_backward(plan, {.grad_rows = rows, .grad_row_weights = first},
                                         {.grad_x = grad_x.matrix(), .grad_weights = of_first});
    auto two =
        exchange.start_dispatch_backward(plan, {.grad_rows = rows, .grad_row_weights = second},
                                         {.grad_x = again.matrix(), .grad_weights = of_second});
    co_await two;
    co_await one;
    require(support::check_grad_weights(reference, context.rank(), of_first));
    for (float& value : of_second) value = value == 0 ? value : -value;
    require(support::check_grad_weights(reference, context.rank(), of_second));
    require(support::check_grad_x(reference, context.rank(), again.matrix()));
    const auto bytes = static_cast<std::size_t>(shape.hidden) * element_bytes(shape.dtype);
    for (std::int64_t row = plan.num_rows(); row < other.num_rows(); ++row) {
      require(std::memcmp(roomy.matrix().row(row), before.matrix().row(row), bytes) == 0,
              fmt::format("row {} behind those that were given has changed", row));
    }
  });
}

std::vector<double> as_numbers(ConstMatrix matrix) {
  std::vector<double> numbers;
  for (std::int64_t row = 0; row < matrix.rows; ++row) {
    for (std::int64_t column = 0; column < matrix.columns; ++column) {
      float value = 0;
      std::memcpy(&value, matrix.row(row) + column * std::int64_t{4}, 4);
      numbers.push_back(value);
    }
  }
  return numbers;
}

double product(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Numbers need f32.
class Transposes : public Backwards {};

// With y = f(expert) x the layer is linear in x and in w, so <g, out> = <grad_x, x> over all ranks,
// and the same with the weights and their gradients: no oracle, only numbers.
TEST_P(Transposes, OfTheForwardPass) {
  const RoutingSpec spec{.num_experts = 2 * num_ranks() + 1, .num_topk = 4, .none_share = 0.1};
  const Layer shared = layer(spec, 41);
  const WeightMode weights = shared.group().weights;
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    RankLayer memory(context, shared, 42);
    const Routing routing = memory.routing();
    const Plan plan = co_await exchange.start_plan(routing);
    ExpertRows rows = co_await exchange.start_dispatch(plan, memory.x(), memory.extra());
    OutputRows y = exchange.output(plan);
    memory.run_experts(plan, rows.matrix(), y.matrix());
    co_await exchange.start_combine(plan, y.matrix(), memory.out());

    GuardedMatrix grad_out(routing.num_tokens, shared.group().hidden, DType::f32);
    support::fill_grad_out(memory.backward(), context.rank(), grad_out.matrix());
    std::vector<float> grad_weights(
        static_cast<std::size_t>(routing.num_tokens * routing.num_topk));
    std::optional<std::span<float>> wanted;
    if (weights == WeightMode::at_combine) wanted = grad_weights;
    GradRows grad_y = co_await exchange.start_combine_backward(
        plan, {.grad_out = grad_out.matrix(), .y = y.matrix()}, wanted);
    // The transpose of what the experts did is the same factor.
    OutputRows grad_rows = exchange.output(plan);
    memory.run_experts(plan, grad_y.matrix(), grad_rows.matrix());
    GuardedMatrix grad_x(routing.num_tokens, shared.group().hidden, DType::f32);
    co_await exchange.start_dispatch_backward(plan, {.grad_rows = grad_rows.matrix()},
                                              {.grad_x = grad_x.matrix()});

    std::vector<double> sums(3);
    sums[0] = product(as_numbers(grad_out.matrix()), as_numbers(memory.out()));
    sums[1] = product(as_numbers(grad_x.matrix()), as_numbers(memory.x()));
    for (std::int64_t t = 0; t < routing.num_tokens; ++t) {
      for (int slot = 0; slot < routing.num_topk; ++slot) {
        const double gradient = grad_weights[static_cast<std::size_t>(t * routing.num_topk + slot)];
        sums[2] += gradient * routing.weight(t, slot);
      }
    }
    const auto all = co_await start_all_gather(context.transport(), std::as_bytes(std::span(sums)));
    std::vector<double> total(3);
    double size = 0;
    for (const std::vector<std::byte>& bytes : all) {
      for (std::size_t i = 0; i < 3; ++i) {
        double value = 0;
        std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
        total[i] += value;
        size += std::abs(value);
      }
    }
    require(std::abs(total[0] - total[1]) <= 1e-5 * size,
            fmt::format("<g, out> = {}, <grad_x, x> = {}", total[0], total[1]));
    if (!wanted) co_return;
    require(std::abs(total[0] - total[2]) <= 1e-5 * size,
            fmt::format("<g, out> = {}, <grad_w, w> = {}", total[0], total[2]));
  });
}

INSTANTIATE_TEST_SUITE_P(Points, Backwards, ::testing::ValuesIn(mode_points({"1x2", "2x2", "3+5"})),
                         name_of);

std::vector<Point> f32_points() {
  std::vector<Point> points = mode_points({"1x2", "2x2", "3+5"});
  std::erase_if(points, [](const Point& point) { return point.dtype != DType::f32; });
  return points;
}
INSTANTIATE_TEST_SUITE_P(Points, Transposes, ::testing::ValuesIn(f32_points()), name_of);

/// What one rank gives; the call must end with these words on every rank.
struct BadCall {
  std::string name;
  std::function<Pending<void>(Exchange&, const Plan&, Batch&)> start;
  std::vector<std::string> words;
  bool other_kind = false;  ///< a call of another kind than that of the others: seen first by some
};

class BackwardRefusals : public Conformance {};

std::vector<BadCall> bad_calls() {
  static std::vector<float> short_weights(3);
  const auto short_matrix = [](Matrix matrix) {
    ++matrix.rows;
    return matrix;
  };
  return {
      {"grad_x of another shape",
       [=](Exchange& exchange, const Plan& plan, Batch& batch) {
         return exchange.start_dispatch_backward(plan, {.grad_rows = batch.rows->matrix()},
                                                 {.grad_x = short_matrix(batch.grad_x.matrix())});
       },
       {"dispatch_backward", "grad_x", "shape"}},
      {"grad_row_weights without weights at the expert",
       [](Exchange& exchange, const Plan& plan, Batch& batch) {
         return exchange.start_dispatch_backward(
             plan, {.grad_rows = batch.rows->matrix(), .grad_row_weights = short_weights},
             {.grad_x = batch.grad_x.matrix(), .grad_weights = short_weights});
       },
       {"dispatch_backward", "at_combine", "at_expert"},
       true},
  };
}

TEST_P(BackwardRefusals, OfOneRankReachAll) {
  const RoutingSpec spec{.num_experts = 2 * num_ranks(), .num_topk = 2};
  const Layer shared{group(spec.num_experts), make_all_routing(spec, ragged(6), 3)};
  for (const BadCall& bad : bad_calls()) {
    SCOPED_TRACE(bad.name);
    run([&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      Batch batch(context, shared, 3);
      const Plan plan = co_await exchange.start_plan(batch.memory.routing());
      batch.rows.emplace(co_await exchange.start_dispatch(plan, batch.memory.x()));
      co_await support::meet();  // a refusal would end a dispatch that still runs
      // One rank's call is bad; the others learn it at this call or, where they need nothing from
      // it, at the next.
      const bool culprit = context.rank() == context.num_ranks() - 1;
      std::optional<Failure> failure = co_await failure_of([&] {
        return culprit ? bad.start(exchange, plan, batch)
                       : exchange.start_dispatch_backward(plan, {.grad_rows = batch.rows->matrix()},
                                                          {.grad_x = batch.grad_x.matrix()});
      });
      co_await support::meet();
      co_await support::pause(2000);  // the word gets round
      if (!failure) {
        failure = co_await failure_of(
            [&] { return exchange.start_combine(plan, batch.rows->matrix(), batch.memory.out()); });
      }
      require(failure.has_value(), "no rank was told of a bad call");
      // A kind of its own is a difference between calls, too, for whoever sees that first.
      for (const std::string& word : bad.words) {
        require((bad.other_kind && failure->code == ErrorCode::mismatch) ||
                    failure->text.find(word) != std::string::npos,
                fmt::format("no '{}' in: {}", word, failure->text));
      }
      co_await run_layer(context, exchange, shared,
                         {.backward = Backward::weights, .check_bytes = false});
    });
  }
}

TEST_P(BackwardRefusals, RanksThatWantWeightsAndRanksThatDoNotAreNamed) {
  const RoutingSpec spec{.num_experts = 2 * num_ranks(), .num_topk = 2};
  const Layer shared{group(spec.num_experts), make_all_routing(spec, ragged(6), 3)};
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, shared.group());
    Batch batch(context, shared, 3);
    const Plan plan = co_await exchange.start_plan(batch.memory.routing());
    batch.rows.emplace(co_await exchange.start_dispatch(plan, batch.memory.x()));
    co_await support::meet();
    const Routing routing = batch.memory.routing();
    std::vector<float> gradients(static_cast<std::size_t>(routing.num_tokens * routing.num_topk));
    std::optional<std::span<float>> wanted;
    if (context.rank() == 0) wanted = gradients;
    std::optional<Failure> failure = co_await failure_of([&] {
      return exchange.start_combine_backward(
          plan, {.grad_out = batch.grad_out.matrix(), .y = batch.rows->matrix()}, wanted);
    });
    co_await support::meet();
    co_await support::pause(2000);
    if (!failure) {
      failure = co_await failure_of(
          [&] { return exchange.start_combine(plan, batch.rows->matrix(), batch.memory.out()); });
    }
    require(failure && failure->code == ErrorCode::mismatch,
            failure ? failure->text : "no rank was told");
    require(failure->text.find("combine_backward with grad_weights") != std::string::npos,
            failure->text);
    co_await run_layer(context, exchange, shared,
                       {.backward = Backward::weights, .check_bytes = false});
  });
}

/// Where one rank gives up, at some step of a backward pass with gradients of weights.
class BackwardCancels : public Backwards {};

/// A layer forward and backward that may fail anywhere; then the rest of it is left out.
Task run_layer_that_may_fail(RankContext& context, Exchange& exchange, const Layer& layer) {
  try {
    co_await run_layer(context, exchange, layer,
                       {.backward = Backward::weights, .check_bytes = false});
  } catch (const Error& error) {
    require(std::string(error.what()).find("tired") != std::string::npos, error.what());
  }
}

TEST_P(BackwardCancels, EndOnEveryRankAndHoldNothing) {
  const Layer shared = odd_layer(61);
  ProgramOptions options = program();
  for (std::uint64_t step = 60; step < 2400; step += 130) {
    const int culprit = static_cast<int>(step / 130) % num_ranks();
    options.injection = support::Injection{step, culprit, "tired"};
    options.seed = step;
    SCOPED_TRACE(fmt::format("rank {} gives up at step {}", culprit, step));
    const ProgramResult result = support::run_program(options, [&](RankContext& context) -> Task {
      Exchange exchange = make_exchange(context, shared.group());
      co_await run_layer_that_may_fail(context, exchange, shared);
      context.end_injection();
      co_await support::meet();
      co_await support::pause(2000);
      co_await run_layer(context, exchange, shared,
                         {.backward = Backward::weights, .check_bytes = false});
    });
    ASSERT_TRUE(result.ok()) << result.describe();
  }
}

std::vector<Point> cancel_points() {
  std::vector<Point> points = mode_points({"2x2", "3+5"});
  std::erase_if(points, [](const Point& point) {
    return point.transport != TransportKind::stepped || point.dtype != DType::bf16 ||
           point.mode.weights == WeightMode::none;
  });
  return points;
}
INSTANTIATE_TEST_SUITE_P(Points, BackwardCancels, ::testing::ValuesIn(cancel_points()), name_of);

INSTANTIATE_TEST_SUITE_P(Points, BackwardRefusals,
                         ::testing::ValuesIn(few_points({"1x2", "2x2", "3+5"})), name_of);

}  // namespace
}  // namespace ferry::conformance
