// One case of the sweep: a seed draws everything, the case runs it and judges every rank.

#include "conformance/sweep_case.hpp"

#include <atomic>
#include <random>

#include <fmt/format.h>

#include "support/wire_numbers.hpp"

namespace ferry::conformance {
namespace {

using support::Failure;
using support::failure_of;
using support::require;

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed * 7919 + 17) {}
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool one_in(std::int64_t n) { return between(1, n) == 1; }
  template <typename T>
  T of(const std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(
        between(0, static_cast<std::int64_t>(choices.size()) - 1))];
  }

 private:
  std::mt19937_64 random_;
};

Topology draw_topology(Draw& draw) {
  if (draw.one_in(6)) {
    std::vector<int> node_of_rank{0};  // ranks of a node need not be neighbours
    const auto nodes = static_cast<int>(draw.between(1, 3));
    for (int node = 1; node < nodes; ++node) node_of_rank.push_back(node);
    for (std::int64_t more = draw.between(0, 4); more > 0; --more) {
      node_of_rank.push_back(static_cast<int>(draw.between(0, nodes - 1)));
    }
    return Topology::from_map(node_of_rank);
  }
  return draw.of(all_topologies()).topology();
}

Mode draw_mode(Draw& draw, Strategy strategy) {
  Mode mode = draw.of(modes_of(strategy));
  if (draw.one_in(3)) mode.extra_bytes = draw.of(std::vector<std::int64_t>{4, 12, 100});
  if (mode.layout == Layout::expert_major && draw.one_in(3)) {
    mode.row_alignment = draw.of(std::vector<std::int64_t>{2, 7, 16});
  }
  mode.row_sources = draw.one_in(4);
  return mode;
}

Group draw_group(Draw& draw) {
  Group group;
  group.topology = draw_topology(draw);
  const auto ranks = group.topology.num_ranks();
  std::vector<int> rank_of_expert;
  for (std::int64_t e = draw.between(1, 3 * ranks); e > 0; --e) {
    rank_of_expert.push_back(static_cast<int>(draw.between(0, ranks - 1)));
  }
  group.placement = Placement::from_map(rank_of_expert);
  // Most rows are short; the others have several blocks, and a last one of any size.
  group.hidden = draw.one_in(6) ? draw.between(65, 330) : draw.between(1, 40);
  const std::vector<DType> dtypes{DType::f32, DType::bf16, DType::f16};
  group.dtype = draw.of(dtypes);
  group.strategy = draw.of(std::vector<Strategy>{Strategy::flat, Strategy::rank_dedup,
                                                 Strategy::node_gather, Strategy::node_dedup});
  const std::vector<WireFormat> wires(std::begin(support::kWireFormats),
                                      std::end(support::kWireFormats));
  const WireFormat plain = wire_format_of(group.dtype);
  group.wire_dispatch = draw.one_in(3) ? draw.of(wires) : plain;
  group.wire_combine = draw.one_in(3) ? draw.of(wires) : plain;
  if (draw.one_in(3)) group.wire_combine_backward = draw.of(wires);
  if (draw.one_in(3)) group.wire_dispatch_backward = draw.of(wires);
  group.wire_block_columns = draw.of(std::vector<std::int64_t>{64, 128, 2048});
  return with_mode(group, draw_mode(draw, group.strategy));
}

Layer draw_layer(Draw& draw, const Group& group, int num_topk) {
  RoutingSpec spec{.num_experts = group.placement.num_experts(), .num_topk = num_topk};
  if (draw.one_in(3)) spec.none_share = 0.3;
  if (draw.one_in(3)) spec.repeat_share = 0.3;
  if (draw.one_in(4)) spec.zipf = 1.5;
  if (draw.one_in(3)) spec.weights = support::WeightKind::odd;
  if (draw.one_in(6)) spec.weights = support::WeightKind::none;
  spec.all_to_first = draw.one_in(8);
  const std::int64_t most = draw.of(std::vector<std::int64_t>{0, 3, 12, 30});
  std::vector<std::int64_t> tokens;
  for (int rank = 0; rank < group.topology.num_ranks(); ++rank) {
    tokens.push_back(draw.one_in(4) ? 0 : draw.between(0, most));
  }
  return {group, make_all_routing(spec, tokens, static_cast<std::uint64_t>(draw.between(1, 999)))};
}

// Calls of each layer in their order, layers mixed at random.
std::vector<SweepCall> draw_calls(Draw& draw, std::size_t layers) {
  std::vector<std::vector<SweepCall::Kind>> left;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    std::vector<SweepCall::Kind> kinds;
    for (std::int64_t use = draw.between(1, 2); use > 0; --use) {
      kinds.push_back(SweepCall::Kind::combine);
      kinds.push_back(SweepCall::Kind::dispatch);
    }
    kinds.push_back(SweepCall::Kind::plan);
    left.push_back(kinds);
  }
  std::vector<SweepCall> calls;
  for (;;) {
    std::vector<std::size_t> open;
    for (std::size_t layer = 0; layer < layers; ++layer) {
      if (!left[layer].empty()) open.push_back(layer);
    }
    if (open.empty()) return calls;
    const std::size_t layer = draw.of(open);
    calls.push_back({left[layer].back(), layer});
    left[layer].pop_back();
  }
}

/// A layer on one rank while its calls run.
struct Running {
  Running(const RankContext& context, const Layer& layer, std::uint64_t seed)
      : memory(context, layer, seed), next_seed(seed) {}
  RankLayer memory;
  std::uint64_t next_seed;
  bool skipped = false;  ///< its plan failed on some rank: no rank makes further calls on it
  std::optional<Pending<Plan>> planning;
  std::optional<Plan> plan;
  std::optional<Pending<ExpertRows>> dispatching;
  std::optional<ExpertRows> rows;
  std::optional<GuardedMatrix> plain;
  std::optional<Pending<void>> combining;
  bool rows_are_valid = false;
};

/// One rank of the program.
class SweepRank {
 public:
  /// `plan_failures` counts, per layer, ranks whose plan failed; shared by all ranks.
  SweepRank(RankContext& context, const SweepCase& sweep, std::vector<std::atomic<int>>& failures)
      : context_(context),
        sweep_(sweep),
        plan_failures_(failures),
        random_(sweep.seed * 31 + static_cast<std::uint64_t>(context.rank())),
        exchange_(context.transport(), sweep.layers.front().group().placement,
                  {sweep.layers.front().group().hidden, sweep.layers.front().group().dtype},
                  sweep.options) {
    for (const Layer& layer : sweep.layers) running_.emplace_back(context, layer, sweep.seed);
  }

  Task run(RankContext& context) {
    for (const SweepCall& call : sweep_.calls) {
      poison_free_slots(context.transport(), 0xFF);
      if (random_.one_in(4)) {
        co_await support::pause(static_cast<std::uint64_t>(random_.between(0, 200)));
      }
      Running& layer = running_[call.layer];
      switch (call.kind) {
        case SweepCall::Kind::plan:
          context.at(fmt::format("plan of layer {}", call.layer));
          layer.planning.emplace(exchange_.start_plan(layer.memory.routing()));
          if (random_.one_in(2) || sweep_.program.injection) {
            co_await end_plan(context, call.layer);
          }
          break;
        case SweepCall::Kind::dispatch: co_await dispatch(context, call.layer); break;
        case SweepCall::Kind::combine: co_await combine(context, call.layer); break;
      }
    }
    for (std::size_t i = 0; i < running_.size(); ++i) {
      const std::size_t layer = running_.size() - 1 - i;
      co_await end_plan(context, layer);
      co_await end_dispatch(context, layer);
      co_await end_combine(context, layer);
    }
    running_.clear();
    context.at("the last layer");
    context.end_injection();
    co_await run_layer(
        context, exchange_, *sweep_.last,
        {.backward = sweep_.backward, .seed = sweep_.seed + 1000, .check_bytes = false});
  }

 private:
  // A call may fail for no other reason than the one that was given for cancelling.
  void require_reason(const Failure& failure) const {
    const auto& injection = sweep_.program.injection;
    require(injection && failure.text.find(injection->reason) != std::string::npos,
            "a call failed by itself: " + failure.text);
  }

  template <typename Result, typename Keep>
  Task end(RankContext&, std::optional<Pending<Result>>& pending, Keep keep) {
    std::optional<Failure> failure;
    try {
      if constexpr (std::is_void_v<Result>) {
        co_await *pending;
        keep();
      } else {
        keep(co_await *pending);
      }
    } catch (const Error& error) {
      failure = Failure{error.code(), error.what()};
    }
    pending.reset();
    if (failure) require_reason(*failure);
  }

  Task end_plan(RankContext& context, std::size_t number) {
    Running& layer = running_[number];
    if (!layer.planning) co_return;
    context.at(fmt::format("end of plan of layer {}", number));
    if (!sweep_.program.injection) {
      co_await end(context, layer.planning, [&](Plan plan) { layer.plan.emplace(plan); });
      layer.memory.check_plan(*layer.plan);
      co_return;
    }
    // A plan that was cancelled late may have ended well elsewhere. All ranks must make the same
    // calls, so they agree, outside the library, to leave it.
    std::optional<Failure> failure;
    try {
      layer.plan.emplace(co_await *layer.planning);
    } catch (const Error& error) {
      failure = Failure{error.code(), error.what()};
    }
    if (failure) ++plan_failures_[number];
    co_await support::meet(*layer.planning);
    layer.planning.reset();
    layer.skipped = plan_failures_[number] > 0;
    if (failure) require_reason(*failure);
    if (layer.plan) layer.memory.check_plan(*layer.plan);
  }

  Task dispatch(RankContext& context, std::size_t number) {
    Running& layer = running_[number];
    co_await end_plan(context, number);
    if (layer.skipped) co_return;
    co_await end_combine(context, number);
    context.at(fmt::format("dispatch of layer {}", number));
    layer.memory.use_seed(++layer.next_seed);
    layer.rows_are_valid = false;
    layer.dispatching.emplace(
        exchange_.start_dispatch(*layer.plan, layer.memory.x(), layer.memory.extra()));
    if (random_.one_in(3)) co_await end_dispatch(context, number);
  }

  Task end_dispatch(RankContext& context, std::size_t number) {
    Running& layer = running_[number];
    if (!layer.dispatching) co_return;
    context.at(fmt::format("end of dispatch of layer {}", number));
    co_await end(context, layer.dispatching, [&](ExpertRows rows) {
      layer.rows.emplace(std::move(rows));
      layer.rows_are_valid = true;
    });
    if (layer.rows_are_valid) layer.memory.check_rows(*layer.rows);
  }

  Task combine(RankContext& context, std::size_t number) {
    Running& layer = running_[number];
    if (layer.skipped) co_return;
    co_await end_dispatch(context, number);
    context.at(fmt::format("combine of layer {}", number));
    Matrix y = outputs_of(layer);
    layer.combining.emplace(exchange_.start_combine(*layer.plan, y, layer.memory.out()));
    if (random_.one_in(3)) co_await end_combine(context, number);
  }

  // In the rows' own memory, or in memory that the library does not know.
  Matrix outputs_of(Running& layer) {
    if (layer.rows_are_valid && random_.one_in(2)) {
      layer.memory.run_experts(*layer.plan, layer.rows->matrix(), layer.rows->matrix());
      return layer.rows->matrix();
    }
    layer.plain.emplace(layer.plan->num_rows(), exchange_.shape().hidden, exchange_.shape().dtype);
    if (layer.rows_are_valid) {
      layer.memory.run_experts(*layer.plan, layer.rows->matrix(), layer.plain->matrix());
    }
    return layer.plain->matrix();
  }

  Task end_combine(RankContext& context, std::size_t number) {
    Running& layer = running_[number];
    if (!layer.combining) co_return;
    context.at(fmt::format("end of combine of layer {}", number));
    bool ended_well = false;
    co_await end(context, layer.combining, [&] { ended_well = true; });
    if (ended_well) layer.memory.check_out();
    layer.rows.reset();
  }

  RankContext& context_;
  const SweepCase& sweep_;
  std::vector<std::atomic<int>>& plan_failures_;
  Draw random_;
  Exchange exchange_;
  std::vector<Running> running_;
};

}  // namespace

SweepCase draw_case(std::uint64_t seed, bool may_cancel) {
  Draw draw(seed);
  SweepCase sweep;
  sweep.seed = seed;
  const Group group = draw_group(draw);
  const auto num_topk = static_cast<int>(draw.between(1, 5));
  const auto num_layers = static_cast<std::size_t>(draw.between(1, 4));
  for (std::size_t i = 0; i < num_layers; ++i) {
    sweep.layers.push_back(draw_layer(draw, group, num_topk));
  }
  sweep.last.emplace(draw_layer(draw, group, num_topk));
  if (draw.one_in(2)) sweep.backward = Backward::weights;
  sweep.calls = draw_calls(draw, num_layers);
  sweep.options = options_of(group);
  sweep.options.fragment_bytes = draw.of(std::vector<std::int64_t>{0, 130, 300, 700, 5000});
  sweep.options.range_tokens = draw.of(std::vector<std::int64_t>{0, 1, 3, 8, 100});
  sweep.options.ranges_in_flight = static_cast<int>(draw.between(1, 4));
  sweep.options.checksum_payload = !draw.one_in(4);
  sweep.program.transport = TransportKind::stepped;
  sweep.program.topology = group.topology;
  sweep.program.seed = seed;
  sweep.program.max_delay_steps = static_cast<int>(draw.of(std::vector<std::int64_t>{0, 5, 60}));
  sweep.program.max_hold_steps =
      static_cast<std::uint64_t>(draw.of(std::vector<std::int64_t>{0, 300, 3000}));
  if (may_cancel && draw.one_in(3)) {
    sweep.program.injection =
        support::Injection{static_cast<std::uint64_t>(draw.between(0, 1200)),
                           static_cast<int>(draw.between(0, group.topology.num_ranks() - 1)),
                           fmt::format("given up in sweep {}", seed)};
  }
  return sweep;
}

SweepCase small_case(Strategy strategy, const Topology& topology) {
  SweepCase sweep;
  Group group{.topology = topology,
              .placement = Placement::contiguous(2 * topology.num_ranks(), topology.num_ranks()),
              .hidden = 5,
              .strategy = strategy};
  const std::vector<std::int64_t> tokens(static_cast<std::size_t>(topology.num_ranks()), 5);
  const RoutingSpec spec{.num_experts = group.placement.num_experts(), .num_topk = 3};
  sweep.layers.emplace_back(group, make_all_routing(spec, tokens, 1));
  sweep.last.emplace(group, make_all_routing(spec, tokens, 2));
  sweep.calls = {
      {SweepCall::Kind::plan, 0}, {SweepCall::Kind::dispatch, 0}, {SweepCall::Kind::combine, 0}};
  sweep.options = options_of(group);
  sweep.options.fragment_bytes = 160;
  sweep.options.range_tokens = 2;
  sweep.program.transport = TransportKind::stepped;
  sweep.program.topology = topology;
  sweep.program.max_delay_steps = 6;
  return sweep;
}

ProgramResult run_case(const SweepCase& sweep) {
  std::vector<std::atomic<int>> plan_failures(sweep.layers.size());
  return support::run_program(sweep.program, [&](RankContext& context) -> Task {
    SweepRank rank(context, sweep, plan_failures);
    co_await rank.run(context);
  });
}

std::string SweepCase::describe() const {
  const Group& group = layers.front().group();
  const auto gradients = [](const std::optional<WireFormat>& wire) {
    return wire ? to_string(*wire) : "unset";
  };
  std::string text = fmt::format(
      "seed {} (replay with --seed {}): {} {} {} {} wires {} {}, of gradients {} {}, blocks of {} "
      "hidden {} experts {} fragment_bytes {} range_tokens {} ranges_in_flight {} delay {} hold "
      "{}, calls:",
      seed, seed, group.topology.describe(), to_string(group.strategy), to_string(mode_of(group)),
      to_string(group.dtype), to_string(group.wire_dispatch), to_string(group.wire_combine),
      gradients(group.wire_combine_backward), gradients(group.wire_dispatch_backward),
      group.wire_block_columns, group.hidden, group.placement.num_experts(), options.fragment_bytes,
      options.range_tokens, options.ranges_in_flight, program.max_delay_steps,
      program.max_hold_steps);
  for (const SweepCall& call : calls) {
    constexpr const char* kNames[] = {"plan", "dispatch", "combine"};
    text += fmt::format(" {}({})", kNames[static_cast<int>(call.kind)], call.layer);
  }
  if (program.injection) {
    text += fmt::format(", cancel on rank {} from step {}", program.injection->rank,
                        program.injection->step);
  }
  return text + "\n";
}

}  // namespace ferry::conformance
