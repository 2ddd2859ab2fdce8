// What an exchange and a plan remember: see state.hpp. Here: checks of what an exchange is made
// with, and the numbers that follow from it.

#include "exchange/state.hpp"

#include <algorithm>

#include <fmt/format.h>

#include "exchange/engine.hpp"

namespace ferry::detail {
namespace {

constexpr std::uint64_t kRowAlignment = 64;
constexpr std::uint64_t kFragmentsPerRange = 8;
constexpr std::int64_t kLongestHidden = 1 << 24;

std::uint64_t align_row(std::uint64_t bytes) {
  return (bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::invalid_argument, text);
}

plan::Framing framing(const RowShape& shape, DType wire_dtype, const ExchangeOptions& options) {
  return plan::make_framing(static_cast<std::uint64_t>(shape.hidden) * element_bytes(wire_dtype),
                            wire::kFragmentHeaderBytes,
                            static_cast<std::uint64_t>(options.fragment_bytes));
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
  ExchangeOptions options = wanted;
  options.wire_dispatch = wanted.wire_dispatch.value_or(shape.dtype);
  options.wire_combine = wanted.wire_combine.value_or(shape.dtype);
  if (options.fragment_bytes == 0) {
    options.fragment_bytes = static_cast<std::int64_t>(transport.preferred_fragment_bytes());
  }
  if (options.range_tokens == 0) {
    const std::uint64_t rows =
        std::min(framing(shape, *options.wire_dispatch, options).rows_per_fragment,
                 framing(shape, *options.wire_combine, options).rows_per_fragment);
    options.range_tokens = static_cast<std::int64_t>(rows * kFragmentsPerRange);
  }
  return options;
}

}  // namespace

ExchangeState::ExchangeState(Engine& owner, std::uint32_t number, Placement where,
                             RowShape row_shape, const ExchangeOptions& wanted)
    : engine(owner),
      id(number),
      placement(std::move(where)),
      shape(row_shape),
      options(filled_in(wanted, row_shape, owner.transport())),
      experts(owner.transport().topology(), placement),
      dispatch_framing(framing(shape, *options.wire_dispatch, options)),
      combine_framing(framing(shape, *options.wire_combine, options)),
      row_bytes(static_cast<std::uint64_t>(shape.hidden) * element_bytes(shape.dtype)),
      window_stride_bytes(align_row(row_bytes)),
      board(owner, number),
      failures(owner.node_ranks().size()),
      engine_alive_(owner.alive()) {}

ExchangeState::~ExchangeState() {
  if (!engine_alive_.expired()) engine.settle_plans(*this);
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
  shared.strategy = options.strategy;
  shared.checksum_payload = options.checksum_payload;
  return shared;
}

PlanState::PlanState(ExchangeState& owner, std::uint32_t plan_number, plan::RankPlan rank_plan,
                     std::uint64_t metadata_bytes)
    : exchange_id(owner.id),
      number(plan_number),
      placement_version(owner.placement.version),
      rows(std::move(rank_plan)),
      flow(std::make_shared<PlanFlow>(rows, owner.dispatch_framing, owner.combine_framing)) {
  const Topology& topology = owner.engine.transport().topology();
  for (const int expert : owner.experts.experts_of_rank(rows.rank)) local_experts.push_back(expert);
  const plan::RankTraffic traffic =
      plan::traffic(rows, topology, owner.dispatch_framing, owner.combine_framing);
  summary.rows_received = rows.num_rows();
  summary.window_bytes = static_cast<std::uint64_t>(rows.num_rows()) * owner.window_stride_bytes;
  summary.metadata_bytes = metadata_bytes;
  summary.inter_node_bytes_dispatch = traffic.bytes_out;
  summary.inter_node_bytes_combine = traffic.bytes_back;
  summary.inter_node_rows_dispatch = traffic.rows_out;
  summary.inter_node_rows_combine = traffic.rows_back;
  summary.inter_socket_bytes_dispatch = traffic.inter_socket_rows * owner.row_bytes;
}

}  // namespace ferry::detail
