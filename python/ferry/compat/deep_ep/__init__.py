"""DeepEP's Buffer (V1, the high-throughput calls) for CPU tensors: the same calls, shapes, return
tuples and handle replay, so that a layer written against it runs with

    from ferry.compat.deep_ep import Buffer, EventOverlap   # instead of deep_ep

Rows are Ferry's token_major layout: one per (token, rank), by source rank, then token. Calls are done
when they return, so events are there for their form only. What has no meaning here is taken and
ignored (num_sms, configs, buffer sizes, streams); what Ferry cannot do is refused: FP8 pairs of
tensor and scales, low-latency mode, num_worst_tokens. There is no `get_comm_stream`: nothing runs
on a stream.
Source: DeepEP README, interfaces and examples of V1
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from ferry._exchange import Exchange
from ferry._ferry import Placement
from ferry._group import Group
from ferry.compat.deep_ep.utils import EventHandle, EventOverlap
from ferry.torch import staging
from ferry.torch.dispatcher import dtype_name
from ferry.torch.losses import expert_counts


class ProcessGroup:
    """A ferry Group with rank() and size() as torch.distributed has them."""

    def __init__(self, group: Group) -> None:
        self.ferry_group = group

    def rank(self) -> int:
        return self.ferry_group.rank

    def size(self) -> int:
        return self.ferry_group.size


class Config:
    """DeepEP's tuning of kernels; Ferry sizes its memory by the plan, so the hints are 0."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Handle(NamedTuple):
    """What dispatch gives to combine and to later dispatches: the plan and its exchange."""

    plan: Any
    exchange: Exchange
    num_topk: int


def _refuse(what: str, fix: str) -> None:
    raise ValueError(f"ferry.compat.deep_ep: {what}; fix: {fix}")


def _contiguous(rows: Any) -> Tensor:
    """Window rows as DeepEP gives them; a copy only where rows of the window lie apart."""
    return torch.from_dlpack(rows).contiguous()


class Buffer:
    """DeepEP's Buffer over a ferry Group (or a `ProcessGroup` around one).

    group     the ranks; experts stand on them in equal consecutive blocks
    strategy  of ferry.Exchange, any but "flat"
    Requires: all ranks make the same calls in the same order
    Errors:   ValueError for what Ferry cannot do, and those of ferry.Exchange
    """

    num_sms: int = 20

    def __init__(self, group: Union[Group, ProcessGroup], num_nvl_bytes: int = 0,
                 num_rdma_bytes: int = 0, low_latency_mode: bool = False, num_qps_per_rank: int = 24,
                 *_: Any, strategy: str = "node_dedup", **__: Any) -> None:
        if low_latency_mode:
            _refuse("low_latency_mode = True; allowed: False", "use the calls dispatch and combine")
        own = group.ferry_group if isinstance(group, ProcessGroup) else group
        if not isinstance(own, Group):
            _refuse(f"group is a {type(group).__name__}; allowed: a ferry Group, or ProcessGroup "
                    "around one", "make one with ferry.init() or ferry.run")
        self.group, self.rank, self.group_size = group, own.rank, own.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = False
        self._own, self._strategy = own, strategy
        self._exchanges: Dict[Tuple[int, int, torch.dtype], Exchange] = {}

    @staticmethod
    def is_sm90_compiled() -> bool:
        return False

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Kept, not used."""
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(num_ranks)

    def destroy(self) -> None:
        """Drops the exchanges; no further calls."""
        self._exchanges.clear()

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int,
                            previous_event: Optional[EventOverlap] = None,
                            async_finish: bool = False, allocate_on_comm_stream: bool = False
                            ) -> Tuple[Tensor, Optional[Tensor], Tensor, Tensor, EventOverlap]:
        """Counts of this rank's tokens, without communication.

        Shapes: topk_idx int64 [num_tokens, num_topk], -1 = none
        Returns: num_tokens_per_rank int32 [num_ranks]; num_tokens_per_rdma_rank int32 [num_nodes], None
                 on one node; num_tokens_per_expert int32 [num_experts], by slots: an expert in two
                 slots of a token counts twice; is_token_in_rank bool [num_tokens, num_ranks];
                 event
        """
        self._check_experts(num_experts)
        topk_idx = topk_idx.long()
        num_tokens, ranks = topk_idx.shape[0], self.group_size
        to_expert = self._membership(topk_idx, num_experts)
        in_rank = to_expert.view(num_tokens, ranks, num_experts // ranks).any(-1)
        per_node = None
        topology = self._own.topology
        if topology.num_nodes > 1:
            per_node = torch.stack([in_rank[:, topology.ranks_of(node)].any(-1).sum()
                                    for node in range(topology.num_nodes)]).int()
        per_expert = expert_counts(topk_idx, num_experts).int()
        return in_rank.sum(0).int(), per_node, per_expert, in_rank, EventOverlap()

    @staticmethod
    def _membership(topk_idx: Tensor, num_experts: int) -> Tensor:
        """bool [num_tokens, num_experts]."""
        chosen = torch.zeros(topk_idx.shape[0], num_experts + 1, dtype=torch.bool,
                             device=topk_idx.device)
        at = torch.where(topk_idx < 0, torch.full_like(topk_idx, num_experts), topk_idx)
        return chosen.scatter_(1, at, True)[:, :num_experts]

    def dispatch(self, x: Union[Tensor, Tuple[Tensor, Tensor]], handle: Optional[Handle] = None,
                 num_tokens_per_rank: Optional[Tensor] = None,
                 num_tokens_per_rdma_rank: Optional[Tensor] = None,
                 is_token_in_rank: Optional[Tensor] = None,
                 num_tokens_per_expert: Optional[Tensor] = None,
                 topk_idx: Optional[Tensor] = None, topk_weights: Optional[Tensor] = None,
                 expert_alignment: int = 1, num_worst_tokens: int = 0,
                 config: Optional[Config] = None, previous_event: Optional[EventOverlap] = None,
                 async_finish: bool = False, allocate_on_comm_stream: bool = False
                 ) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[List[int]],
                            Optional[Handle], EventOverlap]:
        """Sends every token once to each rank that holds one of its experts.

        Shapes: x [num_tokens, hidden], bf16, f16 or f32; topk_idx int64, topk_weights float32
                [num_tokens, num_topk]; num_tokens_per_expert as get_dispatch_layout gave it
        With a handle: the same routing again, without metadata; also the backward of combine
        Returns: recv_x [num_recv, hidden]; recv_topk_idx int64 [num_recv, num_topk]: local experts, -1
                 elsewhere; recv_topk_weights float32, 0 elsewhere; tokens per local expert, rounded up
                 to expert_alignment; handle; event. With a handle the four in between are None
        """
        if isinstance(x, tuple):
            _refuse("x is a pair of FP8 values and scales; allowed: a bf16, f16 or f32 tensor",
                    "give the tensor before it is quantised")
        if num_worst_tokens:
            _refuse(f"num_worst_tokens = {num_worst_tokens}; allowed: 0", "leave it out")
        staging.check_device(x, "x", self._own)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                _refuse("a handle and topk_idx or topk_weights are given; allowed: one of them",
                        "leave topk_idx and topk_weights out")
            rows = handle.exchange.dispatch(handle.plan, staging.to_host(x))
            return self._on(x, _contiguous(rows)), None, None, None, None, EventOverlap()
        if topk_idx is None or num_tokens_per_expert is None:
            _refuse("topk_idx or num_tokens_per_expert is missing",
                    "give both, from the router and from get_dispatch_layout")
        return self._first_dispatch(x, topk_idx, topk_weights, num_tokens_per_expert.numel(),
                                    expert_alignment)

    def _first_dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Optional[Tensor],
                        num_experts: int, expert_alignment: int):
        exchange = self._exchange(num_experts, x)
        weights = torch.ones(topk_idx.shape) if topk_weights is None else topk_weights
        host_weights = staging.to_host(weights.float()).contiguous()
        plan = exchange.plan(staging.to_host(topk_idx).contiguous(), host_weights)
        rows = _contiguous(exchange.dispatch(plan, staging.to_host(x)))
        num_topk = topk_idx.shape[1]
        recv_idx = torch.from_numpy(plan.topk_idx.copy()).long().reshape(-1, num_topk)
        recv_weights = torch.from_numpy(plan.topk_weights.copy()).reshape(-1, num_topk)
        counts = [-(-int(count) // expert_alignment) * expert_alignment
                  for count in plan.expert_counts]
        handle = Handle(plan, exchange, num_topk)
        return (self._on(x, rows), self._on(x, recv_idx),
                None if topk_weights is None else self._on(x, recv_weights), counts, handle,
                EventOverlap())

    def combine(self, x: Tensor, handle: Handle, topk_weights: Optional[Tensor] = None,
                bias: Union[Tensor, Sequence[Tensor], None] = None,
                config: Optional[Config] = None, previous_event: Optional[EventOverlap] = None,
                async_finish: bool = False, allocate_on_comm_stream: bool = False
                ) -> Tuple[Tensor, Optional[Tensor], EventOverlap]:
        """Sums rows home, unweighted; also the backward of dispatch.

        Shapes: x [num_recv, hidden]; topk_weights float32 [num_recv, num_topk]: values to bring home
                beside the rows, such as gradients of recv_topk_weights; all ranks give them, or none;
                bias: one or two of [num_tokens, hidden], added to the result
        Returns: [num_tokens, hidden]; float32 [num_tokens, num_topk], 0 where a slot names no expert,
                 or None; event
        """
        plan, exchange = handle.plan, handle.exchange
        staging.check_device(x, "x", self._own)
        out = torch.empty(plan.num_tokens, exchange.hidden, dtype=x.dtype)
        home: Optional[Tensor] = None
        if topk_weights is None:
            exchange.combine(plan, staging.to_host(x), out)
        else:
            home = torch.empty(plan.num_tokens, handle.num_topk)
            exchange.dispatch_backward(
                plan, staging.to_host(x), grad_x=out, grad_weights=home,
                grad_row_weights=staging.to_host(topk_weights.float()).contiguous())
            home = self._on(x, home)
        out = self._on(x, out)
        for one in ([bias] if isinstance(bias, Tensor) else bias or ()):
            out = (out.float() + one.float()).to(out.dtype)
        return out, home, EventOverlap()

    @staticmethod
    def _on(like: Tensor, host: Tensor) -> Tensor:
        return staging.to_device(host, like.device)

    def _check_experts(self, num_experts: int) -> None:
        if num_experts < 1 or num_experts % self.group_size:
            _refuse(f"num_experts = {num_experts}; allowed: a multiple of {self.group_size}, the ranks",
                    "use ferry.torch.MoELayer, which takes any placement")

    def _exchange(self, num_experts: int, x: Tensor) -> Exchange:
        """One per shape, made at its first use: by all ranks at the same call."""
        self._check_experts(num_experts)
        key = (num_experts, x.shape[1], x.dtype)
        if key not in self._exchanges:
            placement = Placement.contiguous(num_experts, self.group_size)
            self._exchanges[key] = Exchange(self._own, placement, x.shape[1], dtype_name(x.dtype),
                                            layout="token_major", weights="at_expert",
                                            strategy=self._strategy)
        return self._exchanges[key]
