"""Experts: a SwiGLU feed-forward network per local expert, on expert-major rows.

Bits. Each expert is its own matrix products over its own rows, in the order of the rows, so nothing
of an expert depends on which other experts its rank holds: EP = 1, 2, 4 give the same bits when an
expert sees the same rows. With a BLAS in which rows do not depend on each other (Debian's libblas3)
they do so as well when data parallelism splits an expert's rows over copies. On a CPU every product
is FP32: float32 rows as they are (views into the window; a BLAS packs its operands, so a row stride
changes no bit), half-precision rows and weights from FP32 copies of one expert at a time, rounded
once at the output. The half-precision products of a CPU are avoided: PyTorch 1.13 has none for f16,
and those for bf16 (oneDNN) pick their kernel by the leading dimension, so the same rows in another
window would give other bits.

Threads. Keep `torch.set_num_threads` the same on every rank and run (1 where ranks share cores).
"""

from dataclasses import dataclass, replace
from typing import Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ferry.torch.precision import no_autocast, sigmoid
from ferry.torch.seeds import seed_of, uniform_


def _working(tensor: Tensor) -> Tensor:
    """The tensor in the dtype that products are computed in."""
    halves = (torch.bfloat16, torch.float16)
    return tensor.float() if tensor.device.type == "cpu" and tensor.dtype in halves else tensor


def _store(target: Tensor, left: Tensor, right: Tensor) -> None:
    """target = left @ right, in place where the dtypes allow it."""
    if target.dtype == left.dtype:
        torch.mm(left, right, out=target)
    else:
        target.copy_(left @ right)


@dataclass
class _Results:
    """What the forward of a network leaves for its backward."""

    y: Tensor
    saved: List[Optional[Tensor]]  # per expert x w1^T and x w3^T


@dataclass
class _How:
    """How a network is run: everything that is no tensor of the graph."""

    spans: Tuple[Tuple[int, int], ...]
    out: Optional[Tensor] = None
    poll: Optional[Callable[[], None]] = None
    grad_rows_memory: Optional[Callable[[], Optional[Tensor]]] = None
    ready: Optional[_Results] = None

    def covers(self, num_rows: int) -> bool:
        """Whether every row belongs to an expert; rows between experts (alignment) do not."""
        return sum(end - begin for begin, end in self.spans) == num_rows

    def memory(self, like: Tensor, given: Optional[Tensor]) -> Tensor:
        """Where results of the shape of the rows go; 0 in rows that belong to nobody."""
        covered = self.covers(like.shape[0])
        if given is None:
            return torch.empty_like(like) if covered else torch.zeros_like(like)
        # Under a new name: autograd could not follow a write into a view of something larger. Not
        # `.data`, whose version would not count later writes to the memory.
        given = given.detach()
        return given if covered else given.zero_()


def _compute(rows: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, how: _How) -> _Results:
    y, saved = how.memory(rows, how.out), []
    with no_autocast(rows):
        for expert, (begin, end) in enumerate(how.spans):
            if begin == end:
                saved += [None, None]
                continue
            x = _working(rows[begin:end])
            gate = x @ w1[expert].to(x.dtype).t()
            up = x @ w3[expert].to(x.dtype).t()
            _store(y[begin:end], (gate * sigmoid(gate)).mul_(up), w2[expert].to(x.dtype).t())
            saved += [gate, up]
            if how.poll is not None:
                how.poll()
    return _Results(y, saved)


class _GroupedSwiglu(torch.autograd.Function):
    """y = (silu(x w1^T) * (x w3^T)) w2^T, expert by expert."""

    @staticmethod
    def forward(ctx, rows, w1, w3, w2, how):
        results = how.ready or _compute(rows, w1, w3, w2, how)
        ctx.how = replace(how, out=None, ready=None)  # its memory is not the graph's to keep
        ctx.save_for_backward(rows, w1, w3, w2, *results.saved)
        return results.y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y):
        rows, w1, w3, w2, *saved = ctx.saved_tensors
        how, wanted = ctx.how, ctx.needs_input_grad
        grad_rows = None
        if wanted[0]:
            given = None if how.grad_rows_memory is None else how.grad_rows_memory()
            grad_rows = how.memory(rows, given)
        grads = [torch.zeros_like(weight) if wants else None
                 for weight, wants in zip((w1, w3, w2), wanted[1:4])]
        with no_autocast(rows):
            for expert, (begin, end) in enumerate(how.spans):
                if begin == end:
                    continue
                own = tuple(None if g is None else g[expert] for g in grads)
                _expert_backward(_working(rows[begin:end]), _working(grad_y[begin:end]),
                                 (w1[expert], w3[expert], w2[expert]),
                                 saved[2 * expert:2 * expert + 2],
                                 None if grad_rows is None else grad_rows[begin:end], own)
                if how.poll is not None:
                    how.poll()
        return (grad_rows, *grads, None)


def _expert_backward(x: Tensor, grad_y: Tensor, weights: Tuple[Tensor, Tensor, Tensor],
                     saved: Sequence[Tensor], grad_x: Optional[Tensor],
                     grads: Tuple[Optional[Tensor], ...]) -> None:
    """Fills one expert's gradients; a target that is None is left out."""
    (gate, up), (w1, w3, w2) = saved, (weight.to(x.dtype) for weight in weights)
    slope = sigmoid(gate)
    silu = gate * slope
    if grads[2] is not None:
        _store(grads[2], grad_y.t(), silu * up)
    grad_hidden = grad_y @ w2
    grad_up = grad_hidden * silu
    grad_gate = grad_hidden.mul_(up).mul_(slope * (1 + gate * (1 - slope)))
    if grads[0] is not None:
        _store(grads[0], grad_gate.t(), x)
    if grads[1] is not None:
        _store(grads[1], grad_up.t(), x)
    if grad_x is not None:
        grad_x.copy_(torch.addmm(grad_gate @ w1, grad_up, w3))


def row_spans(expert_counts: Sequence[int], expert_offsets: Optional[Sequence[int]],
              num_rows: int) -> Tuple[Tuple[int, int], ...]:
    """(first row, row after the last) of each local expert.

    Errors: ValueError when they do not fit in num_rows
    """
    counts = [int(count) for count in expert_counts]
    if expert_offsets is None:
        begins = [sum(counts[:expert]) for expert in range(len(counts))]
    else:
        begins = [int(offset) for offset in expert_offsets][:len(counts)]
    spans = tuple((begin, begin + count) for begin, count in zip(begins, counts))
    if len(spans) != len(counts) or any(c < 0 for c in counts) or any(
            begin < 0 or end > num_rows for begin, end in spans):
        raise ValueError(f"experts: expert_counts {counts} do not fit in {num_rows} rows; fix: give "
                         "the counts and offsets of the plan that the rows came with")
    return spans


def grouped_swiglu(rows: Tensor, expert_counts: Sequence[int], w1: Tensor, w3: Tensor, w2: Tensor, *,
                   expert_offsets: Optional[Sequence[int]] = None, out: Optional[Tensor] = None,
                   poll: Optional[Callable[[], None]] = None,
                   grad_rows_memory: Optional[Callable[[], Optional[Tensor]]] = None) -> Tensor:
    """The local experts' outputs.

    Shapes:   rows [R, H], rows may stand further apart than H; expert_counts: rows of each local
              expert, in order; expert_offsets: their first rows, where rows are aligned; w1, w3
              [E_local, I, H]; w2 [E_local, H, I]; out [R, H]: where to write, such as the memory of
              `exchange.output(plan)`. Weights have the dtype of the rows, or FP32: half-precision
              rows are then multiplied with FP32 weights on a CPU, with rounded ones on a GPU
    poll      called after each expert, forward and backward: progress of an exchange
    grad_rows_memory   called in backward, gives [R, H] to write the gradient of rows to, such as
              window memory, which dispatch_backward then reads in place
    Returns:  y [R, H], `out` where it is given. Backward gives zeros to an expert without rows
    Errors:   ValueError (shapes, dtypes)
    """
    num_local = len(expert_counts)
    hidden = rows.shape[-1]
    inner = w1.shape[1] if w1.dim() == 3 else -1
    wanted = {"w1": (w1, (num_local, inner, hidden)), "w3": (w3, (num_local, inner, hidden)),
              "w2": (w2, (num_local, hidden, inner))}
    for name, (weight, shape) in wanted.items():
        if tuple(weight.shape) != shape or weight.dtype not in (rows.dtype, torch.float32):
            raise ValueError(f"experts: {name} is {weight.dtype} {list(weight.shape)}; allowed: "
                             f"{rows.dtype} or {torch.float32} {list(shape)}, because rows are "
                             f"{rows.dtype} {list(rows.shape)} for {num_local} experts")
    if out is not None and (out.shape != rows.shape or out.dtype != rows.dtype):
        raise ValueError(f"experts: out is {out.dtype} {list(out.shape)}; allowed: {rows.dtype} "
                         f"{list(rows.shape)}, as rows")
    spans = row_spans(expert_counts, expert_offsets, rows.shape[0])
    return _GroupedSwiglu.apply(rows, w1, w3, w2, _How(spans, out, poll, grad_rows_memory))


class GroupedExperts(nn.Module):
    """The experts of this rank. Its parameters belong to an expert, not to every rank:
    `ferry.torch.expert_parameters` finds them by `ferry_experts`.

    local_experts   global ids of the local experts, ascending
    seed            an expert's first weights depend on (seed, its global id), not on its rank
    """

    ferry_experts = True

    def __init__(self, hidden: int, intermediate: int, local_experts: Sequence[int], *,
                 dtype: Optional[torch.dtype] = None, seed: int = 0) -> None:
        super().__init__()
        self.hidden, self.intermediate = hidden, intermediate
        self.local_experts = tuple(int(expert) for expert in local_experts)
        num_local = len(self.local_experts)
        self.w1 = nn.Parameter(torch.empty(num_local, intermediate, hidden, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(num_local, intermediate, hidden, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(num_local, hidden, intermediate, dtype=dtype))
        self.reset_parameters(seed)

    def reset_parameters(self, seed: int) -> None:
        """Uniform in +-1/sqrt(fan in), as nn.Linear."""
        for place, expert in enumerate(self.local_experts):
            for name, weight in (("w1", self.w1), ("w3", self.w3), ("w2", self.w2)):
                with torch.no_grad():
                    uniform_(weight[place], weight.shape[-1] ** -0.5,
                             seed_of(seed, "expert", expert, name))

    def forward(self, rows: Tensor, expert_counts: Sequence[int], **options) -> Tensor:
        """See `grouped_swiglu`."""
        return grouped_swiglu(rows, expert_counts, self.w1, self.w3, self.w2, **options)

    def extra_repr(self) -> str:
        return (f"hidden={self.hidden}, intermediate={self.intermediate}, "
                f"local_experts={list(self.local_experts)}")


class SharedExperts(nn.Module):
    """Experts that every token goes to, on its own rank: one SwiGLU network of their joint width.

    Shapes: x [..., hidden] -> [..., hidden]. Dense parameters, the same on every rank
    """

    def __init__(self, hidden: int, intermediate: int, *, dtype: Optional[torch.dtype] = None,
                 seed: int = 0) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(intermediate, hidden, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(intermediate, hidden, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(hidden, intermediate, dtype=dtype))
        for name, weight in (("w1", self.w1), ("w3", self.w3), ("w2", self.w2)):
            uniform_(weight, weight.shape[-1] ** -0.5, seed_of(seed, "shared", name))

    def forward(self, x: Tensor) -> Tensor:
        return self.begin(x)()

    def begin(self, x: Tensor) -> Callable[[], Tensor]:
        """Computes now; what is returned makes the node of the graph and gives the result. Autograd
        runs nodes that were made later first, so this says when the backward comes."""
        rows = x.reshape(-1, x.shape[-1])
        how = _How(((0, rows.shape[0]),))
        weights = tuple(weight.unsqueeze(0) for weight in (self.w1, self.w3, self.w2))
        with torch.no_grad():
            ready = _compute(rows.detach(), *weights, how)
        how = replace(how, ready=ready)
        return lambda: _GroupedSwiglu.apply(rows, *weights, how).view(x.shape)


class _ScaledRows(torch.autograd.Function):
    """y[r] * weights[r], in FP32, rounded once to the dtype of y."""

    @staticmethod
    def forward(ctx, y, weights, how):
        ctx.save_for_backward(y, weights)
        result = torch.empty_like(y) if how.out is None else how.out.detach()
        return result.copy_(y.float() * weights.unsqueeze(1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        y, weights = ctx.saved_tensors
        grad_y = (grad.float() * weights.unsqueeze(1)).to(y.dtype) if ctx.needs_input_grad[0] else None
        grad_weights = (grad.float() * y.float()).sum(1) if ctx.needs_input_grad[1] else None
        return grad_y, grad_weights, None


def scale_rows(y: Tensor, weights: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """Expert outputs times their routing weights, for weights="at_expert".

    Shapes: y [R, H]; weights float32 [R]; out [R, H]: where to write -> [R, H] in the dtype of y
    """
    return _ScaledRows.apply(y, weights, _How((), out))
