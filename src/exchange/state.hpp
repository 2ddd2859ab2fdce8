#pragma once
// What an exchange and a plan remember between calls.

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exchange/call_order.hpp"
#include "exchange/failures.hpp"
#include "exchange/flow.hpp"
#include "exchange/node_board.hpp"
#include "exchange/plan_memory.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/options.hpp"
#include "ferry/placement.hpp"
#include "plan/experts.hpp"
#include "plan/rank_plan.hpp"
#include "plan/traffic.hpp"
#include "wire/headers.hpp"
#include "wire/membership_choice.hpp"

namespace ferry::detail {

class Engine;
class Operation;

/// Of a group of ranks: as long as none can be replaced, there is one.
inline constexpr std::uint32_t kGeneration = 1;

/// Number in place of a plan's where a call names no plan of this exchange.
inline constexpr std::uint32_t kNoPlan = 0xFFFFFFFFU;

/// Extra bytes move as rows of a dtype of their own; equal dtypes copy bits.
inline constexpr DType kExtraDtype = DType::f32;

/// A refusal that travels to all ranks of an exchange.
struct Poison {
  wire::CallId call;
  Error error{ErrorCode::peer_failed, ""};
};

/// Where a rank of the node shows the slot of a call.
struct ShownWindow {
  std::uint64_t region_key = 0;
  std::uint64_t turn = 0;
  std::uint64_t bytes = 0;
  bool there = false;
};

/// Metadata of one source rank, as it arrived.
struct ArrivedMetadata {
  int source = -1;
  std::vector<std::byte> bytes;
};

/// A plan: see Plan. Bound to its exchange and placement version.
class PlanState {
 public:
  struct Made {
    std::uint32_t number = 0;
    int num_topk = 1;
    std::uint64_t metadata_bytes = 0;
    std::vector<std::int32_t> slot_experts{};
    std::vector<IndexSummary> indices{};
  };
  PlanState(ExchangeState& owner, Spares<plan::RankPlan>::Handle rank_plan, Made made);

  const std::uint32_t exchange_id;
  const std::uint32_t number;
  const int num_topk;
  const std::uint64_t placement_version;

 private:
  const Spares<plan::RankPlan>::Handle memory_;

 public:
  const plan::RankPlan& rows;
  std::vector<std::int32_t> local_experts;
  std::vector<std::int64_t> expert_counts;
  std::vector<std::int64_t> expert_offsets;
  RowSources row_sources;
  std::vector<std::int32_t> topk_idx;
  std::vector<float> topk_weights;
  PlanSummary summary;
  /// Of a window's slot: its rows, and room for one FP32 number per weight where gradients of
  /// weights may travel with rows.
  std::uint64_t slot_bytes = 0;
  /// [num_tokens, num_topk] the expert of each slot, -1 = none; empty where weights have no
  /// gradient.
  const std::vector<std::int32_t> slot_experts;
  const std::vector<IndexSummary> indices;  ///< see Plan::indices
  /// See plan::weight_places; made when it is first needed.
  std::vector<std::int64_t> weight_places;
  // Shared with the exchange, which must take back credit of plans that are gone.
  std::shared_ptr<PlanFlow> flow;
};

/// State behind Exchange on one rank.
class ExchangeState {
 public:
  /// Errors: as the constructor of Exchange.
  ExchangeState(Engine& owner, std::uint32_t number, Placement where, RowShape row_shape,
                const ExchangeOptions& wanted);

  ~ExchangeState();
  ExchangeState(const ExchangeState&) = delete;
  ExchangeState& operator=(const ExchangeState&) = delete;

  Engine& engine;
  const std::shared_ptr<SoleUse> use;  ///< of the transport; the exchange may outlive that
  const std::uint32_t id;
  const Placement placement;
  const RowShape shape;
  const ExchangeOptions options;  ///< defaults filled in
  const plan::ExpertIndex experts;
  /// What plans are made of: the experts, or with token_major one for each rank.
  const plan::ExpertIndex row_owners;
  const Crossings crossings;
  RowPackers packers;
  const Framings framings;
  const std::uint64_t row_bytes;            ///< of the dtype
  const std::uint64_t extra_offset;         ///< of the extra bytes in a window's row
  const std::uint64_t window_stride_bytes;  ///< distance of rows in windows

  std::uint64_t next_place = 0;  ///< see wire::CallId
  std::uint32_t next_plan = 0;
  std::uint64_t metadata_rounds = 0;
  std::vector<wire::MembershipHistory> index_histories;  ///< by node
  std::uint64_t host_stalls = 0;
  double stall_us = 0;
  void add_stall(double us) {
    constexpr double kShortestStall_us = 5;
    if (us <= kShortestStall_us) return;
    ++host_stalls;
    stall_us += us;
  }

  wire::SharedOptions shared_options(int num_topk) const;
  /// What plans of this exchange depend on besides the routing.
  plan::PlanContext plan_context(int num_topk) const;
  /// Routing weights of one row: those of its token, where it stands for several experts.
  std::uint64_t weights_per_row(int num_topk) const {
    return token_major() ? static_cast<std::uint64_t>(num_topk) : 1;
  }
  /// A rank of the node touches nothing of a failed plan any more.
  bool has_left(std::uint32_t plan, int local_rank) const {
    return failures.has_left(plan, local_rank) || board->is_gone(local_rank);
  }
  std::int64_t extra_elements() const {
    return options.extra_bytes / static_cast<std::int64_t>(element_bytes(kExtraDtype));
  }
  bool weighted() const { return options.weights == WeightMode::at_combine; }
  bool token_major() const { return options.layout == Layout::token_major; }

  std::unique_ptr<NodeBoard> board;      ///< the engine takes it over when the exchange goes
  std::optional<Error> refusal_of_next;  ///< of Exchange::refuse_next
  CallOrder order;
  Failures failures;
  /// Calls that are not over, by place.
  std::map<std::uint64_t, std::shared_ptr<Operation>> calls;
  /// Refusals of the call at a place, whatever it is, that has not started here.
  std::map<std::uint64_t, Poison> refused_ahead;
  struct CallKey {
    std::uint32_t plan = 0;
    wire::OpKind kind = wire::OpKind::plan;
    std::uint32_t ordinal = 0;
    explicit CallKey(const wire::CallId& call)
        : plan(call.plan), kind(call.kind), ordinal(call.ordinal) {}
    auto operator<=>(const CallKey&) const = default;
  };
  /// Windows that ranks of the node show for calls that are not over here, by local index.
  std::map<CallKey, std::array<std::vector<ShownWindow>, kWindowRoles>> windows;
  /// Metadata that arrived for a call that opens a plan, by plan.
  std::map<std::uint32_t, std::vector<ArrivedMetadata>> metadata;
  /// Plans by number; those whose handles are all gone are dropped when the next call starts.
  struct KnownPlan {
    std::weak_ptr<PlanState> state;
    std::shared_ptr<PlanFlow> flow;
  };
  std::map<std::uint32_t, KnownPlan> plans;
  /// What arrived for plans that are still being made here.
  struct Early {
    int peer = -1;
    std::uint32_t plan = 0;
    std::optional<ArrivedFragment> fragment;
    wire::Grant grant;
  };
  std::vector<Early> early;

 private:
  const std::weak_ptr<const bool> engine_alive_;
};

}  // namespace ferry::detail
