"""Which parameters belong to one expert's rank and which to every rank; gradients and norms over both.

Scale. Every rank r of the world (R ranks) calls backward on its own loss L_r, a mean over its own
tokens; with equally many tokens each, the loss of the step is L = 1/R * sum_r L_r.
- A dense parameter's gradient on rank r is dL_r; summed over all ranks and divided by R it is dL.
- An expert's gradient on its rank already is the sum of dL_r over the ranks of its expert-parallel
  group, because their tokens came to it and combine sent their gradients. Summed over its copies (its
  expert-data-parallel group) it is the sum over *all* ranks. So it is divided by R as well, not by the
  number of copies: that would leave it too large by the size of the expert-parallel group.
With unequal token counts let every rank use L_r = sum over its tokens * R / (tokens of all ranks).
"""

from typing import Any, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from ferry.torch.communicators import Communicator, as_communicator
from ferry.torch.compression import GradientCompressor
from ferry.torch.dispatcher import Dispatcher

#: Bytes of one all_reduce: few calls, and little memory beside the gradients.
_BUCKET_BYTES = 32 << 20


class WorldSplit(NamedTuple):
    """expert_parallel: the ranks that share one copy of the experts; expert_data_parallel: the ranks
    that hold the same experts, or None where there is one copy."""

    expert_parallel: Any
    expert_data_parallel: Optional[Any]


def split_world(world: Any, expert_parallel: int) -> WorldSplit:
    """Splits a ferry Group into EP x DP: consecutive ranks share a copy of the experts.

    Errors: ValueError (a size that does not divide the world)
    """
    if expert_parallel < 1 or world.size % expert_parallel:
        raise ValueError(f"split_world: expert_parallel = {expert_parallel}; allowed: a divisor of "
                         f"{world.size}, the ranks of the world")
    first = world.rank // expert_parallel * expert_parallel
    own = world.subgroup(range(first, first + expert_parallel))
    copies = None
    if expert_parallel < world.size:
        copies = world.subgroup(range(world.rank % expert_parallel, world.size, expert_parallel))
    return WorldSplit(own, copies)


def mark_experts(module: nn.Module) -> nn.Module:
    """Says that all parameters below `module` belong to experts of this rank; returns it.

    `GroupedExperts` is marked already. The mark is the module's, so copies keep it.
    """
    module.ferry_experts = True
    return module


def _named(model: nn.Module) -> Iterator[Tuple[str, nn.Parameter, bool]]:
    """Every parameter once, in the order of the modules, and whether it is an expert's."""
    inside = set()
    for module in model.modules():
        if getattr(module, "ferry_experts", False):
            inside.update(id(parameter) for parameter in module.parameters())
    for name, parameter in model.named_parameters():
        yield name, parameter, id(parameter) in inside


def expert_parameters(model: nn.Module) -> List[nn.Parameter]:
    """The parameters that only the ranks of one expert hold, in the order of the modules."""
    return [parameter for _, parameter, is_expert in _named(model) if is_expert]


def dense_parameters(model: nn.Module) -> List[nn.Parameter]:
    """The parameters that every rank holds alike, in the order of the modules."""
    return [parameter for _, parameter, is_expert in _named(model) if not is_expert]


def ignore_experts_in_ddp(model: nn.Module) -> nn.Module:
    """Makes DistributedDataParallel leave expert parameters alone; call it before wrapping `model`.

    DDP then averages the dense gradients; `reduce_gradients(..., dense=False)` does the experts.
    Names that the model already ignores stay ignored.
    """
    names = list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    names += [name for name, _, is_expert in _named(model) if is_expert and name not in names]
    model._ddp_params_and_buffers_to_ignore = names
    return model


def _working_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Half-precision gradients are summed in FP32 and rounded once."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _buckets(parameters: List[nn.Parameter]) -> Iterator[List[nn.Parameter]]:
    """Runs of parameters of one working dtype, up to the bucket size: the same on every rank."""
    bucket: List[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        size = parameter.numel() * (8 if parameter.dtype == torch.float64 else 4)
        if bucket and (held + size > _BUCKET_BYTES
                       or _working_dtype(parameter) != _working_dtype(bucket[0])):
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += size
    if bucket:
        yield bucket


def _sum_gradients(parameters: List[nn.Parameter], group: Communicator, scale: float,
                   compressor: Optional[GradientCompressor]) -> None:
    if group.size == 1:  # nothing to add: scaled where they are
        for parameter in parameters:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.detach().mul_(scale)
                if compressor is not None:
                    compressor.settle(parameter)
        return
    for bucket in _buckets([p for p in parameters if p.requires_grad]):
        dtype = _working_dtype(bucket[0])
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).detach()
                          .to(dtype).reshape(-1) for p in bucket])
        if compressor is not None and dtype == torch.float32:
            flat = compressor.sum(flat.mul_(scale), bucket, group)
        else:
            group.sum_(flat)
            flat.mul_(scale)
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket])):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part.view_as(parameter))


def reduce_gradients(model: nn.Module, world: object, expert_data_parallel: object = None, *,
                     dense: bool = True, compressor: Optional[GradientCompressor] = None) -> None:
    """Turns each rank's gradients into those of the mean of all ranks' losses.

    world                 all ranks that work on the step: a ferry Group, an mpi4py communicator or a
                          torch.distributed process group
    expert_data_parallel  the ranks that hold copies of this rank's experts; None = there is one copy
                          (the expert-parallel group is the world)
    dense                 False where DDP has averaged the dense gradients already
    compressor            gathers int8 and carries over what it rounds away, instead of summing; see
                          `GradientCompressor`
    Requires: the same call on all ranks; the layer's backward is done
    Ensures:  dense gradients averaged over the world; expert gradients summed over their copies and
              divided by the size of the world (see the top of this file); the same for every split
              of the world into EP x DP, but for what a compressor rounds. A parameter without a
              gradient counts as zeros
    Cost:     all_reduces of 32 MiB, in the order of the modules. A ferry Group gathers: every rank
              gets the gradients of all of its R ranks, R x their bytes; MPI and torch.distributed reduce
    Errors:   TypeError (what is no group), ValueError (copies that do not divide the world, or that,
              times the expert-parallel group of a layer, are not the world; a compressor of another
              model), MismatchError (compressors of the ranks that are not alike)
    """
    everyone, copies = as_communicator(world), as_communicator(expert_data_parallel)
    _check_copies(model, everyone, copies)
    scale = 1.0 / everyone.size
    if compressor is not None and not compressor.fits(model, everyone):
        compressor = None  # a step that a loss scaler may leave out
    if dense:
        _sum_gradients(dense_parameters(model), everyone, scale, compressor)
    _sum_gradients(expert_parameters(model), copies, scale, compressor)


def _check_copies(model: nn.Module, everyone: Communicator, copies: Communicator) -> None:
    if everyone.size % copies.size:
        raise ValueError(f"expert_data_parallel has {copies.size} ranks, the world {everyone.size}; "
                         "allowed: a divisor, EP x DP = world; fix: give the group of the ranks that "
                         "hold the same experts")
    for name, module in model.named_modules():
        dispatcher = getattr(module, "dispatcher", None)
        if not isinstance(dispatcher, Dispatcher):
            continue
        ranks = dispatcher.group.size
        if ranks * copies.size != everyone.size:
            raise ValueError(
                f"layer {name!r} shares its experts over {ranks} ranks, expert_data_parallel has "
                f"{copies.size}, the world {everyone.size}; allowed: EP x DP = world, and {ranks} x "
                f"{copies.size} is not {everyone.size}; fix: give as expert_data_parallel the group "
                "of the ranks that hold the same experts, such as "
                "split_world(...).expert_data_parallel")


def _power(grad: Tensor, norm_type: float) -> Tensor:
    """Sum of |g| ** norm_type, float64. Rows in FP32, their sum in FP64: PyTorch's norm in FP64 of an
    FP32 tensor on a CPU is twenty times slower. Where FP32 overflows, that one."""
    if grad.dtype == torch.float32 and grad.dim() > 0:
        rows = torch.linalg.vector_norm(grad, norm_type, dim=-1)
        total = (rows.double() ** norm_type).sum().cpu()
        if bool(torch.isfinite(total)):
            return total
    return torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64).cpu() ** norm_type


def _sum_of_powers(parameters: List[nn.Parameter], norm_type: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        if parameter.grad is not None:
            total += _power(parameter.grad.detach(), norm_type)
    return total


def clip_grad_norm_(model: nn.Module, max_norm: float, world: object,
                    expert_data_parallel: object = None, *, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False) -> Tensor:
    """Scales all gradients so that the norm of the whole model's gradient is at most `max_norm`.

    Each dense parameter and each expert counts once, however many ranks hold it; so the norm, and
    what is clipped, are the same for every split of the world into EP x DP.
    Requires: reduce_gradients before, with the same groups; the same call on all ranks
    Returns:  the norm before clipping, float32 scalar, the same on every rank
    Ensures:  where it is not finite, all gradients on all ranks are NaN: no loss scaler steps
    Cost:     one all_reduce of one number
    Errors:   ValueError (norm_type; groups, as reduce_gradients), RuntimeError where
              error_if_nonfinite and the norm is not finite
    """
    if not 0 < norm_type < float("inf"):
        raise ValueError(f"clip_grad_norm_: norm_type = {norm_type}; allowed: a finite number above 0")
    everyone, copies = as_communicator(world), as_communicator(expert_data_parallel)
    _check_copies(model, everyone, copies)
    experts = (_sum_of_powers(expert_parameters(model), norm_type) / copies.size).reshape(1)
    everyone.sum_(experts)
    total = (_sum_of_powers(dense_parameters(model), norm_type) + experts[0]) ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"clip_grad_norm_: the norm of all gradients is {float(total)}; fix: look "
                           "for the first layer whose gradient is not finite, or leave "
                           "error_if_nonfinite out")
    # Not a number where the norm is not finite, so that every rank sees that the step is lost: on
    # the ranks without the infinite gradient 0 would look like a good one.
    finite = bool(torch.isfinite(total))
    factor = float(max_norm) / (float(total) + 1e-6) if finite else float("nan")
    if not factor >= 1.0:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach().mul_(factor)
    return total.float()
