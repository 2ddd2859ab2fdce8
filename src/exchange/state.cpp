// What an exchange and a plan remember: see state.hpp. Here: checks of what an exchange is made
// with, and the numbers that follow from it.

#include "exchange/state.hpp"

#include <algorithm>
#include <bit>
#include <numeric>

#include <fmt/format.h>

#include "exchange/engine.hpp"

namespace ferry::detail {
namespace {

constexpr std::uint64_t kLineBytes = 64;
constexpr std::uint64_t kExtraAlignment = 16;
constexpr int kMostExtraBytes = 1 << 20;
constexpr std::uint64_t kFragmentsPerRange = 8;
constexpr std::int64_t kLongestHidden = 1 << 24;

std::uint64_t aligned(std::uint64_t bytes, std::uint64_t to) { return (bytes + to - 1) / to * to; }

plan::ExpertIndex owners_of_rows(const Topology& topology, const plan::ExpertIndex& experts,
                                 Layout layout) {
  if (layout == Layout::expert_major) return experts;
  std::vector<int> ranks(static_cast<std::size_t>(topology.num_ranks()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return plan::ExpertIndex(topology, Placement::from_map(ranks));
}

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::invalid_argument, text);
}

plan::Framing framing(std::uint64_t row_bytes, const ExchangeOptions& options) {
  return plan::make_framing(row_bytes, wire::kFragmentHeaderBytes,
                            static_cast<std::uint64_t>(options.fragment_bytes));
}

WireRows wire_rows_of(const ExchangeOptions& options) {
  const auto rows = [&](const std::optional<WireFormat>& format) {
    return kernels::RowFormat(*format, options.wire_block_columns);
  };
  // Gradients in f16 overflow as in FP16 arithmetic, or no loss scaler would see that they are lost.
  const auto gradients = [&](const std::optional<WireFormat>& format) {
    return is_quantised(*format) ? rows(format) : kernels::RowFormat(dtype_of(*format));
  };
  return {.dispatch = rows(options.wire_dispatch),
          .combine = rows(options.wire_combine),
          .combine_backward = gradients(options.wire_combine_backward),
          .dispatch_backward = gradients(options.wire_dispatch_backward)};
}

Framings framings_of(const RowShape& shape, const ExchangeOptions& options) {
  const WireRows rows = wire_rows_of(options);
  const auto of = [&](const kernels::RowFormat& format, int extra_bytes) {
    return framing(format.row_bytes(shape.hidden) + static_cast<std::uint64_t>(extra_bytes),
                   options);
  };
  return {.dispatch = of(rows.dispatch, options.extra_bytes),
          .combine = of(rows.combine, 0),
          .combine_backward = of(rows.combine_backward, 0),
          .dispatch_backward = of(rows.dispatch_backward, 0),
          .values = framing(sizeof(float), options)};
}

void check_wire_blocks(int columns) {
  const bool allowed = columns >= kFewestBlockColumns && columns <= kMostBlockColumns &&
                       std::has_single_bit(static_cast<unsigned>(columns));
  if (allowed) return;
  refuse(
      fmt::format("exchange: wire_block_columns = {}; allowed: powers of two from {} to {}; fix: "
                  "leave it at {}, or take one of these",
                  columns, kFewestBlockColumns, kMostBlockColumns, kDefaultBlockColumns));
}

// Formats that were not asked for.
void choose_wires(ExchangeOptions& options, DType dtype) {
  options.wire_dispatch = options.wire_dispatch.value_or(wire_format_of(dtype));
  options.wire_combine = options.wire_combine.value_or(wire_format_of(dtype));
  options.wire_combine_backward =
      options.wire_combine_backward.value_or(gradient_wire(*options.wire_dispatch, dtype));
  options.wire_dispatch_backward =
      options.wire_dispatch_backward.value_or(gradient_wire(*options.wire_combine, dtype));
}

// Modes that do not go together, or are out of range.
void check_modes(const ExchangeOptions& options) {
  if (options.layout == Layout::token_major) {
    if (options.strategy == Strategy::flat) {
      refuse(
          "exchange: layout token_major with strategy flat, which sends one row per expert; "
          "allowed: rank_dedup, node_gather, node_dedup; fix: take one of these, or "
          "expert_major");
    }
    if (options.weights == WeightMode::at_combine) {
      refuse(
          "exchange: layout token_major with weights at_combine, where one row stands for "
          "several experts; allowed: at_expert, none; fix: apply Plan::topk_weights() where "
          "the experts' outputs are summed");
    }
    if (options.row_alignment != 1) {
      refuse(
          fmt::format("exchange: row_alignment = {} with layout token_major; allowed: 1, because "
                      "rows are not grouped by expert",
                      options.row_alignment));
    }
  }
  if (options.row_alignment < 1 || options.row_alignment > 0xFFFF) {
    refuse(
        fmt::format("exchange: row_alignment = {}; allowed: 1..65535 rows", options.row_alignment));
  }
  if (options.extra_bytes < 0 || options.extra_bytes > kMostExtraBytes ||
      options.extra_bytes % 4 != 0) {
    refuse(
        fmt::format("exchange: extra_bytes = {}; allowed: multiples of 4 from 0 to {}; fix: pad "
                    "what travels with a row",
                    options.extra_bytes, kMostExtraBytes));
  }
}

ExchangeOptions filled_in(const ExchangeOptions& wanted, const RowShape& shape,
                          const Transport& transport) {
  if (shape.hidden < 1 || shape.hidden > kLongestHidden) {
    refuse(fmt::format("exchange: hidden = {}; allowed: 1..{}; fix: pass the model's hidden size",
                       shape.hidden, kLongestHidden));
  }
  if (wanted.fragment_bytes < 0 || wanted.fragment_bytes > (1LL << 30)) {
    refuse(
        fmt::format("exchange: fragment_bytes = {}; allowed: 0 (what the transport prefers) to "
                    "1 GiB",
                    wanted.fragment_bytes));
  }
  if (wanted.range_tokens < 0 || wanted.range_tokens > 0xFFFFFFFFLL) {
    refuse(
        fmt::format("exchange: range_tokens = {}; allowed: 0 (as fills eight fragments) to "
                    "4294967295",
                    wanted.range_tokens));
  }
  if (wanted.ranges_in_flight < 1 || wanted.ranges_in_flight > 1024) {
    refuse(
        fmt::format("exchange: ranges_in_flight = {}; allowed: 1..1024", wanted.ranges_in_flight));
  }
  check_modes(wanted);
  check_wire_blocks(wanted.wire_block_columns);
  ExchangeOptions options = wanted;
  options.row_sources |=
      wanted.layout == Layout::token_major || wanted.weights == WeightMode::at_expert;
  choose_wires(options, shape.dtype);
  if (options.fragment_bytes == 0) {
    options.fragment_bytes = static_cast<std::int64_t>(transport.preferred_fragment_bytes());
  }
  if (options.range_tokens == 0) {
    const Framings framings = framings_of(shape, options);
    const std::uint64_t rows =
        std::min({framings.dispatch.rows_per_fragment, framings.combine.rows_per_fragment,
                  framings.combine_backward.rows_per_fragment,
                  framings.dispatch_backward.rows_per_fragment});
    options.range_tokens = static_cast<std::int64_t>(rows * kFragmentsPerRange);
  }
  return options;
}

}  // namespace

ExchangeState::ExchangeState(Engine& owner, std::uint32_t number, Placement where,
                             RowShape row_shape, const ExchangeOptions& wanted)
    : engine(owner),
      use(owner.transport().sole_use()),
      id(number),
      placement(std::move(where)),
      shape(row_shape),
      options(filled_in(wanted, row_shape, owner.transport())),
      experts(owner.transport().topology(), placement),
      row_owners(owners_of_rows(owner.transport().topology(), experts, options.layout)),
      wire_rows(wire_rows_of(options)),
      framings(framings_of(shape, options)),
      row_bytes(static_cast<std::uint64_t>(shape.hidden) * element_bytes(shape.dtype)),
      extra_offset(options.extra_bytes == 0 ? row_bytes : aligned(row_bytes, kExtraAlignment)),
      window_stride_bytes(
          aligned(extra_offset + static_cast<std::uint64_t>(options.extra_bytes), kLineBytes)),
      board(std::make_unique<NodeBoard>(owner, number)),
      failures(owner.node_ranks().size()),
      engine_alive_(owner.alive()) {}

ExchangeState::~ExchangeState() {
  // A forked child has none of the node's memory.
  if (!engine_alive_.expired() && !use->is_forked()) engine.let_go(*this);
}

plan::PlanContext ExchangeState::plan_context(int num_topk) const {
  return {engine.transport().topology(),
          row_owners,
          options.strategy,
          static_cast<std::uint64_t>(options.range_tokens),
          static_cast<std::uint64_t>(options.row_alignment),
          options.weights == WeightMode::none
              ? 0U
              : static_cast<std::uint32_t>(weights_per_row(num_topk))};
}

wire::SharedOptions ExchangeState::shared_options(int num_topk) const {
  wire::SharedOptions shared;
  shared.hidden = static_cast<std::uint64_t>(shape.hidden);
  shared.topology_hash = engine.transport().topology().hash();
  shared.placement_hash = placement.hash();
  shared.placement_version = placement.version;
  shared.num_experts = static_cast<std::uint32_t>(placement.num_experts());
  shared.num_topk = static_cast<std::uint32_t>(num_topk);
  shared.fragment_bytes = static_cast<std::uint32_t>(options.fragment_bytes);
  shared.range_tokens = static_cast<std::uint32_t>(options.range_tokens);
  shared.ranges_in_flight = static_cast<std::uint16_t>(options.ranges_in_flight);
  shared.dtype = shape.dtype;
  shared.wire_dispatch = *options.wire_dispatch;
  shared.wire_combine = *options.wire_combine;
  shared.wire_combine_backward = *options.wire_combine_backward;
  shared.wire_dispatch_backward = *options.wire_dispatch_backward;
  shared.wire_block_columns = static_cast<std::uint16_t>(options.wire_block_columns);
  shared.strategy = options.strategy;
  shared.checksum_payload = options.checksum_payload;
  shared.layout = options.layout;
  shared.weights = options.weights;
  shared.row_sources = options.row_sources;
  shared.row_alignment = static_cast<std::uint16_t>(options.row_alignment);
  shared.extra_bytes = static_cast<std::uint32_t>(options.extra_bytes);
  return shared;
}

PlanState::PlanState(ExchangeState& owner, Spares<plan::RankPlan>::Handle rank_plan, Made made)
    : exchange_id(owner.id),
      number(made.number),
      num_topk(made.num_topk),
      placement_version(owner.placement.version),
      memory_(std::move(rank_plan)),
      rows(*memory_),
      slot_experts(std::move(made.slot_experts)),
      flow(std::make_shared<PlanFlow>(rows, owner.framings, owner.options.weights)) {
  const Topology& topology = owner.engine.transport().topology();
  for (const int expert : owner.experts.experts_of_rank(rows.rank)) local_experts.push_back(expert);
  const plan::RankTraffic traffic = plan::traffic(
      rows, topology,
      {owner.framings.dispatch, owner.framings.combine, owner.framings.combine_backward,
       owner.framings.dispatch_backward, owner.framings.values});
  expert_counts = rows.expert_counts;
  if (!owner.token_major()) expert_offsets = rows.expert_offsets;
  summary.rows_received =
      std::accumulate(rows.expert_counts.begin(), rows.expert_counts.end(), std::int64_t{0});
  summary.window_bytes = static_cast<std::uint64_t>(rows.num_rows()) * owner.window_stride_bytes;
  slot_bytes = summary.window_bytes;
  if (owner.options.weights == WeightMode::at_expert) {
    slot_bytes += static_cast<std::uint64_t>(rows.num_rows()) * owner.weights_per_row(num_topk) *
                  sizeof(float);
  }
  summary.metadata_bytes = made.metadata_bytes;
  summary.inter_node_bytes_dispatch = traffic.bytes_out;
  summary.inter_node_bytes_combine = traffic.bytes_back;
  summary.inter_node_bytes_combine_backward = traffic.bytes_grad_out;
  summary.inter_node_bytes_dispatch_backward = traffic.bytes_grad_back;
  summary.inter_node_bytes_grad_weights = traffic.bytes_values;
  summary.inter_node_rows_dispatch = traffic.rows_out;
  summary.inter_node_rows_combine = traffic.rows_back;
  summary.inter_socket_bytes_dispatch =
      traffic.inter_socket_rows *
      (owner.row_bytes + static_cast<std::uint64_t>(owner.options.extra_bytes));
}

}  // namespace ferry::detail
