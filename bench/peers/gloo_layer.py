"""A Mixture-of-Experts layer whose rows travel by torch.distributed (gloo), written with care.

It has the gate, the experts and the shared experts of a `ferry.torch.MoELayer` and nothing else of
it. As that one does, it computes shared experts while rows are on the wire, forward and backward,
lets experts write to memory that stays allocated, and makes one exchange of counts per step: what
differs is how rows travel. Each layer has one call in flight: its buffers serve one backward.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ferry.torch import MoELayer
from gloo_exchange import GlooExchange
from measured_exchange import ExchangeClock

_ELEMENT_BYTES = 4  # float32
_COUNT_BYTES = 8


class OverlappedGlooExchange(GlooExchange):
    """A GlooExchange in float32 that counts, and whose rows for the experts need not be waited for.

    node_of     the node of each rank
    payload_bytes, metadata_bytes   what this rank sent to other nodes so far
    metadata_rounds   exchanges of counts so far
    clock       time inside its calls
    """

    def __init__(self, num_experts: int, hidden: int, node_of: Sequence[int]) -> None:
        super().__init__(num_experts, hidden, torch.float32)
        self._is_remote = [node != node_of[self.rank] for node in node_of]
        self.payload_bytes = self.metadata_bytes = self.metadata_rounds = 0
        self.clock = ExchangeClock()

    def _buffer(self, name: str, rows: int) -> Tensor:
        """With room for more rows: routing differs from step to step, and fresh memory is slow."""
        kept = self._buffers.get(name)
        if kept is None or kept.shape[0] < rows:
            super()._buffer(name, rows + rows // 4)
        return self._buffers[name][:rows]

    def _start_swap(self, received: Tensor, sent: Tensor, out_rows: list[int],
                    in_rows: list[int]) -> None:
        rows = sum(count for count, remote in zip(in_rows, self._is_remote) if remote)
        self.payload_bytes += rows * self.hidden * _ELEMENT_BYTES
        self._work = dist.all_to_all_single(received, sent, out_rows, in_rows, async_op=True)

    def _finish_swap(self) -> None:
        self._work.wait()
        self._work = None

    def _swap(self, received: Tensor, sent: Tensor, out_rows: list[int], in_rows: list[int]) -> None:
        self._start_swap(received, sent, out_rows, in_rows)
        self._finish_swap()

    def plan(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        with self.clock.running("plan"):
            super().plan(topk_idx, topk_weights)
        self.metadata_bytes += sum(self._is_remote) * self.local_experts * _COUNT_BYTES
        self.metadata_rounds += 1

    def output(self, name: str) -> Tensor:
        """[rows of this rank's experts, hidden] that stays allocated."""
        return self._buffer(name, len(self.by_expert))

    def _start_to_experts(self, packed: Tensor) -> None:
        self._start_swap(self.output("arrived"), packed, self.received_rows, self.sent_rows)

    def _finish_to_experts(self, name: str) -> Tensor:
        self._finish_swap()
        return torch.index_select(self.output("arrived"), 0, self.by_expert, out=self.output(name))

    def _packed(self, rows: Tensor) -> Tensor:
        return torch.index_select(rows, 0, self.tokens,
                                  out=self._buffer("sent", len(self.tokens)))

    def start_dispatch(self, x: Tensor) -> None:
        with self.clock.running("dispatch"):
            self._start_to_experts(self._packed(x))

    def finish_dispatch(self) -> Tensor:
        with self.clock.running("dispatch"):
            return self._finish_to_experts("rows")

    def combine(self, y: Tensor) -> Tensor:
        with self.clock.running("combine"):
            return super().combine(y)

    def start_combine_backward(self, grad_out: Tensor) -> Tensor:
        """The gradient of the weights, computed while the rows of grad_y travel."""
        with self.clock.running("combine_backward"):
            slot_weights = self.weights.reshape(-1)[self.order].unsqueeze(1)
            self._start_to_experts(self._packed(grad_out).mul_(slot_weights))
            return torch.bmm(self.y_by_slot, grad_out.unsqueeze(2)).squeeze(2)

    def finish_combine_backward(self) -> Tensor:
        with self.clock.running("combine_backward"):
            return self._finish_to_experts("grad_y")

    def dispatch_backward(self, grad_rows: Tensor) -> Tensor:
        with self.clock.running("dispatch_backward"):
            return super().dispatch_backward(grad_rows)


class _Dispatched(torch.autograd.Function):
    """x -> rows of this rank's experts, whose way here has been started."""

    @staticmethod
    def forward(ctx, exchange, x):
        ctx.exchange = exchange
        return exchange.finish_dispatch()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_rows):
        return None, ctx.exchange.dispatch_backward(grad_rows)


class _Outputs(torch.autograd.Function):
    """y -> y. Backward waits for the gradient that `_Combined` started."""

    @staticmethod
    def forward(ctx, exchange, y):
        ctx.exchange = exchange
        return y.detach().view_as(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _):
        return None, ctx.exchange.finish_combine_backward()


class _Combined(torch.autograd.Function):
    """y, weights -> out. Backward starts the way of the gradient to the experts."""

    @staticmethod
    def forward(ctx, exchange, y, weights):
        ctx.exchange, ctx.y_shape = exchange, y.shape
        return exchange.combine(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        grad_weights = ctx.exchange.start_combine_backward(grad_out)
        # `_Outputs` gives the real one; nobody reads this.
        return None, torch.empty(()).expand(ctx.y_shape), grad_weights


class GlooMoELayer(nn.Module):
    """The layer `layer` with gloo in place of Ferry; it takes over that one's modules.

    node_of   the node of each rank
    Requires: contiguous placement, every slot of every token names an expert, one backward per forward
    """

    def __init__(self, layer: MoELayer, node_of: Sequence[int]) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = (
            layer.gate, layer.experts, layer.shared_experts)
        self.exchange = OverlappedGlooExchange(layer.num_experts, layer.hidden, node_of)

    def forward(self, x: Tensor) -> Tensor:
        exchange: Any = self.exchange
        tokens = x.reshape(-1, x.shape[-1])
        chosen = self.gate(tokens)
        exchange.plan(chosen.topk_idx, chosen.topk_weights.detach())
        exchange.start_dispatch(tokens.detach())
        finish_shared = None
        if self.shared_experts is not None:
            finish_shared = self.shared_experts.begin(tokens)
        rows = _Dispatched.apply(exchange, tokens)
        y = self.experts(rows, exchange.expert_counts, out=exchange.output("y_rows"),
                         grad_rows_memory=lambda: exchange.output("grad_rows"))
        y = _Outputs.apply(exchange, y)
        # Its node is made between the two, so backward computes it while gradients travel.
        extra = finish_shared() if finish_shared is not None else None
        out = _Combined.apply(exchange, y, chosen.topk_weights)
        return (out if extra is None else out + extra).view(x.shape)
