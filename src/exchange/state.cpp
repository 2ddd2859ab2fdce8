// What an exchange and a plan remember: see state.hpp. Here: checks of what an exchange is made
// with, and the numbers that follow from it.

#include "exchange/state.hpp"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "exchange/engine.hpp"

namespace ferry::detail {
namespace {

constexpr std::uint64_t kLineBytes = 64;
constexpr std::uint64_t kExtraAlignment = 16;
constexpr int kMostExtraBytes = 1 << 20;
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

// Rows of which some may be longer have fragments that all fit if every one is.
plan::Framing framing(const Crossing& crossing, const ExchangeOptions& options) {
  const auto fragment_bytes = static_cast<std::uint64_t>(options.fragment_bytes);
  plan::Framing made = plan::make_framing(crossing.row_bytes() + crossing.extra_bytes,
                                          wire::kFragmentHeaderBytes, fragment_bytes);
  if (crossing.varies()) {
    const std::uint64_t room =
        fragment_bytes - std::min(fragment_bytes, wire::kFragmentHeaderBytes);
    made.rows_per_fragment =
        std::clamp<std::uint64_t>(room / crossing.most_bytes(1), 1, made.rows_per_fragment);
  }
  made.most_payload_bytes = crossing.most_bytes(made.rows_per_fragment);
  return made;
}

Crossings crossings_of(const RowShape& shape, const ExchangeOptions& options) {
  const auto rows = [&](const std::optional<WireFormat>& format) {
    return kernels::RowFormat(dense_format(*format), options.wire_block_columns);
  };
  // Gradients in a dtype overflow as in arithmetic, or no loss scaler would see it.
  const auto gradients = [&](const std::optional<WireFormat>& format) {
    return is_quantised(*format) ? rows(format)
                                 : kernels::RowFormat(dtype_of(dense_format(*format)));
  };
  // Rows of 16 bits escalate to what they are, and lose nothing. Sums go home in bf16: one that is
  // within what int8 holds may be beyond f16.
  const DType of_rows = shape.dtype == DType::f32 ? DType::bf16 : shape.dtype;
  const auto crossing = [&](const std::optional<WireFormat>& wire, bool of_gradients,
                            DType escalated) {
    Crossing made{.hidden = shape.hidden,
                  .format = of_gradients ? gradients(wire) : rows(wire),
                  .sparse = is_sparse(*wire),
                  .sparse_ratio = options.wire_sparse_ratio,
                  .sparse_block_columns = static_cast<std::uint32_t>(options.wire_block_columns)};
    if (!is_quantised(*wire)) return made;
    made.max_relative_error = options.max_relative_error;
    made.escalated =
        of_gradients ? kernels::RowFormat(escalated)
                     : kernels::RowFormat(wire_format_of(escalated), options.wire_block_columns);
    return made;
  };
  Crossings made{.dispatch = crossing(options.wire_dispatch, false, of_rows),
                 .combine = crossing(options.wire_combine, false, DType::bf16),
                 .combine_backward = crossing(options.wire_combine_backward, true, of_rows),
                 .dispatch_backward = crossing(options.wire_dispatch_backward, true, DType::bf16),
                 .values = {.hidden = 1, .format = DType::f32}};
  made.dispatch.extra_bytes = static_cast<std::uint64_t>(options.extra_bytes);
  return made;
}

Framings framings_of(const RowShape& shape, const ExchangeOptions& options) {
  const Crossings crossings = crossings_of(shape, options);
  return {.dispatch = framing(crossings.dispatch, options),
          .combine = framing(crossings.combine, options),
          .combine_backward = framing(crossings.combine_backward, options),
          .dispatch_backward = framing(crossings.dispatch_backward, options),
          .values = framing(crossings.values, options)};
}

// A limit that is finer than what rows escalate to could not be kept.
void check_max_relative_error(const ExchangeOptions& options) {
  constexpr float kFinest = 0x1p-8F;
  const float limit = options.max_relative_error;
  if (limit == 0) return;
  if (!(limit >= kFinest && limit < 1)) {
    refuse(
        fmt::format("exchange: max_relative_error = {}; allowed: 0 (no limit), or {} to below 1, "
                    "because rows that miss it cross as bf16; fix: for less error take a wire "
                    "format of 16 or 32 bits",
                    limit, kFinest));
  }
  for (const auto& wire : {options.wire_dispatch, options.wire_combine,
                           options.wire_combine_backward, options.wire_dispatch_backward}) {
    if (is_quantised(*wire)) return;
  }
  refuse(
      fmt::format("exchange: max_relative_error = {} where no wire format is quantised; fix: "
                  "choose fp8_e4m3fn or int8 for a wire format, or leave the limit out",
                  limit));
}

void check_wire_blocks(int columns) {
  if (is_block_size(columns)) return;
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

void check_sparse_ratio(const ExchangeOptions& options) {
  const float ratio = options.wire_sparse_ratio;
  if (!(ratio > 0 && ratio <= 1)) {
    refuse(
        fmt::format("exchange: wire_sparse_ratio = {}; allowed: above 0, at most 1; fix: pass the "
                    "share of the values to keep, or leave it at 1",
                    ratio));
  }
  if (ratio == 1) return;
  for (const auto& wire : {options.wire_dispatch, options.wire_combine,
                           options.wire_combine_backward, options.wire_dispatch_backward}) {
    if (is_sparse(*wire)) return;
  }
  refuse(
      fmt::format("exchange: wire_sparse_ratio = {} where no wire format is sparse; fix: choose "
                  "sparse_bf16, sparse_f16 or sparse_f32 for a wire format, or leave it out",
                  ratio));
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
        fmt::format("exchange: range_tokens = {}; allowed: 0 (as many as fill eight fragments) to "
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
  check_max_relative_error(options);
  check_sparse_ratio(options);
  if (options.fragment_bytes == 0) {
    options.fragment_bytes = static_cast<std::int64_t>(transport.preferred_fragment_bytes());
  }
  if (options.range_tokens == 0) {
    const Framings framings = framings_of(shape, options);
    options.range_tokens =
        static_cast<std::int64_t>(plan::default_range_tokens(framings.dispatch, framings.combine));
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
      crossings(crossings_of(shape, options)),
      packers(crossings),
      framings(framings_of(shape, options)),
      row_bytes(static_cast<std::uint64_t>(shape.hidden) * element_bytes(shape.dtype)),
      extra_offset(options.extra_bytes == 0 ? row_bytes : aligned(row_bytes, kExtraAlignment)),
      window_stride_bytes(
          aligned(extra_offset + static_cast<std::uint64_t>(options.extra_bytes), kLineBytes)),
      index_histories(static_cast<std::size_t>(owner.transport().topology().num_nodes())),
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
  shared.max_relative_error = options.max_relative_error;
  shared.wire_sparse_ratio = options.wire_sparse_ratio;
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
      indices(std::move(made.indices)),
      flow(std::make_shared<PlanFlow>(rows, owner.framings, owner.options.weights)) {
  const Topology& topology = owner.engine.transport().topology();
  for (const int expert : owner.experts.experts_of_rank(rows.rank)) local_experts.push_back(expert);
  const plan::RankTraffic traffic = plan::traffic(rows, topology,
                                                  {.out = owner.framings.dispatch,
                                                   .back = owner.framings.combine,
                                                   .grad_out = owner.framings.combine_backward,
                                                   .grad_back = owner.framings.dispatch_backward,
                                                   .values = owner.framings.values});
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
  for (const IndexSummary& index : indices) summary.index_bytes += index.bytes;
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
