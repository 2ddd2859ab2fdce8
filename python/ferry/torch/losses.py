"""Losses that keep experts evenly loaded, and the bias update that needs no loss. All FP32."""

from typing import Iterable, Optional, Union

import torch
from torch import Tensor

from ferry.torch.communicators import Communicator, as_communicator


def expert_counts(topk_idx: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: how many slots name each expert; -1 counts nowhere."""
    chosen = topk_idx.reshape(-1)
    return torch.bincount(chosen[chosen >= 0].to(torch.int64), minlength=num_experts)


def _real(values: Tensor, mask: Optional[Tensor]) -> Tensor:
    return values if mask is None else values[mask.reshape(-1)]


def count_variance(counts: Tensor) -> Tensor:
    """Variance of the counts over their mean: 0 when even, about 1 when experts are drawn at random.

    Shapes: counts [E], any dtype -> float32 scalar; 0 where nothing was routed
    """
    counts = counts.float()
    mean = counts.mean()
    return torch.where(mean > 0, counts.var(unbiased=False) / mean.clamp(min=1e-20),
                       torch.zeros_like(mean))


def variance_loss(counts: Tensor, shares: Tensor, mask: Optional[Tensor] = None) -> Tensor:
    """`count_variance` of the real counts, with the gradient of the expected ones.

    Counts have no gradient; it goes through what the router expected them to be: the shares of the
    tokens, summed, scaled to the same total.
    Shapes: counts int64 [E]; shares float32 [T, E], rows sum to 1; mask bool [T] -> scalar
    """
    expected = _real(shares, mask).sum(0)
    total = counts.sum().float()
    expected = expected * (total / expected.detach().sum().clamp(min=1e-20))
    return count_variance(counts.float() + expected - expected.detach())


def switch_loss(counts: Tensor, shares: Tensor, mask: Optional[Tensor] = None) -> Tensor:
    """The load-balancing loss of the Switch Transformer: E * sum_e f_e * P_e.

    f_e is the fraction of routed slots that went to expert e, P_e the mean share of e over tokens; 1
    when even, E when one expert has everything. With top-1 this is the published formula; with top-k
    f counts all k slots and still sums to 1.
    Shapes: counts int64 [E]; shares float32 [T, E], rows sum to 1; mask bool [T] -> scalar
    Source: Fedus, Zoph, Shazeer: Switch Transformers, equations 4 to 6
    """
    shares = _real(shares, mask)
    if shares.shape[0] == 0:
        return shares.sum()
    fraction = counts.float() / counts.sum().clamp(min=1).float()
    return counts.numel() * (fraction * shares.mean(0)).sum()


def z_loss(logits: Tensor, mask: Optional[Tensor] = None) -> Tensor:
    """The router z-loss: mean over tokens of logsumexp(logits)^2, which keeps logits small.

    Shapes: logits float32 [T, E]; mask bool [T] -> scalar
    Source: Zoph et al.: ST-MoE, equation 5
    """
    logits = _real(logits, mask)
    if logits.shape[0] == 0:
        return logits.sum()
    return torch.logsumexp(logits, dim=-1).square().mean()


def update_selection_bias(gates: Union[torch.nn.Module, Iterable[torch.nn.Module]],
                          rate: float = 0.001,
                          world: Union[Communicator, object, None] = None) -> None:
    """Balances without a loss: after a step, every expert's bias moves by `rate` towards the mean
    load: up when it had less, down when it had more.

    gates   a model, or gates; every module with a `selection_bias` is updated from its own load since
            the last update (`take_load`). All ranks must name the same gates in the same order
    world   whose loads are added: a Ferry group, an mpi4py communicator, a process group, a callable
            that sums an int64 tensor over ranks in place; None = this rank alone
    Cost:   one all_reduce of all gates' loads
    Source: DeepSeek-V3 Technical Report, section 2.1.2 (sign of mean load minus load)
    """
    modules = gates.modules() if isinstance(gates, torch.nn.Module) else gates
    biased = [gate for gate in modules if getattr(gate, "selection_bias", None) is not None]
    if not biased:
        return
    loads = torch.cat([gate.take_load().cpu() for gate in biased])
    if callable(world) and not hasattr(world, "rank"):
        world(loads)
    else:
        as_communicator(world).sum_(loads)
    with torch.no_grad():
        for gate, load in zip(biased, loads.split([g.selection_bias.numel() for g in biased])):
            load = load.double()
            step = torch.sign(load.mean() - load).to(gate.selection_bias)
            gate.selection_bias.add_(step, alpha=rate)
