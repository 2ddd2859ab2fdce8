"""All-to-all of tensors of which only the largest values cross.

Values are thinned out here, before anything is exchanged: the exchange leaves out zeros alone, so
what arrives depends neither on where the ranks are nor on the exchange. What a rank cannot send it
tells the others in the gather of shapes, so that all refuse the call and none waits.
"""

import math
import numbers
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ferry import Exchange, InvalidArgumentError, MismatchError, Placement
from ferry._init import only_group
from ferry.torch import staging

#: Names of compress_type: what values cross in.
_VALUES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_WIRES = {"fp16": "sparse_f16", "bf16": "sparse_bf16", "fp32": "sparse_f32"}
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
#: Elements of a row of the exchange: long enough that what stands beside a row is nothing, short
#: enough that the zeros that fill up the last one are few.
_COLUMNS = 2048
#: Elements of which the share is kept.
_BLOCK = 128
#: Blocks that are thinned out at once: what is computed of them stays in a cache.
_BLOCKS_AT_ONCE = 1024
#: Begins what a rank tells that refuses the call.
_REFUSED = b"!"
_NAME = "sparse_all_to_all"


def _exchange(group: Any, dtype: torch.dtype, compress_type: str) -> Exchange:
    # Kept with the group, at most one for each dtype and compress_type; made once, on all ranks
    # alike. Gradients go home as they are.
    made: Dict[Tuple, Exchange] = group.__dict__.setdefault("_sparse_exchanges", {})
    key = (dtype, compress_type)
    if key not in made:
        made[key] = Exchange(group, Placement.contiguous(group.size, group.size), _COLUMNS,
                             _DTYPES[dtype], strategy="flat", weights="none",
                             wire_dispatch=_WIRES[compress_type],
                             wire_dispatch_backward=_DTYPES[dtype])
    return made[key]


def _largest(dtype: torch.dtype, values: torch.dtype) -> float:
    """The largest number that crosses. 65504 rounded to bf16 would be no f16 any more."""
    if dtype == torch.float16 and values == torch.bfloat16:
        return 65280.0
    return torch.finfo(values).max


class _Crossed(NamedTuple):
    """How values cross."""
    values: Tensor                # in FP32; no -0, and of NaNs one
    saturated: Optional[Tensor]   # where one has become the largest number; None = nowhere
    has_nans: bool


def _crossed(part: Tensor, values: torch.dtype) -> _Crossed:
    exact = part.float()
    most = _largest(part.dtype, values)
    if exact.abs().max() <= most:  # not where one is a NaN
        return _Crossed(exact.to(values).float() + 0.0, None, False)
    saturated = exact.isfinite() & (exact.abs() > most)
    rounded = torch.where(saturated, exact.clamp(-most, most), exact).to(values).float() + 0.0
    nans = exact.isnan()  # torch rounds them to more than one
    return _Crossed(rounded.masked_fill_(nans, math.nan), saturated, bool(nans.any()))


def _kept(blocks: Tensor, ratio: numpy.float32) -> Optional[Tensor]:
    """[blocks, columns] of FP32: which are kept; None = all.

    The largest magnitudes, of equal ones the first, a NaN before all. Where zeros are among them
    nothing is cut: the others are zeros, too.
    """
    columns = blocks.shape[1]
    keep = max(1, math.ceil(ratio * numpy.float32(columns)))
    if keep >= columns:
        return None
    # As integers, magnitudes are in order, infinities and NaNs too.
    sizes = blocks.view(torch.int32).bitwise_and(0x7FFFFFFF)
    ascending = numpy.sort(sizes.numpy(), axis=1)
    smallest = torch.from_numpy(ascending[:, columns - keep, None])
    kept = sizes >= smallest
    # Few blocks have more values of the smallest magnitude than may stay.
    tied = torch.from_numpy(numpy.flatnonzero(
        (ascending[:, columns - keep] == ascending[:, columns - keep - 1])
        & (ascending[:, columns - keep] > 0)))
    if len(tied):
        sizes, smallest = sizes[tied], smallest[tied]
        larger, equal = sizes > smallest, sizes == smallest
        kept[tied] = larger | (equal & (equal.cumsum(1) <= keep - larger.sum(1, keepdim=True)))
    return kept


def _only(blocks: Tensor, kept: Tensor) -> Tensor:
    """0 where not kept: of bits, since 0 times an infinity is none, and fast."""
    return blocks.view(torch.int32).bitwise_and(kept.int().neg_()).view(torch.float32)


def _thin(flat: Tensor, out: Tensor, values: torch.dtype, ratio: numpy.float32,
          passes: Optional[Tensor]) -> None:
    """[n] -> [n]: values as they cross, the largest of each block, and zeros. Where a value is
    neither cut nor saturated, `passes` becomes True."""
    whole = len(flat) // _BLOCK * _BLOCK
    step = _BLOCK * _BLOCKS_AT_ONCE
    ends = [*range(step, whole, step), *([whole] if whole else []), len(flat)]
    begin = 0
    for end in ends:
        if end == begin:
            continue
        crossed = _crossed(flat[begin:end], values)
        blocks = crossed.values.view(-1, _BLOCK if end <= whole else end - begin)
        kept = _kept(blocks, ratio)
        if kept is not None:
            blocks = _only(blocks, kept)
        out[begin:end] = blocks.view(-1)
        if crossed.has_nans:
            made = out[begin:end]
            made.masked_fill_(made.isnan(), math.nan)
        if passes is not None:
            passing = passes[begin:end]
            passing.fill_(True) if kept is None else passing.copy_(kept.view(-1))
            if crossed.saturated is not None:
                passing.logical_and_(~crossed.saturated)
        begin = end


def _check(tensors: Any, group: Any, compress_type: Any, ratio: Any) -> None:
    rank = group.rank
    if not isinstance(tensors, AnySequence):
        raise InvalidArgumentError(
            f"{_NAME}: tensor_list is a {type(tensors).__name__} on rank {rank}; allowed: a list "
            "or tuple of tensors, one for each rank")
    if len(tensors) != group.size:
        raise InvalidArgumentError(
            f"{_NAME}: {len(tensors)} tensors on rank {rank}; allowed: {group.size}, one for each "
            "rank")
    if not isinstance(compress_type, str) or compress_type not in _VALUES:
        raise InvalidArgumentError(f"{_NAME}: compress_type = {compress_type!r} on rank {rank}; "
                                   "allowed: 'fp16', 'bf16', 'fp32'")
    if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real) or not 0 < ratio <= 1:
        raise InvalidArgumentError(f"{_NAME}: sparse_ratio = {ratio!r} on rank {rank}; allowed: a "
                                   "number above 0, at most 1")
    for place, tensor in enumerate(tensors):
        where = f"{_NAME}: tensor_list[{place}] is"
        if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES:
            what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidArgumentError(f"{where} {what} on rank {rank}; allowed: tensors of "
                                       "float32, bfloat16, float16")
        if tensor.layout != torch.strided:
            raise InvalidArgumentError(f"{where} {tensor.layout} on rank {rank}; allowed: "
                                       "torch.strided; fix: pass its to_dense()")
        if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
            raise InvalidArgumentError(
                f"{where} {tensor.dtype} on {tensor.device} and tensor_list[0] {tensors[0].dtype} "
                f"on {tensors[0].device}, on rank {rank}; fix: pass one kind")
    staging.check_device(tensors[0], "tensor_list", group)


def _rows(size: int) -> int:
    return -(-size // _COLUMNS)


class _Parts(NamedTuple):
    """What this rank sends."""
    rows: Tensor                     # [rows, _COLUMNS], by target rank
    targets: Tensor                  # [rows]
    passes: List[Optional[Tensor]]   # by target rank: where its gradient passes
    told: bytes                      # to the other ranks


def _gradients(tensors: Sequence[Tensor]) -> str:
    if not torch.is_grad_enabled():
        return "off"
    return "wanted" if any(tensor.requires_grad for tensor in tensors) else "none"


def _prepare(tensors: Sequence[Tensor], compress_type: str, ratio: numpy.float32) -> _Parts:
    first = tensors[0]
    counts = [_rows(tensor.numel()) for tensor in tensors]
    rows = torch.zeros(sum(counts), _COLUMNS, dtype=first.dtype)
    passes: List[Optional[Tensor]] = []
    wanted = torch.is_grad_enabled()
    for tensor, part in zip(tensors, rows.split(counts)):
        flat = staging.to_host(tensor).reshape(-1)
        own = torch.empty(len(flat), dtype=torch.bool) if wanted and tensor.requires_grad else None
        _thin(flat, part.view(-1)[:len(flat)], _VALUES[compress_type], ratio, own)
        passes.append(own)
    shapes = [",".join(map(str, tensor.shape)) for tensor in tensors]
    told = "|".join([str(first.dtype), compress_type, str(ratio), _gradients(tensors), *shapes])
    return _Parts(rows, torch.repeat_interleave(torch.arange(len(tensors)), torch.tensor(counts)),
                  passes, told.encode())


def _agreed(rank: int, told: List[bytes]) -> Tuple[List[Tuple[int, ...]], bool]:
    """The shapes that each rank sends to `rank`, and whether any rank wants a gradient.

    Errors, the same on every rank: the first refusal; without one, the first mismatch
    """
    for text in told:
        if text.startswith(_REFUSED):
            raise InvalidArgumentError(text[len(_REFUSED):].decode())
    facts = [text.decode().split("|") for text in told]
    for source, fact in enumerate(facts):
        for name, ours, theirs in zip(("dtype", "compress_type", "sparse_ratio"), facts[0], fact):
            if ours != theirs:
                raise MismatchError(f"{_NAME}: {name} is {ours} on rank 0 and {theirs} on rank "
                                    f"{source}")
    gradients = [fact[3] for fact in facts]
    if "wanted" in gradients and "off" in gradients:
        raise MismatchError(
            f"{_NAME}: a gradient is wanted on rank {gradients.index('wanted')} and switched off "
            f"on rank {gradients.index('off')}, which would not bring it home; fix: use "
            "torch.no_grad() on every rank or on none")
    shapes = [tuple(int(size) for size in fact[4 + rank].split(",") if size) for fact in facts]
    return shapes, "wanted" in gradients


@dataclass
class _Call:
    """One call, as its backward needs it."""
    exchange: Exchange
    plan: Any
    sent: List[torch.Size]
    passes: List[Optional[Tensor]]
    received: List[Tuple[int, ...]]
    device: torch.device

    def dispatch(self, parts: Tensor) -> List[Tensor]:
        rows = torch.from_dlpack(self.exchange.dispatch(self.plan, parts))
        sizes = [math.prod(shape) for shape in self.received]
        return [staging.to_device(part.reshape(-1)[:size].clone().view(shape), self.device)
                for part, size, shape in zip(rows.split(list(map(_rows, sizes))), sizes,
                                             self.received)]

    def bring_home(self, grads: Sequence[Tensor]) -> List[Optional[Tensor]]:
        counts = [_rows(grad.numel()) for grad in grads]
        rows = torch.zeros(sum(counts), _COLUMNS, dtype=grads[0].dtype)
        for grad, part in zip(grads, rows.split(counts)):
            part.view(-1)[:grad.numel()] = staging.to_host(grad).reshape(-1)
        home = torch.from_dlpack(self.exchange.dispatch_backward(self.plan, rows, grad_x=None))
        found: List[Optional[Tensor]] = []
        counts = [_rows(shape.numel()) for shape in self.sent]
        for part, shape, passes in zip(home.split(counts), self.sent, self.passes):
            if passes is None:
                found.append(None)
                continue
            grad = torch.where(passes, part.reshape(-1)[:shape.numel()], 0)
            found.append(staging.to_device(grad.to(part.dtype).view(shape), self.device))
        return found


class _Sent(torch.autograd.Function):
    """`anchor` wants a gradient where any rank does, so that every rank comes to the backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, parts: Tensor, anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.call = call
        return tuple(call.dispatch(parts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, None, None, *ctx.call.bring_home(grads))


def sparse_all_to_all(tensor_list: Sequence[Tensor], group: Optional[Any] = None,
                      compress_type: str = "fp16", sparse_ratio: float = 0.3) -> List[Tensor]:
    """Sends tensor_list[r] to rank r, thinned out, and gives what each rank sent to this one.

    tensor_list    one tensor for each rank, of any shapes, all float32, bfloat16 or float16
    group          a ferry Group; None = the one that `ferry.init()` made. Inside `ferry.run` pass
                   the group that the function is given
    compress_type  what values cross in: "fp16" (saturates at 65504), "bf16" (float16 tensors
                   saturate at 65280, the largest number of both) or "fp32"
    sparse_ratio   share of the values that is kept in each 128 elements, and in what is left at
                   the end of a tensor, rounded up: the largest magnitudes, of equal ones the first,
                   a NaN before all; the others become 0. 1 = all
    Returns: by source rank, tensors of the sender's shape, on the device and of the dtype of
             tensor_list; every value is thinned and rounded as if it had crossed, and -0 becomes 0,
             also where it stays on its machine or its rank, so that the bits depend on no topology
    Gradient: goes back to the sender as it is, in the dtype, neither thinned nor rounded. A value
             that was cut, or saturated, gets 0; one that was kept gets the gradient of what it
             became, also where it was rounded, is infinite, or is 0 in a block of which nothing but
             zeros is left out. Where an input of any rank
             needs a gradient, the results of every rank do, and every rank must run their backward,
             in the same order; a backward of the backward there is not
    Cost:    one gather of the shapes, one round of metadata; what crosses between nodes is the
             values and their positions, as columns, bitmask or runs, whichever is smallest. The
             backward has no metadata, and all of the gradient crosses
    Errors, the same on every rank: InvalidArgumentError (what any rank gave), MismatchError (dtype,
             compress_type, sparse_ratio, gradients that torch.no_grad() switches off on one rank)
    """
    if group is None:
        group = only_group(_NAME)
    refusal: Optional[Exception] = None
    parts: Optional[_Parts] = None
    try:
        _check(tensor_list, group, compress_type, sparse_ratio)
        parts = _prepare(tensor_list, compress_type, numpy.float32(sparse_ratio))
    except Exception as error:  # whatever it is: the other ranks wait in the gather
        refusal = error
    told = parts.told if parts else _REFUSED + _refusal_text(refusal, group.rank).encode()
    try:
        shapes, wanted = _agreed(group.rank, group.all_gather(told))
    except InvalidArgumentError as error:
        raise error from refusal
    assert parts is not None  # a refusal has been raised
    first = tensor_list[0]
    exchange = _exchange(group, first.dtype, compress_type)
    plan = exchange.plan(parts.targets.reshape(-1, 1), torch.ones(len(parts.targets), 1))
    call = _Call(exchange, plan, [tensor.shape for tensor in tensor_list], parts.passes, shapes,
                 first.device)
    if not wanted:
        return call.dispatch(parts.rows)
    return list(_Sent.apply(call, parts.rows, torch.zeros((), requires_grad=True), *tensor_list))


def _refusal_text(refusal: Optional[Exception], rank: int) -> str:
    if isinstance(refusal, (InvalidArgumentError, ValueError)):
        return str(refusal)
    return f"{_NAME}: {type(refusal).__name__} on rank {rank}: {refusal}"
