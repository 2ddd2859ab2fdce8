"""The exchange of an expert-parallel group with gradients, for layers of one's own.

    tokens = dispatcher.dispatch(x, topk_idx, topk_weights)
    y = experts(tokens.rows, tokens.expert_counts, out=tokens.output())
    out = dispatcher.combine(tokens, y)

`ferry.torch.MoELayer` is built on the same parts and pipelines them.
"""

from typing import Any, Optional, Sequence, Tuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ferry._exchange import Exchange
from ferry.torch.exchange_call import ExchangeCall

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def dtype_name(dtype: torch.dtype) -> str:
    """Ferry's name of a dtype. Errors: ValueError with the allowed ones."""
    if dtype not in _NAMES:
        raise ValueError(f"dtype = {dtype}; allowed: {', '.join(str(d) for d in _NAMES)}")
    return _NAMES[dtype]


class ExpertTokens:
    """What dispatch brought.

    rows            [num_rows, hidden], differentiable, in this rank's window
    row_weights     float32 [num_rows], differentiable, with weights="at_expert"; else None
    expert_counts   rows of each local expert; expert_offsets: their first rows
    plan            the Ferry plan
    """

    def __init__(self, call: ExchangeCall, rows: Tensor, row_weights: Optional[Tensor],
                 topk_weights: Tensor) -> None:
        self.rows, self.row_weights, self.plan = rows, row_weights, call.plans[0]
        self._call, self._topk_weights = call, topk_weights

    @property
    def expert_counts(self) -> Sequence[int]:
        return self.plan.expert_counts

    @property
    def expert_offsets(self) -> Sequence[int]:
        return self.plan.expert_offsets

    def output(self) -> Optional[Tensor]:
        """[num_rows, hidden]: window memory where y is best written; None for CUDA tensors."""
        return self._call.output(0)


class Dispatcher:
    """plan, dispatch and combine as differentiable operations.

    group      a ferry Group: the expert-parallel group, the world or any sub-group
    placement  a ferry Placement: which of its ranks holds which expert
    hidden, dtype   of a row; torch.float32, bfloat16 or float16
    options    of ferry.Exchange: strategy, weights, wire_combine, ...; the layout is expert_major
    Requires:  all ranks of the group make the same calls in the same order, and all run backward, or
               none; a dispatcher is used by one thread
    Errors:    ValueError (dtype, layout), and those of ferry.Exchange
    """

    def __init__(self, group: Any, placement: Any, hidden: int,
                 dtype: torch.dtype = torch.float32, **options: Any) -> None:
        if options.get("layout", "expert_major") != "expert_major":
            raise ValueError(f"Dispatcher: layout = {options['layout']!r}; allowed: 'expert_major'; "
                             "fix: use ferry.Exchange for the other one")
        self.group, self.dtype, self.hidden = group, dtype, hidden
        self.exchange = Exchange(group, placement, hidden, dtype_name(dtype), **options)
        self._routing: "WeakKeyDictionary[Any, Tuple[Tensor, Tensor]]" = WeakKeyDictionary()

    @property
    def metadata_rounds(self) -> int:
        """Rounds of metadata so far: one per plan."""
        return self.exchange.metadata_rounds

    def check(self, x: Tensor) -> None:
        """Errors: ValueError that names shape and dtype of x and what is allowed"""
        if x.dim() != 2 or x.shape[1] != self.hidden or x.dtype != self.dtype:
            raise ValueError(f"dispatch: x is {x.dtype} {list(x.shape)}; allowed: {self.dtype} "
                             f"[num_tokens, {self.hidden}], as given to the Dispatcher")

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *,
                 plan: Optional[Any] = None) -> ExpertTokens:
        """Sends every token to its experts.

        Shapes: x [T, hidden]; topk_idx int64 or int32 [T, k], -1 = none; topk_weights float32 [T, k]
        plan:   `plan` of what an earlier call returned, with the same topk_idx and topk_weights on
                every rank: no metadata is exchanged
        Errors: ValueError (shapes; a plan of other routing, or of another dispatcher), and those of
                ferry.Exchange.plan and dispatch
        """
        self.check(x)
        if plan is not None:
            self._check_routing(plan, topk_idx, topk_weights)
        call = ExchangeCall(self.exchange, x, [(0, x.shape[0])])
        call.enter()
        if plan is None:
            call.start_plan(0, topk_idx, topk_weights)
        else:
            call.plans[0] = plan
        call.start_dispatch(0)
        if plan is None:
            # Copies: the caller may change theirs in place.
            self._routing[call.plans[0]] = (topk_idx.detach().clone(), topk_weights.detach().clone())
        return ExpertTokens(call, *call.finish_dispatch(0, topk_weights), topk_weights)

    def _check_routing(self, plan: Any, topk_idx: Tensor, topk_weights: Tensor) -> None:
        known = self._routing.get(plan)
        if known is None:
            raise ValueError("dispatch: the plan is not one of this Dispatcher; allowed: `plan` of "
                             "what its dispatch returned; fix: give that, or leave plan out")
        for name, given, wanted in (("topk_idx", topk_idx, known[0]),
                                    ("topk_weights", topk_weights, known[1])):
            if given.shape != wanted.shape or not torch.equal(given.to(wanted), wanted):
                raise ValueError(f"dispatch: {name} {list(given.shape)} is not what the plan was "
                                 f"made for, {list(wanted.shape)}; allowed: the same values; fix: "
                                 "leave plan out where the routing is another one")

    def combine(self, tokens: ExpertTokens, y: Tensor) -> Tensor:
        """out [T, hidden]: out[t] = sum_j topk_weights[t,j] * y(t,j), with weights at combine; else the
        sum of y. Once per dispatch.

        Shapes: y [num_rows, hidden], best the memory of tokens.output(), else it is copied once
        Errors: those of ferry.Exchange.combine
        """
        tokens._call.start_combine(0, y, tokens._topk_weights)
        return tokens._call.finish()

    def __deepcopy__(self, memo: dict) -> "Dispatcher":
        """Copies of a model exchange over the same group."""
        return self
