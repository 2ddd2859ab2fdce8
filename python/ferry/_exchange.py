"""The exchange of one expert-parallel group: plan, dispatch, combine."""

from __future__ import annotations

from typing import Any

from . import _ferry
from ._group import Group


def choose_wires(dtype: str = "bf16", max_relative_error: float = 0, *,
                 link_bytes_per_s_per_rank: float = 0, quantise_combine: bool = False,
                 round_gradients: bool = True) -> dict[str, Any]:
    """Options of `Exchange` for the wire formats that suit an error (docs/wire-formats.md).

    Parameters
    ----------
    dtype: of the rows
    max_relative_error: largest error of a row: root mean square, over that of its values; 0 = none
    link_bytes_per_s_per_rank: of a node's link, over its ranks; 0 = not known, taken to be slow
    quantise_combine: outputs too, although they are added to the residual stream or go into a
        LayerNorm
    round_gradients: to bf16 where the dtype is "f32"

    Errors: InvalidArgumentError
    """
    return _ferry.choose_wires(dtype, max_relative_error, link_bytes_per_s_per_rank,
                               quantise_combine, round_gradients)


class Exchange:
    """Carries rows of one shape between the ranks of a group.

    All ranks make their exchanges, and the calls of each, in the same order. Arrays are NumPy's or
    anything with __dlpack__ in host memory, such as torch tensors; none is copied on the way in.
    bf16 in NumPy is uint16. Rows may lie apart (a stride); elements of a row may not. What is wrong
    with the arrays of one rank ends the call on every rank, with the same text.

    Parameters
    ----------
    group: the ranks, from `ferry.run`, `ferry.init` or `Group.subgroup`
    placement: which rank holds which expert
    hidden: elements of a row
    dtype: "f32", "bf16" or "f16"
    options: by name, the same on all ranks
        strategy: "node_dedup" (default), "flat", "rank_dedup", "node_gather"
        layout: "expert_major" (default), "token_major"
        weights: "at_combine" (default), "at_expert", "none"
        row_alignment: each expert's rows start at a multiple of it; 1
        extra_bytes: bytes that travel with each row of x, a multiple of 4; 0
        row_sources: plans say where each row comes from; False
        wire_dispatch, wire_combine: format of rows between nodes, "f32", "bf16", "f16",
            "fp8_e4m3fn", "int8", "sparse_f32", "sparse_bf16" or "sparse_f16"; None = the dtype
        wire_combine_backward, wire_dispatch_backward: the same for gradients; None = as dispatch
            and combine, but the dtype where these are quantised or sparse
        wire_block_columns: columns that share a scale in "fp8_e4m3fn" and "int8", or of which
            sparse formats keep the largest values; 128
        max_relative_error: quantised rows with a larger one (root mean square, over that of the
            values) cross as bf16 (rows of f16 on the way out as they are); 0 or None = no
            limit
        wire_sparse_ratio: share of the values that sparse formats keep; 1 = all but zeros
        wire: "auto" chooses the formats that are not named from max_relative_error, as
            `ferry.choose_wires` does; the limit stands where any format is quantised, and goes
            with no sparse one that has a wire_sparse_ratio below 1
        link_bits_per_s: with wire="auto", the rate of a node's link, which its ranks share; 0 = not
            known, taken to be slow
        fragment_bytes, range_tokens: 0 = as the transport likes; ranges_in_flight: 3
        checksum_payload: True

    Errors: InvalidArgumentError (shape, placement, options)
    """

    def __init__(self, group: Group, placement: _ferry.Placement, hidden: int, dtype: str = "bf16",
                 **options: Any) -> None:
        self._core = _ferry.ExchangeCore(group._core, placement, hidden, dtype, options)
        self._group = group
        self._placement = placement

    @property
    def group(self) -> Group:
        """The group it was made with."""
        return self._group

    @property
    def placement(self) -> _ferry.Placement:
        """Which rank holds which expert."""
        return self._placement

    @property
    def hidden(self) -> int:
        """Elements of a row."""
        return self._core.hidden

    @property
    def dtype(self) -> str:
        """Element type of rows: "f32", "bf16" or "f16"."""
        return self._core.dtype

    @property
    def options(self) -> dict[str, Any]:
        """As given, with defaults filled in."""
        return self._core.options

    @property
    def metadata_rounds(self) -> int:
        """Rounds of metadata between nodes so far: one per plan."""
        return self._core.metadata_rounds()

    @property
    def wire_statistics(self) -> dict[str, dict[str, int]]:
        """What this rank sent to other nodes, for "dispatch", "combine", "combine_backward" and
        "dispatch_backward": "rows", "escalated_rows" beyond max_relative_error, and
        "payload_bytes" of rows as they crossed, without headers and extra bytes."""
        return self._core.wire_statistics()

    @property
    def host_stalls(self) -> int:
        """Times that a wait stood still for more than 5 µs, because a size or an id of another
        rank had not come yet."""
        return self._core.host_stalls()

    @property
    def stall_us(self) -> float:
        """How long they took together, in microseconds."""
        return self._core.stall_us()

    def plan(self, topk_idx: Any, topk_weights: Any = None, *,
             gathering: _ferry.Pending[_ferry.ExpertRows] | None = None) -> _ferry.Plan:
        """Exchanges counts and ids: the only metadata round of a layer and step.

        Shapes: topk_idx [num_tokens, num_topk], int32 or int64, -1 = no expert;
                topk_weights the same shape, float32, or None for 1/num_topk each
        gathering: what start_gather gave, for the plan of a dispatch that has begun
        Errors: InvalidArgumentError (ids, weights), MismatchError (options), PeerTimeoutError,
                PeerFailedError; the same on every rank
        """
        return self.start_plan(topk_idx, topk_weights, gathering=gathering).wait()

    def start_plan(self, topk_idx: Any, topk_weights: Any = None, *,
                   gathering: _ferry.Pending[_ferry.ExpertRows] | None = None
                   ) -> _ferry.Pending[_ferry.Plan]:
        """plan() that does not wait."""
        return self._core.start_plan(topk_idx, topk_weights, gathering)

    def dispatch(self, plan: _ferry.Plan, x: Any, extra: Any = None) -> _ferry.ExpertRows:
        """Sends every token to the ranks that hold its experts.

        Shapes: x [num_tokens, hidden] in the exchange's dtype; extra [num_tokens, extra_bytes],
                uint8
        Returns: rows [num_rows, hidden] in this rank's window, in the order of the layout
        Errors: InvalidArgumentError, StalePlanError, LimitExceededError, PeerTimeoutError,
                PeerFailedError
        """
        return self.start_dispatch(plan, x, extra).wait()

    def start_dispatch(self, plan: _ferry.Plan, x: Any, extra: Any = None
                       ) -> _ferry.Pending[_ferry.ExpertRows]:
        """dispatch() that does not wait. x and extra must not change until it is done."""
        return self._core.start_dispatch(plan, x, extra)

    def start_gather(self, x: Any, extra: Any = None) -> _ferry.Pending[_ferry.ExpertRows]:
        """Starts a dispatch before routing is known, with strategy node_gather.

        plan(topk_idx, topk_weights, gathering=pending) takes it up; pending.wait() then gives the
        rows.
        Shapes: as dispatch
        Errors: UnsupportedError for other strategies; else as plan and dispatch
        """
        return self._core.start_gather(x, extra)

    def plan_and_dispatch(self, topk_idx: Any, topk_weights: Any, x: Any, extra: Any = None
                          ) -> tuple[_ferry.Plan, _ferry.ExpertRows]:
        """plan and dispatch in one call, for small batches: rows leave with the metadata.

        Shapes: as plan and dispatch
        Errors: as plan and dispatch
        """
        return self.start_plan_and_dispatch(topk_idx, topk_weights, x, extra).wait()

    def start_plan_and_dispatch(self, topk_idx: Any, topk_weights: Any, x: Any, extra: Any = None
                                ) -> _ferry.Pending[tuple[_ferry.Plan, _ferry.ExpertRows]]:
        """plan_and_dispatch() that does not wait."""
        return self._core.start_plan_and_dispatch(topk_idx, topk_weights, x, extra)

    def output(self, plan: _ferry.Plan) -> _ferry.OutputRows:
        """Memory of this rank's window for the experts' outputs. Never waits.

        Returns: rows [num_rows, hidden], not initialised
        Errors: StalePlanError, LimitExceededError with the holders of the pool
        """
        return self._core.output(plan)

    def combine(self, plan: _ferry.Plan, y: Any, out: Any = None) -> Any:
        """Brings expert outputs home: out[t] = sum over slots j of weight[t,j] * y(t,j).

        With weights at the expert or none: the sum over its experts (expert_major) or ranks
        (token_major) of y.
        Shapes: y [num_rows, hidden], best output(plan) or the dispatched rows, else it is copied
                once; out [num_tokens, hidden], None = a new array. Both in the exchange's dtype
        Returns: out; a new one is NumPy's where y is, else a `ferry.Array` (torch.from_dlpack).
                Tokens without an expert get 0
        Errors: InvalidArgumentError, StalePlanError, LimitExceededError, PeerTimeoutError,
                PeerFailedError
        """
        return self.start_combine(plan, y, out).wait()

    def start_combine(self, plan: _ferry.Plan, y: Any, out: Any = None) -> _ferry.Pending[Any]:
        """combine() that does not wait. y must not change until it is done."""
        return self._core.start_combine(plan, y, out)

    def combine_backward(self, plan: _ferry.Plan, grad_out: Any, y: Any = None,
                         grad_weights: Any = None) -> _ferry.GradRows:
        """Takes the gradient of combine's result to the experts.

        Row (t, j) becomes weight[t,j] * grad_out[t] with weights at combine, else grad_out[t]. With
        grad_weights, grad_weights[t,j] = grad_out[t] . y(t,j) in FP32, 0 where a slot names none.
        Shapes: grad_out [num_tokens, hidden]; y [num_rows, hidden], as combine read it, only needed
                for grad_weights; grad_weights [num_tokens, num_topk], float32, is filled. All ranks
                give grad_weights, or none does
        Returns: rows [num_rows, hidden] in this rank's window
        Errors: InvalidArgumentError, MismatchError, StalePlanError, LimitExceededError,
                PeerTimeoutError, PeerFailedError
        """
        return self.start_combine_backward(plan, grad_out, y, grad_weights).wait()

    def start_combine_backward(self, plan: _ferry.Plan, grad_out: Any, y: Any = None,
                               grad_weights: Any = None) -> _ferry.Pending[_ferry.GradRows]:
        """combine_backward() that does not wait."""
        return self._core.start_combine_backward(plan, grad_out, y, grad_weights)

    def dispatch_backward(self, plan: _ferry.Plan, grad_rows: Any, grad_row_weights: Any = None,
                          grad_x: Any = None, grad_weights: Any = None) -> Any:
        """Brings gradients of the dispatched rows home: grad_x[t] = their sum over rows of token t.

        Shapes: grad_rows [num_rows, hidden], best the memory of a window; grad_x [num_tokens,
                hidden], None = a new array. With weights at the expert also grad_row_weights, the
                gradients of plan.row_sources.weight [num_rows] or, token_major, of
                plan.topk_weights [num_rows, num_topk], and grad_weights [num_tokens, num_topk],
                both float32; all ranks give them, or none does. grad_weights is filled
        Returns: grad_x; a new one is NumPy's where grad_rows is, else a `ferry.Array`
        Errors: InvalidArgumentError, MismatchError, StalePlanError, LimitExceededError,
                PeerTimeoutError, PeerFailedError
        """
        return self.start_dispatch_backward(plan, grad_rows, grad_row_weights, grad_x,
                                            grad_weights).wait()

    def start_dispatch_backward(self, plan: _ferry.Plan, grad_rows: Any,
                                grad_row_weights: Any = None, grad_x: Any = None,
                                grad_weights: Any = None) -> _ferry.Pending[Any]:
        """dispatch_backward() that does not wait."""
        return self._core.start_dispatch_backward(plan, grad_rows, grad_row_weights, grad_x,
                                                  grad_weights)

    def __repr__(self) -> str:
        return (f"ferry.Exchange(hidden={self.hidden}, dtype={self.dtype!r}, "
                f"strategy={self.options['strategy']!r})")
