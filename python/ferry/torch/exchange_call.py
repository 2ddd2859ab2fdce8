"""One use of an exchange in a graph of autograd: plan, dispatch and combine of a few chunks of tokens.

Forward and backward use one plan per chunk. Each direction is two nodes of the graph, so that the way
back is pipelined as the way there: one node starts an operation and hands a placeholder on, the other,
further towards the inputs, waits for it and gives the real gradient.

    x ─ enter ─> x' ─ dispatched ─> rows ─ experts ─> y ─ outputs ─> y' ─ combined ─> out
        waits for     starts                              waits for      starts
        dispatch_backward                                 combine_backward

Invariants:
1. x' and y' are used by the nodes of this file alone, so a placeholder is never added to anything.
2. Autograd runs, of the nodes that are ready, the one made last; a graph of the same shape on every
   rank so starts the same operations in the same order.
3. Tensors are kept for backward by save_for_backward alone, so that checkpoints can drop them.
"""

from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ferry.torch import staging

Span = Tuple[int, int]


def _placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A gradient of the right shape that takes no memory; nobody reads its values."""
    return torch.empty((), dtype=dtype, device=device).expand(tuple(shape))


class ExchangeCall:
    """The chunks of one call and the operations that run on them.

    exchange  a ferry.Exchange with layout expert_major
    x         [T, hidden] in its dtype, on the CPU or staged from CUDA
    spans     first token and token after the last of each chunk, adding up to 0..T
    The order of use: `enter`, then for each chunk `start_plan` (or `plans[c] = ...`) and
    `start_dispatch`, or `start_plan_and_dispatch`; `finish_dispatch`, `output`, `start_combine`;
    `finish`.
    """

    def __init__(self, exchange: Any, x: Tensor, spans: Sequence[Span]) -> None:
        staging.check_device(x, "x", exchange.group)
        self.exchange, self.spans, self.device = exchange, list(spans), x.device
        self.weights_at_expert = exchange.options["weights"] == "at_expert"
        self.weights_at_combine = exchange.options["weights"] == "at_combine"
        num = len(self.spans)
        self.plans: List[Any] = [None] * num
        self.dispatches: List[Any] = [None] * num
        self.combines: List[Any] = [None] * num
        self.back: List[Any] = [None] * num
        self.grad_weights: List[Optional[Tensor]] = [None] * num
        self.grad_x: Optional[Tensor] = None
        self.out: Optional[Tensor] = None
        self._x, self._x_host = x, staging.to_host(x)
        self._shape, self._dtype = x.shape, x.dtype
        self._parts: List[Tensor] = []
        self._running: List[Any] = []

    def poll(self) -> None:
        """A round of work for all operations of the group, while one of this call runs."""
        self._running = [pending for pending in self._running if not pending.done()]
        if self._running:
            self._running[-1].progress()

    def track(self, pending: Any) -> Any:
        """Lets `poll` work on an operation."""
        self._running.append(pending)
        return pending

    def wait(self, pending: Any) -> Any:
        """The operation's result; it and its memory are not held any longer."""
        result = pending.wait()
        self._running = [other for other in self._running if other is not pending]
        return result

    def enter(self) -> None:
        """Makes the node that ends the way back: before all others, so that it runs after them."""
        entered = _Enter.apply(self, self._x)
        self._entered = (entered,) if isinstance(entered, Tensor) else entered
        self._x = None

    def start_plan(self, chunk: int, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Starts the chunk's only round of metadata; `start_dispatch` waits for it."""
        weights = staging.to_host(topk_weights.float())
        self.plans[chunk] = self.track(
            self.exchange.start_plan(staging.to_host(topk_idx).contiguous(), weights.contiguous()))

    def start_plan_and_dispatch(self, chunk: int, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Starts both at once, for a small batch: rows leave with the metadata."""
        begin, end = self.spans[chunk]
        weights = staging.to_host(topk_weights.float())
        self.dispatches[chunk] = self.track(self.exchange.start_plan_and_dispatch(
            staging.to_host(topk_idx).contiguous(), weights.contiguous(), self._x_host[begin:end]))

    def start_dispatch(self, chunk: int) -> Any:
        """Waits for the chunk's plan, starts its dispatch; returns the plan."""
        plan = self.plans[chunk]
        if hasattr(plan, "wait"):
            plan = self.plans[chunk] = self.wait(plan)
        begin, end = self.spans[chunk]
        self.dispatches[chunk] = self.track(
            self.exchange.start_dispatch(plan, self._x_host[begin:end]))
        return plan

    def finish_dispatch(self, chunk: int, topk_weights: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
        """rows [num_rows, hidden]; with weights at the expert also their weights, float32 [num_rows]."""
        weights = _Weights.apply(self, chunk, topk_weights) if self.weights_at_expert else None
        return _Dispatched.apply(self, chunk, self._entered[chunk], weights)

    def output(self, chunk: int) -> Optional[Tensor]:
        """Memory of the window for the experts' outputs; None on a device that is staged."""
        if not staging.is_host(self.device):
            return None
        return torch.from_dlpack(self.exchange.output(self.plans[chunk]))

    def start_combine(self, chunk: int, y: Tensor, topk_weights: Tensor) -> None:
        """Starts the way home of y [num_rows, hidden]."""
        if self.out is None:
            self.out = staging.host_empty(self._shape, self._dtype, self.device)
        begin, end = self.spans[chunk]
        self.combines[chunk] = self.track(self.exchange.start_combine(
            self.plans[chunk], staging.to_host(y), self.out[begin:end]))
        self._parts += _Outputs.apply(self, chunk, y, topk_weights)

    def finish(self) -> Tensor:
        """out [T, hidden]."""
        parts, self._parts = self._parts, []
        self._entered = self._x_host = None
        return _Combined.apply(self, *parts)

    def start_combine_backward(self, chunk: int, grad_out: Tensor, y: Optional[Tensor],
                               weights_shape: Sequence[int]) -> None:
        """Starts the way of the chunk's gradient to its experts."""
        options = {}
        if y is not None:
            self.grad_weights[chunk] = torch.empty(tuple(weights_shape), dtype=torch.float32)
            options = {"y": staging.to_host(y), "grad_weights": self.grad_weights[chunk]}
        begin, end = self.spans[chunk]
        self.back[chunk] = self.track(self.exchange.start_combine_backward(
            self.plans[chunk], grad_out[begin:end], **options))

    def start_dispatch_backward(self, chunk: int, grad_rows: Tensor,
                                grad_row_weights: Optional[Tensor],
                                weights_shape: Sequence[int]) -> None:
        """Starts the way of the chunk's gradient home."""
        if self.grad_x is None:
            self.grad_x = staging.host_empty(self._shape, self._dtype, self.device)
        options = {}
        if self.weights_at_expert:
            self.grad_weights[chunk] = torch.empty(tuple(weights_shape), dtype=torch.float32)
            options = {"grad_row_weights": staging.to_host(grad_row_weights.contiguous()),
                       "grad_weights": self.grad_weights[chunk]}
        begin, end = self.spans[chunk]
        self.back[chunk] = self.track(self.exchange.start_dispatch_backward(
            self.plans[chunk], staging.to_host(grad_rows), grad_x=self.grad_x[begin:end], **options))


class _Enter(torch.autograd.Function):
    """x -> its chunks x'. Backward waits for the gradients that came home."""

    @staticmethod
    def forward(ctx, call, x):
        ctx.call = call
        x = x.detach()
        return tuple(x[begin:end] for begin, end in call.spans)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *_):
        call = ctx.call
        for chunk, pending in enumerate(call.back):
            call.wait(pending)
            call.back[chunk] = None
        grad_x, call.grad_x = call.grad_x, None
        return None, staging.to_device(grad_x, call.device)


class _Weights(torch.autograd.Function):
    """topk_weights -> what the dispatch takes along, with weights at the expert."""

    @staticmethod
    def forward(ctx, call, chunk, weights):
        ctx.call, ctx.chunk = call, chunk
        return weights.detach().view_as(weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _):
        call, chunk = ctx.call, ctx.chunk
        call.wait(call.back[chunk])
        grad, call.grad_weights[chunk] = call.grad_weights[chunk], None
        return None, None, staging.to_device(grad, call.device)


class _Dispatched(torch.autograd.Function):
    """x' -> the rows that its dispatch brings. Backward starts the way home of their gradient."""

    @staticmethod
    def forward(ctx, call, chunk, x, weights):
        ctx.call, ctx.chunk = call, chunk
        ctx.x_meta = (x.shape, x.dtype, x.device)
        ctx.weights_shape = None if weights is None else weights.shape
        result = call.wait(call.dispatches[chunk])
        call.dispatches[chunk] = None
        if call.plans[chunk] is None:
            call.plans[chunk], result = result  # of start_plan_and_dispatch
        rows = torch.from_dlpack(result)
        row_weights = None
        if weights is not None:
            own = torch.from_numpy(call.plans[chunk].row_sources.weight.copy())
            row_weights = staging.to_device(own, call.device)
        return staging.to_device(rows, call.device), row_weights

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_rows, grad_row_weights):
        ctx.call.start_dispatch_backward(ctx.chunk, grad_rows, grad_row_weights, ctx.weights_shape)
        grad_weights = None if ctx.weights_shape is None else _placeholder(
            ctx.weights_shape, torch.float32, ctx.x_meta[2])
        return None, None, _placeholder(*ctx.x_meta), grad_weights


class _Outputs(torch.autograd.Function):
    """y -> y', and topk_weights beside it. Backward waits for their gradients."""

    @staticmethod
    def forward(ctx, call, chunk, y, weights):
        ctx.call, ctx.chunk = call, chunk
        return y.detach().view_as(y), weights.detach().view_as(weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *_):
        call, chunk = ctx.call, ctx.chunk
        grad_y = torch.from_dlpack(call.wait(call.back[chunk]))
        grad_weights = None
        if call.weights_at_combine and call.grad_weights[chunk] is not None:
            grad_weights = staging.to_device(call.grad_weights[chunk], call.device)
            call.grad_weights[chunk] = None
        return None, None, staging.to_device(grad_y, call.device), grad_weights


class _Combined(torch.autograd.Function):
    """y' and weights of all chunks -> out, what their combines bring. Backward starts the way back of
    every chunk, the last first: in that order the experts' backward wants them."""

    @staticmethod
    def forward(ctx, call, *parts):
        ctx.call = call
        for chunk, pending in enumerate(call.combines):
            call.wait(pending)
            call.combines[chunk] = None
        ys, weights = parts[0::2], parts[1::2]
        ctx.y_meta = [(y.shape, y.dtype, y.device) for y in ys]
        ctx.weights_meta = [(w.shape, w.dtype, w.device) for w in weights]
        # Without gradients of weights nobody reads y again, and its window memory is free at once.
        ctx.wants_weights = call.weights_at_combine and any(ctx.needs_input_grad[2::2])
        ctx.save_for_backward(*(ys if ctx.wants_weights else ()))
        out, call.out = call.out, None
        # Under a new name: pendings hold views of `out`, and the graph must not be held through them.
        return staging.to_device(out, call.device).data

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        call, grads = ctx.call, []
        ys, host = ctx.saved_tensors, staging.to_host(grad_out)
        for chunk in reversed(range(len(call.spans))):
            call.start_combine_backward(chunk, host, ys[chunk] if ctx.wants_weights else None,
                                        ctx.weights_meta[chunk][0])
        for y_meta, weights_meta in zip(ctx.y_meta, ctx.weights_meta):
            grads += [_placeholder(*y_meta),
                      _placeholder(*weights_meta) if ctx.wants_weights else None]
        return (None, *grads)
