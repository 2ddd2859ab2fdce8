"""All-to-all of tensors of which only the largest values cross."""

import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy
import torch
from torch import Tensor

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
#: Columns of which the share is kept.
_BLOCK = 128


def _exchange(group: Any, dtype: torch.dtype, compress_type: str, ratio: float) -> Exchange:
    # Kept with the group: made once, on all ranks alike.
    made: Dict[Tuple, Exchange] = group.__dict__.setdefault("_sparse_exchanges", {})
    key = (dtype, compress_type, ratio)
    if key not in made:
        made[key] = Exchange(group, Placement.contiguous(group.size, group.size), _COLUMNS,
                             _DTYPES[dtype], strategy="flat", weights="none",
                             wire_dispatch=_WIRES[compress_type], wire_sparse_ratio=ratio,
                             wire_block_columns=_BLOCK)
    return made[key]


def _thinned(flat: Tensor, compress_type: str, ratio: float) -> Tensor:
    """[n] -> [rows, _COLUMNS]: values as they cross, the largest of each block, and zeros."""
    rows = torch.nn.functional.pad(flat, (0, -flat.numel() % _COLUMNS))
    values = _VALUES[compress_type]
    crossed = rows.float()
    if values != torch.float32:
        most = torch.finfo(values).max
        crossed = torch.where(crossed.isfinite(), crossed.clamp(-most, most), crossed).to(values)
    crossed = crossed.to(flat.dtype)
    blocks = crossed.reshape(-1, _BLOCK)
    keep = math.ceil(numpy.float32(ratio) * numpy.float32(_BLOCK))
    if keep < _BLOCK:
        sizes = blocks.float().abs().nan_to_num(nan=math.inf, posinf=torch.finfo(torch.float32).max)
        # Stable, so that the first of equal values are kept, as the exchange does.
        order = torch.sort(sizes, dim=1, descending=True, stable=True).indices
        blocks = blocks.scatter(1, order[:, keep:], 0)
    return blocks.reshape(-1, _COLUMNS)


def _check(tensors: Sequence[Tensor], group: Any, compress_type: str, ratio: float) -> None:
    if len(tensors) != group.size:
        raise InvalidArgumentError(
            f"sparse_all_to_all: {len(tensors)} tensors on rank {group.rank}; allowed: "
            f"{group.size}, one for each rank")
    if compress_type not in _VALUES:
        raise InvalidArgumentError(f"sparse_all_to_all: compress_type = {compress_type!r}; "
                                   "allowed: 'fp16', 'bf16', 'fp32'")
    if not (isinstance(ratio, (int, float)) and 0 < ratio <= 1):
        raise InvalidArgumentError(f"sparse_all_to_all: sparse_ratio = {ratio!r}; allowed: above "
                                   "0, at most 1")
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES:
            what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidArgumentError(f"sparse_all_to_all: tensor_list[{place}] is {what} on rank "
                                       f"{group.rank}; allowed: tensors of float32, bfloat16, "
                                       "float16")
        if tensor.dtype != tensors[0].dtype or tensor.device != tensors[0].device:
            raise InvalidArgumentError(
                f"sparse_all_to_all: tensor_list[{place}] is {tensor.dtype} on {tensor.device} and "
                f"tensor_list[0] {tensors[0].dtype} on {tensors[0].device}; fix: pass one kind")
    if tensors:
        staging.check_device(tensors[0], "tensor_list", group)


def _describe(tensors: Sequence[Tensor], compress_type: str, ratio: float) -> bytes:
    shapes = [",".join(map(str, tensor.shape)) for tensor in tensors]
    return "|".join([str(tensors[0].dtype), compress_type, repr(float(ratio)), *shapes]).encode()


def _shapes_for(rank: int, told: List[bytes]) -> List[Tuple[int, ...]]:
    """What each rank sends to `rank`. Errors: the refusal of a rank; MismatchError"""
    for source, text in enumerate(told):
        if text.startswith(b"!"):
            raise InvalidArgumentError(text[1:].decode())
        for name, ours, theirs in zip(("dtype", "compress_type", "sparse_ratio"),
                                      told[0].split(b"|"), text.split(b"|")):
            if ours != theirs:
                raise MismatchError(f"sparse_all_to_all: {name} is {ours.decode()} on rank 0 and "
                                    f"{theirs.decode()} on rank {source}")
    texts = [text.split(b"|")[3 + rank].decode() for text in told]
    return [tuple(int(size) for size in text.split(",") if size) for text in texts]


def sparse_all_to_all(tensor_list: Sequence[Tensor], group: Optional[Any] = None,
                      compress_type: str = "fp16", sparse_ratio: float = 0.3) -> List[Tensor]:
    """Sends tensor_list[r] to rank r, thinned out, and gives what each rank sent to this one.

    tensor_list    one tensor for each rank, of any shapes, all float32, bfloat16 or float16
    group          a ferry Group; None = the one that `ferry.init()` made
    compress_type  what values cross in: "fp16" (saturates at 65504), "bf16" or "fp32"
    sparse_ratio   share of the values that is kept in each 128 elements, rounded up: the largest
                   magnitudes, of equal ones the first; all others are 0. 1 = all that are not 0
    Returns: by source rank, tensors of the sender's shape, on the device and of the dtype of
             tensor_list; every value is thinned and rounded as if it had crossed, also where it
             stays on its machine or its rank, so that the result depends on no topology
    Cost:    one gather of the shapes, one round of metadata; what crosses between nodes is the
             values and their positions, as columns, bitmask or runs, whichever is smallest
    Errors, on every rank: InvalidArgumentError, MismatchError (dtype, compress_type, sparse_ratio)
    """
    if group is None:
        group = only_group("sparse_all_to_all")
    refusal: Optional[Exception] = None
    try:
        _check(tensor_list, group, compress_type, sparse_ratio)
        told = _describe(tensor_list, compress_type, sparse_ratio)
    except (InvalidArgumentError, ValueError) as error:
        refusal, told = error, b"!" + str(error).encode()
    everyone = group.all_gather(told)
    if refusal is not None:
        raise refusal
    shapes = _shapes_for(group.rank, everyone)
    first = tensor_list[0]
    parts = [_thinned(staging.to_host(tensor).reshape(-1), compress_type, sparse_ratio)
             for tensor in tensor_list]
    targets = torch.repeat_interleave(torch.arange(group.size),
                                      torch.tensor([len(part) for part in parts]))
    exchange = _exchange(group, first.dtype, compress_type, sparse_ratio)
    plan = exchange.plan(targets.reshape(-1, 1), torch.ones(len(targets), 1))
    rows = torch.from_dlpack(exchange.dispatch(plan, torch.cat(parts).contiguous()))
    sizes = [math.prod(shape) for shape in shapes]
    received = rows.split([-(-size // _COLUMNS) for size in sizes])
    return [staging.to_device(part.reshape(-1)[:size].clone().view(shape), first.device)
            for part, size, shape in zip(received, sizes, shapes)]
