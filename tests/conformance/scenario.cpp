// What the conformance tests share: layers with their expected results, and one run of a layer
// checked against the oracle.

#include "conformance/scenario.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "support/rows.hpp"
#include "support/verify.hpp"
#include "support/verify_backward.hpp"

namespace ferry::conformance {

using support::require;

Layer::Layer(Group group, std::vector<RoutingData> routing)
    : group_(std::move(group)), routing_(std::move(routing)) {}

Reference Layer::reference(std::uint64_t seed) const {
  support::Model model = support::hashed_model(seed, group_.dtype);
  if (!special_rows.empty()) {
    model.token = [hashed = model.token, special = special_rows](
                      int rank, std::int64_t token, std::span<float> values) {
      hashed(rank, token, values);
      for (const SpecialRow& row : special) {
        if (row.rank != rank || row.token != token) continue;
        std::fill(values.begin(), values.end(), row.value);
      }
    };
  }
  return {group_, std::move(model), support::views(routing_)};
}

ExchangeOptions options_of(const Group& group) {
  ExchangeOptions options;
  options.strategy = group.strategy;
  options.layout = group.layout;
  options.weights = group.weights;
  options.row_alignment = static_cast<int>(group.row_alignment);
  options.extra_bytes = static_cast<int>(group.extra_bytes);
  options.row_sources = group.row_sources;
  options.wire_dispatch = group.wire_dispatch;
  options.wire_combine = group.wire_combine;
  options.wire_combine_backward = group.wire_combine_backward;
  options.wire_dispatch_backward = group.wire_dispatch_backward;
  options.wire_block_columns = static_cast<int>(group.wire_block_columns);
  options.max_relative_error = group.max_relative_error;
  options.wire_sparse_ratio = group.wire_sparse_ratio;
  options.fragment_bytes = 400;
  options.range_tokens = 4;
  return options;
}

Exchange make_exchange(RankContext& context, const Group& group) {
  return Exchange(context.transport(), group.placement, {group.hidden, group.dtype},
                  options_of(group));
}

namespace {
constexpr std::int64_t kGuardBytes = 64;
constexpr std::byte kPoison{0xFF};
}  // namespace

GuardedMatrix::GuardedMatrix(std::int64_t rows, std::int64_t columns, DType dtype)
    : rows_(rows), columns_(columns), dtype_(dtype) {
  bytes_.resize(static_cast<std::size_t>(rows * matrix().stride_bytes()), kPoison);
}

Matrix GuardedMatrix::matrix() {
  const auto row_bytes = columns_ * static_cast<std::int64_t>(element_bytes(dtype_));
  return {bytes_.empty() ? nullptr : bytes_.data(), dtype_, rows_, columns_,
          row_bytes + kGuardBytes};
}

void GuardedMatrix::poison() { std::fill(bytes_.begin(), bytes_.end(), kPoison); }

void GuardedMatrix::require_guards() const {
  const auto row_bytes = columns_ * static_cast<std::int64_t>(element_bytes(dtype_));
  for (std::int64_t row = 0; row < rows_; ++row) {
    const std::byte* guard = bytes_.data() + row * (row_bytes + kGuardBytes) + row_bytes;
    require(std::all_of(guard, guard + kGuardBytes, [](std::byte b) { return b == kPoison; }),
            fmt::format("bytes after row {} were written", row));
  }
}

std::uint64_t GuardedMatrix::hash() {
  std::uint64_t hash = 0xCBF29CE484222325ULL;  // FNV-1a
  for (const std::byte byte : bytes_) {
    hash = (hash ^ std::to_integer<std::uint64_t>(byte)) * 0x100000001B3ULL;
  }
  return hash;
}

RankLayer::RankLayer(const RankContext& context, const Layer& layer, std::uint64_t seed)
    : layer_(layer),
      rank_(context.rank()),
      x_(layer.routing(rank_).num_tokens, layer.group().hidden, layer.group().dtype),
      out_(layer.routing(rank_).num_tokens, layer.group().hidden, layer.group().dtype),
      extra_(static_cast<std::size_t>(layer.routing(rank_).num_tokens *
                                      layer.group().extra_bytes)) {
  use_seed(seed);
}

void RankLayer::use_seed(std::uint64_t seed) {
  seed_ = seed;
  support::fill_rows(seed, rank_, x_.matrix());
  for (const SpecialRow& row : layer_.special_rows) {
    if (row.rank == rank_) support::fill_row_with(row.value, x_.matrix(), row.token);
  }
  support::fill_extra(seed, rank_, extra_, layer_.group().extra_bytes);
  out_.poison();
}

void RankLayer::check_plan(const Plan& plan) const {
  require(support::check_plan(layer_.reference(seed_), rank_, plan));
}

void RankLayer::check_rows(const ExpertRows& rows) const {
  require(support::check_rows(layer_.reference(seed_), rank_, rows));
}

void RankLayer::check_out() {
  require(support::check_out(layer_.reference(seed_), rank_, out_.matrix()));
  out_.require_guards();
}

void RankLayer::run_experts(const Plan& plan, ConstMatrix rows, Matrix y) const {
  support::run_experts(plan, rows, y, layer_.group().weights);
}

namespace {

void require_equal(std::uint64_t counted, std::uint64_t planned, const char* what) {
  require(counted == planned, fmt::format("{}: {} counted, {} planned", what, counted, planned));
}

constexpr unsigned char kStale = 0xFF;

}  // namespace

namespace {

/// Both backward operations of one use, checked. `y` is what combine read.
Task run_backward(RankContext& context, Exchange& exchange, const Plan& plan, RankLayer& memory,
                  LayerRun run, ConstMatrix y) {
  const support::BackwardReference reference = memory.backward();
  const Group& group = memory.layer().group();
  const Routing routing = memory.routing();
  GuardedMatrix grad_out(routing.num_tokens, group.hidden, group.dtype);
  support::fill_grad_out(reference, memory.rank(), grad_out.matrix());
  std::vector<float> grad_weights(
      static_cast<std::size_t>(routing.num_tokens * routing.num_topk),
      std::numeric_limits<float>::quiet_NaN());
  const bool wanted = run.backward == Backward::weights;
  std::optional<std::span<float>> at_combine;
  if (wanted && group.weights == WeightMode::at_combine) at_combine = grad_weights;
  poison_free_slots(context.transport(), kStale);
  context.at("combine_backward");
  GradRows grad_y = co_await exchange.start_combine_backward(
      plan, {.grad_out = grad_out.matrix(), .y = at_combine ? y : ConstMatrix{}}, at_combine);
  require(support::check_grad_y(reference, memory.rank(), grad_y.matrix()));
  if (at_combine) require(support::check_grad_weights(reference, memory.rank(), grad_weights));

  GuardedMatrix plain(run.y == OutputPlace::plain ? plan.num_rows() : 0, group.hidden, group.dtype);
  const Matrix rows = run.y == OutputPlace::plain ? plain.matrix() : grad_y.matrix();
  support::fill_grad_rows(reference, memory.rank(), rows);
  GuardedMatrix grad_x(routing.num_tokens, group.hidden, group.dtype);
  DispatchBackwardInput input{.grad_rows = rows};
  DispatchBackwardOutput output{.grad_x = grad_x.matrix()};
  std::vector<float> row_weights;
  const bool at_expert = wanted && group.weights == WeightMode::at_expert;
  if (at_expert) {
    row_weights = support::grad_row_weights(reference, memory.rank(), plan);
    input.grad_row_weights = row_weights;
    output.grad_weights = grad_weights;
  }
  poison_free_slots(context.transport(), kStale);
  context.at("dispatch_backward");
  co_await exchange.start_dispatch_backward(plan, input, output);
  require(support::check_grad_x(reference, memory.rank(), grad_x.matrix()));
  grad_x.require_guards();
  if (at_expert) require(support::check_grad_weights(reference, memory.rank(), grad_weights));
  if (run.out_hash != nullptr) *run.out_hash = *run.out_hash * 31 + grad_x.hash();
  if (run.out_hash != nullptr && (at_combine || at_expert)) {
    for (const float gradient : grad_weights) {
      *run.out_hash = *run.out_hash * 31 + std::bit_cast<std::uint32_t>(gradient);
    }
  }
}

}  // namespace

Task use_plan(RankContext& context, Exchange& exchange, const Plan& plan, RankLayer& memory,
              LayerRun run) {
  context.at("dispatch");
  const ExpertRows rows = co_await exchange.start_dispatch(plan, memory.x(), memory.extra());
  co_await use_rows(context, exchange, rows, memory, run);
}

Task use_rows(RankContext& context, Exchange& exchange, const ExpertRows& rows, RankLayer& memory,
              LayerRun run) {
  const Plan& plan = rows.plan();
  memory.check_rows(rows);
  poison_free_slots(context.transport(), kStale);
  std::optional<OutputRows> output;
  GuardedMatrix plain(run.y == OutputPlace::plain ? plan.num_rows() : 0, rows.matrix().columns,
                      rows.matrix().dtype);
  Matrix y = rows.matrix();
  switch (run.y) {
    case OutputPlace::window: y = output.emplace(exchange.output(plan)).matrix(); break;
    case OutputPlace::dispatched_rows: break;
    case OutputPlace::plain: y = plain.matrix(); break;
  }
  memory.run_experts(plan, rows.matrix(), y);
  context.at("combine");
  co_await exchange.start_combine(plan, y, memory.out());
  memory.check_out();
  if (run.out_hash != nullptr) *run.out_hash = memory.out_memory().hash();
  if (run.backward != Backward::none) {
    co_await run_backward(context, exchange, plan, memory, run, y);
  }
}

namespace {

// Of one use of a plan.
std::uint64_t planned_payload_bytes(const PlanSummary& planned, const LayerRun& run,
                                    WeightMode weights) {
  std::uint64_t bytes = planned.inter_node_bytes_dispatch + planned.inter_node_bytes_combine;
  if (run.backward == Backward::none) return bytes;
  bytes += planned.inter_node_bytes_combine_backward + planned.inter_node_bytes_dispatch_backward;
  const bool with_weights = run.backward == Backward::weights && weights != WeightMode::none;
  return bytes + (with_weights ? planned.inter_node_bytes_grad_weights : 0);
}

}  // namespace

Task run_layer(RankContext& context, Exchange& exchange, const Layer& layer, LayerRun run) {
  Transport& transport = context.transport();
  RankLayer memory(context, layer, run.seed);
  const TrafficCounters before = transport.counters();
  const std::uint64_t rounds = exchange.metadata_rounds();
  context.at("plan");
  const Plan plan = co_await exchange.start_plan(memory.routing());
  memory.check_plan(plan);
  require_equal(exchange.metadata_rounds() - rounds, 1, "metadata rounds of a plan");
  for (int use = 0; use < run.uses; ++use) {
    poison_free_slots(transport, kStale);
    const auto number = static_cast<std::uint64_t>(use);
    memory.use_seed(run.new_seed_per_use ? run.seed + number : run.seed);
    co_await use_plan(context, exchange, plan, memory, run);
  }
  if (run.check_bytes) {
    const TrafficCounters after = transport.counters();
    const PlanSummary& planned = plan.summary();
    const auto uses = static_cast<std::uint64_t>(run.uses);
    require_equal(after.metadata_bytes - before.metadata_bytes, planned.metadata_bytes,
                  "metadata bytes");
    require_equal(after.payload_bytes - before.payload_bytes,
                  uses * planned_payload_bytes(planned, run, layer.group().weights),
                  "payload bytes");
    require_equal(exchange.metadata_rounds() - rounds, 1, "metadata rounds with replays");
  }
}

int Conformance::num_ranks() const { return GetParam().topology.topology().num_ranks(); }

Group Conformance::group(int num_experts, std::int64_t hidden) const {
  const Point& point = GetParam();
  return with_mode(
      {point.topology.topology(), Placement::contiguous(num_experts, num_ranks()), hidden,
       point.dtype, point.strategy, wire_format_of(point.dtype), wire_format_of(point.dtype)},
      point.mode);
}

std::vector<std::int64_t> Conformance::ragged(std::int64_t base) const {
  std::vector<std::int64_t> tokens;
  for (int rank = 0; rank < num_ranks(); ++rank) tokens.push_back(base + (rank * 7) % 5 - 2);
  return tokens;
}

ProgramOptions Conformance::program() const {
  ProgramOptions options;
  options.transport = GetParam().transport;
  options.topology = GetParam().topology.topology();
  options.max_hold_steps = 500;
  return options;
}

void Conformance::run(const support::Body& body) const {
  const ProgramResult result = support::run_program(program(), body);
  EXPECT_TRUE(result.ok()) << result.describe();
}

void Conformance::run(const Layer& layer, const LayerRun& how) const {
  run([&](RankContext& context) -> Task {
    Exchange exchange = make_exchange(context, layer.group());
    co_await run_layer(context, exchange, layer, how);
  });
}

}  // namespace ferry::conformance
