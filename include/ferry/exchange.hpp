#pragma once
// The exchange of one expert-parallel group: plan, dispatch, combine, and the way back through them
// with gradients.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ferry/error.hpp"
#include "ferry/index_encoding.hpp"
#include "ferry/matrix.hpp"
#include "ferry/options.hpp"
#include "ferry/pending.hpp"
#include "ferry/placement.hpp"
#include "ferry/routing.hpp"
#include "ferry/row_sources.hpp"
#include "ferry/transport.hpp"

namespace ferry {

namespace detail {
class ExchangeState;
class PlanState;
class SlotLease;
}  // namespace detail

/// What one kind of call sent to other nodes.
struct WireUse {
  std::uint64_t rows = 0;
  std::uint64_t escalated_rows = 0;  ///< of them, beyond max_relative_error
  std::uint64_t payload_bytes = 0;   ///< of rows as they crossed, without headers and extra bytes
};

/// What this rank sent since the exchange was made, by kind of call. Gradients of routing weights
/// are not counted.
struct WireStatistics {
  WireUse dispatch;
  WireUse combine;
  WireUse combine_backward;
  WireUse dispatch_backward;
};

/// Rows and bytes of a plan, known before anything is sent. Bytes count what this rank sends.
/// inter_node_bytes_* are exact, except where the size of a row depends on its values: with
/// max_relative_error the least that quantised rows may take, none of which escalates; of sparse
/// formats the most, the bytes of dense rows. Exchange::wire_statistics counts what was sent.
struct PlanSummary {
  std::int64_t rows_received = 0;               ///< of this rank, without alignment rows
  std::uint64_t window_bytes = 0;               ///< exact size of those rows in the window
  std::uint64_t metadata_bytes = 0;             ///< sent to other nodes while planning
  std::uint64_t index_bytes = 0;                ///< of them: which tokens come to which experts
  std::uint64_t inter_node_bytes_dispatch = 0;  ///< fragments with headers
  std::uint64_t inter_node_bytes_combine = 0;
  std::uint64_t inter_node_bytes_combine_backward = 0;
  std::uint64_t inter_node_bytes_dispatch_backward = 0;
  /// What gradients of weights add to the backward operation that they travel in.
  std::uint64_t inter_node_bytes_grad_weights = 0;
  std::uint64_t inter_node_rows_dispatch = 0;
  std::uint64_t inter_node_rows_combine = 0;
  std::uint64_t inter_socket_bytes_dispatch = 0;  ///< row pushes to another socket of the node
};

/// Who sends which rows where, for one routing: made once, replayed any number of times, forward
/// and backward. A handle: copies share the same plan.
class Plan {
 public:
  /// Rows of this rank's window, alignment rows included.
  std::int64_t num_rows() const;
  /// Tokens of this rank's routing: rows of x and out.
  std::int64_t num_tokens() const;
  /// Rows that each local expert works on, in ascending expert id.
  std::span<const std::int64_t> expert_counts() const;
  /// First row of each local expert, with num_rows at the end; empty with token_major.
  std::span<const std::int64_t> expert_offsets() const;
  /// Global ids of the local experts, ascending.
  std::span<const std::int32_t> local_experts() const;
  const PlanSummary& summary() const;
  /// How its metadata names tokens and experts to each other node, ascending.
  std::span<const IndexSummary> indices() const;
  /// Empty unless options.row_sources, token_major or weights at the expert.
  const RowSources& row_sources() const;
  /// token_major: [num_rows, num_topk], which local expert (0..num_local_experts-1) a slot names;
  /// -1 where it names none, one of another rank, or one that an earlier slot names. Else empty.
  std::span<const std::int32_t> topk_idx() const;
  /// token_major: [num_rows, num_topk], the weight for that expert, summed over the slots that name
  /// it; 0 elsewhere, and 1 with weights none. Else empty.
  std::span<const float> topk_weights() const;

  explicit Plan(std::shared_ptr<detail::PlanState> state) : state_(std::move(state)) {}
  const std::shared_ptr<detail::PlanState>& state() const { return state_; }

 private:
  // Shared by the caller's handles and by operations that run on it.
  std::shared_ptr<detail::PlanState> state_;
};

/// Rows in this rank's window, in the order of the layout. Owns the window slot: the
/// rows stay as they are until the handle goes, on any thread, also after the transport.
class WindowRows {
 public:
  /// [num_rows, hidden]; rows start at 64-byte boundaries.
  Matrix matrix() const { return matrix_; }
  std::int64_t num_rows() const { return matrix_.rows; }
  const Plan& plan() const { return plan_; }

  WindowRows(Plan plan, Matrix matrix, std::unique_ptr<detail::SlotLease> lease);
  WindowRows(WindowRows&&) noexcept;
  WindowRows& operator=(WindowRows&&) noexcept;
  ~WindowRows();

 private:
  Plan plan_;
  Matrix matrix_;
  std::unique_ptr<detail::SlotLease> lease_;
};

/// What dispatch brought: the tokens for this rank's experts.
class ExpertRows : public WindowRows {
 public:
  ExpertRows(WindowRows rows, std::int64_t extra_offset, std::int64_t extra_bytes)
      : WindowRows(std::move(rows)), extra_offset_(extra_offset), extra_bytes_(extra_bytes) {}
  /// The extra bytes that came with a row, at a multiple of 16; empty unless options.extra_bytes.
  std::span<const std::byte> extra(std::int64_t row) const {
    return {static_cast<const std::byte*>(matrix().data) + row * matrix().stride_bytes() +
                extra_offset_,
            static_cast<std::size_t>(extra_bytes_)};
  }

 private:
  std::int64_t extra_offset_;
  std::int64_t extra_bytes_;
};

/// What plan_and_dispatch gives.
struct Dispatched {
  Plan plan;
  ExpertRows rows;
};

/// Where the experts' outputs are best written: combine then reads them in place.
class OutputRows : public WindowRows {
 public:
  using WindowRows::WindowRows;
};

/// Gradients of the experts' outputs, in the same places.
class GradRows : public WindowRows {
 public:
  using WindowRows::WindowRows;
};

/// What combine_backward is given.
struct CombineBackwardInput {
  ConstMatrix grad_out;  ///< [num_tokens, hidden]
  /// The outputs as combine read them, [num_rows, hidden]: only read for gradients of weights. Best
  /// the memory of output(plan), unchanged since; anything else costs one copy.
  ConstMatrix y{};
};

/// What dispatch_backward is given.
struct DispatchBackwardInput {
  ConstMatrix grad_rows;  ///< [num_rows, hidden], best the memory of a window; else one copy
  /// Weights at the expert: gradients of Plan::row_sources().weight, [num_rows], or with
  /// token_major of Plan::topk_weights(), [num_rows, num_topk]; those of slots without an expert
  /// go nowhere.
  std::optional<std::span<const float>> grad_row_weights{};
};

/// What dispatch_backward fills.
struct DispatchBackwardOutput {
  Matrix grad_x;  ///< [num_tokens, hidden]
  std::optional<std::span<float>>
      grad_weights{};  ///< [num_tokens, num_topk], with grad_row_weights
};

/// After a failure: a call may fail on one rank and end well on another that needed nothing from
/// the refuser; every later call on that plan then ends with the same error on every rank. Plans in
/// flight and new plans are not touched by it, whichever calls on the failed one a rank left out.
/// All ranks make the same calls of plan(), also after a failure.
class Exchange {
 public:
  /// Joins the transport's ranks in an exchange. Makes no message; ranks that disagree learn it at
  /// the first plan.
  /// Requires: all ranks make their exchanges in the same order.
  /// Errors:   invalid_argument (shape, placement, options), unsupported (replicas)
  Exchange(Transport& transport, Placement placement, RowShape shape, ExchangeOptions options = {});
  Exchange(Exchange&&) noexcept;
  Exchange& operator=(Exchange&&) noexcept;
  ~Exchange();

  /// Exchanges counts and ids: the only metadata round of a layer and step.
  /// Requires: the same sequence of calls on all ranks; `routing` stays alive until done
  /// Ensures:  a plan that every later operation replays without further metadata
  /// Cost:     one message per (rank, remote node), one node barrier; linear in num_tokens
  /// Errors:   invalid_argument (ids, weights), mismatch (options), timeout, peer_failed; the same
  ///           on every rank
  Plan plan(const Routing& routing);
  Pending<Plan> start_plan(const Routing& routing);
  /// The plan of a dispatch that was started by start_gather.
  /// Errors: also invalid_argument when num_tokens differs from the rows of its x
  Plan plan(const Routing& routing, Pending<ExpertRows>& gathering);
  Pending<Plan> start_plan(const Routing& routing, Pending<ExpertRows>& gathering);

  /// Sends every token to the ranks that hold its experts.
  /// Shapes:   x [num_tokens, hidden], the exchange's dtype; extra [num_tokens x extra_bytes]
  /// Requires: x and extra stay alive and unchanged until done
  /// Ensures:  rows in the order of the layout, in this rank's window
  /// Cost:     one row copy per (token, expert) inside a node; see Strategy for what crosses nodes
  /// Errors:   invalid_argument, stale_plan, limit_exceeded, timeout, peer_failed
  ExpertRows dispatch(const Plan& plan, ConstMatrix x, std::span<const std::byte> extra = {});
  Pending<ExpertRows> start_dispatch(const Plan& plan, ConstMatrix x,
                                     std::span<const std::byte> extra = {});

  /// Starts a dispatch before routing is known: with node_gather every token goes to every node,
  /// whatever the routing. A later plan(routing, gathering) takes it up, and gathering.wait() gives
  /// the rows. Rows of other ranks are staged until then, up to gather_staging_bytes on each rank.
  /// Shapes:   as dispatch
  /// Requires: all ranks start it; each takes it up with its next plan of that kind, in order
  /// Errors:   unsupported for other strategies; else as plan and dispatch
  Pending<ExpertRows> start_gather(ConstMatrix x, std::span<const std::byte> extra = {});

  /// plan and dispatch in one call, for small batches: up to 64 KiB of payload per node leave with
  /// the metadata, without waiting for the plan.
  /// Shapes:   x [num_tokens of the routing, hidden]
  /// Errors:   as plan and dispatch
  Dispatched plan_and_dispatch(const Routing& routing, ConstMatrix x,
                               std::span<const std::byte> extra = {});
  Pending<Dispatched> start_plan_and_dispatch(const Routing& routing, ConstMatrix x,
                                              std::span<const std::byte> extra = {});

  /// Memory of this rank's window for the experts' outputs, one row per expert row. Never waits.
  /// Errors: limit_exceeded, with the holders of the pool
  OutputRows output(const Plan& plan);

  /// Brings expert outputs home: out[t] = sum over slots j of weight[t,j] * y(t,j), with weights at
  /// combine. Else out[t] = sum over its experts (expert_major) or ranks (token_major) of y.
  /// Shapes:   y [num_rows, hidden], best the memory of output(plan) or of the dispatched rows;
  ///           anything else costs one copy. out [num_tokens, hidden]. Both the exchange's dtype.
  /// Ensures:  out rows of tokens without an expert are 0; y may be overwritten once done
  /// Source:   the sum is one fixed tree in FP32, rounded once; docs/decisions.md
  /// Errors:   invalid_argument, stale_plan, limit_exceeded, timeout, peer_failed
  void combine(const Plan& plan, ConstMatrix y, Matrix out);
  Pending<void> start_combine(const Plan& plan, ConstMatrix y, Matrix out);

  /// Takes the gradient of combine's result to the experts: row (t, j) becomes weight[t,j] *
  /// grad_out[t] with weights at combine, else grad_out[t]; alignment rows become 0. With
  /// grad_weights, grad_weights[t,j] = grad_out[t] . y(t,j) in FP32, the same for every slot that
  /// names an expert, and 0 where a slot names none.
  /// Shapes:   grad_out [num_tokens, hidden]; y [num_rows, hidden]; grad_weights [num_tokens,
  ///           num_topk]; the result [num_rows, hidden] in this rank's window
  /// Requires: all ranks want grad_weights, or none does; inputs stay alive until done
  /// Ensures:  rows in the order of the layout; y unchanged
  /// Cost:     as dispatch, over the rows of combine; with grad_weights also one read of y in place
  ///           and 4 bytes back per (token, expert) of other nodes. No metadata
  /// Errors:   invalid_argument (shapes; grad_weights unless weights are at combine), mismatch,
  ///           stale_plan, limit_exceeded, timeout, peer_failed
  GradRows combine_backward(const Plan& plan, const CombineBackwardInput& input,
                            std::optional<std::span<float>> grad_weights = std::nullopt);
  Pending<GradRows> start_combine_backward(
      const Plan& plan, const CombineBackwardInput& input,
      std::optional<std::span<float>> grad_weights = std::nullopt);

  /// Brings gradients of the dispatched rows home: grad_x[t] = their sum over the rows of token t,
  /// in the tree of combine, unweighted. Gradients of row weights travel beside them.
  /// Shapes:   see DispatchBackwardInput and DispatchBackwardOutput
  /// Requires: all ranks give grad_row_weights, or none does; they and inputs stay alive until done
  /// Ensures:  grad_x rows of tokens without an expert are 0
  /// Cost:     as combine; 4 bytes more per (token, expert) of other nodes' tokens, with
  ///           token_major 4 num_topk per (token, rank). No metadata
  /// Errors:   invalid_argument (shapes; weights unless they are at the expert), mismatch,
  ///           stale_plan, limit_exceeded, timeout, peer_failed
  void dispatch_backward(const Plan& plan, const DispatchBackwardInput& input,
                         const DispatchBackwardOutput& output);
  Pending<void> start_dispatch_backward(const Plan& plan, const DispatchBackwardInput& input,
                                        const DispatchBackwardOutput& output);

  /// Refuses the next call that is started here: it fails with `error` on every rank, as it does
  /// where Ferry refuses its arguments. For bindings, whose callers can pass what no argument type
  /// here can hold.
  void refuse_next(const Error& error);

  const Placement& placement() const;
  const RowShape& shape() const;
  /// As given, with defaults filled in (wire formats, fragment and range sizes).
  const ExchangeOptions& options() const;
  /// What Plan::indices() of a plan of this routing is to be measured by. For reports: it tries all
  /// encodings, and sends nothing.
  /// Errors: invalid_argument (ids, weights)
  std::vector<IndexBounds> index_bounds(const Routing& routing) const;
  /// Metadata rounds made so far: one per plan.
  std::uint64_t metadata_rounds() const;
  /// Times that a wait() stood still for more than 5 us, because a size or an id of another rank
  /// had not come yet: measured, so a plan whose metadata was there in time counts for nothing.
  std::uint64_t host_stalls() const;
  /// How long they took together, in microseconds.
  double stall_us() const;
  /// Rows and bytes that crossed between nodes, and how many rows escalated.
  WireStatistics wire_statistics() const;

 private:
  // Shared by this handle and by operations that still run.
  std::shared_ptr<detail::ExchangeState> state_;
};

/// Limits and times that belong to a transport and all its exchanges.
struct TransportLimits {
  double deadline_s = 300;                          ///< since a peer's last sign of life
  std::uint64_t pool_limit_bytes = 64ULL << 30;     ///< window slots of this rank
  std::uint64_t metadata_limit_bytes = 1ULL << 30;  ///< one metadata message
  /// Tokens of one rank in one plan, the same on all ranks. A peer that says more is refused: some
  /// memory of a plan grows with the tokens of its sources, however few of them come.
  std::uint64_t num_tokens_limit = 1ULL << 24;
  /// Rows that start_gather stages on this rank before their plan, split over their sources.
  std::uint64_t gather_staging_bytes = 64ULL << 20;
};
void set_limits(Transport& transport, const TransportLimits& limits);

/// Bytes of window slots that this rank has reserved.
std::uint64_t pool_bytes(const Transport& transport);
/// The most memory that fragments to and from other nodes have taken on this rank so far.
std::uint64_t staging_bytes(const Transport& transport);
/// Fills the free window slots of this rank with a byte, so that a test finds stale reads.
void poison_free_slots(Transport& transport, unsigned char value);

/// Returns when every rank has called it; other operations of the transport go on meanwhile.
void barrier(Transport& transport);
/// Every rank's bytes, by rank. Sizes may differ.
std::vector<std::vector<std::byte>> all_gather(Transport& transport,
                                               std::span<const std::byte> mine);
Pending<std::vector<std::vector<std::byte>>> start_all_gather(Transport& transport,
                                                              std::span<const std::byte> mine);

}  // namespace ferry
