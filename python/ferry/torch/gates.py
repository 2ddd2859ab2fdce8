"""Gates: which experts a token goes to, and with which weights.

Everything here is FP32, whatever the dtype of the model and whether or not autocast is on: logits are
computed from an FP32 copy of the tokens and of the router's weight, and `topk_weights` never pass
through a half-precision format. Choices are deterministic: equal scores go to the lowest expert id,
and the logits of a token do not depend on which other tokens stand in the batch.

A gate of one's own is any `torch.nn.Module` whose forward returns a `GateOutput`; taking `mask` and
`replay` as keywords, as the gates here do, is optional (see `TopkGate.forward`).
"""

from dataclasses import dataclass
from typing import Callable, Optional, Tuple

import torch
from torch import Tensor, nn

from ferry.torch import losses
from ferry.torch.capacity import apply_capacity, capacity_of
from ferry.torch.precision import fp32_linear, fp32_sigmoid, no_autocast
from ferry.torch.seeds import seed_of, uniform_

#: Added to the sum of sigmoid scores before it divides, as DeepSeek-V3 does.
_RENORMALISE_EPSILON = 1e-20


@dataclass
class GateOutput:
    """What a gate decides for T tokens.

    topk_idx      int64 or int32 [T, k]; an expert, or -1 = none (padding, dropped)
    topk_weights  float32 [T, k], differentiable; 0 where topk_idx is -1
    scores        float32 [T, E]: what the weights were taken from, differentiable
    counts        int64 [E]: tokens that chose an expert, before any drop
    dropped       int64 [E]: how many of them lost their place to a capacity
    aux_loss      float32 scalar, to be added to the model's loss; 0 where no loss was asked for
    chosen_idx    int64 [T, k]: topk_idx before a capacity emptied slots; renormalised weights divide
                  by the sum over these
    replayed      True when the choice was given (`replay`), not made: a recomputed layer
    not_finite    bool [T]: real tokens whose logits are no finite numbers. They go to no expert and
                  count in no loss; `MoELayer` gives NaN for them. None = none is
    """

    topk_idx: Tensor
    topk_weights: Tensor
    scores: Optional[Tensor] = None
    counts: Optional[Tensor] = None
    dropped: Optional[Tensor] = None
    aux_loss: Optional[Tensor] = None
    chosen_idx: Optional[Tensor] = None
    replayed: bool = False
    not_finite: Optional[Tensor] = None


def stable_topk(values: Tensor, k: int) -> Tensor:
    """Ids of the k largest values of each row, largest first; equal values in ascending id.

    Shapes: values [..., n] -> int64 [..., k]. `torch.topk` leaves the order of ties open.
    """
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :k]


def topk_from_logits(logits: Tensor, num_topk: int, *, score: str = "softmax",
                     renormalise: bool = True):
    """The choice of a plain router: top-k of softmax or sigmoid scores.

    Shapes: logits [T, E] of any float dtype -> (int64 [T, k], float32 [T, k])
    Errors: ValueError (score, num_topk)
    """
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"topk_from_logits: score = {score!r}; allowed: 'softmax', 'sigmoid'")
    if not 1 <= num_topk <= logits.shape[-1]:
        raise ValueError(f"topk_from_logits: num_topk = {num_topk}; allowed: 1.."
                         f"{logits.shape[-1]}, the experts in the logits")
    with no_autocast(logits):
        logits = logits.float()
        scores = torch.softmax(logits, -1) if score == "softmax" else fp32_sigmoid(logits)
        topk_idx = stable_topk(scores, num_topk)
        weights = scores.gather(-1, topk_idx)
        if renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _RENORMALISE_EPSILON)
    return topk_idx, weights


class TopkGate(nn.Module):
    """The common part of the gates: logits, group limiting, top-k, masks, capacity, losses.

    hidden, num_experts, num_topk   sizes
    renormalise          divide the k weights of a token by their sum
    scaling_factor       multiplied to the weights after that (routed scaling factor)
    num_groups, topk_groups, group_score
                         experts stand in `num_groups` equal consecutive groups; a token may only use
                         its best `topk_groups`; a group is worth the sum of its two best experts
                         ("top2_sum", DeepSeek-V3) or its best one ("max", DeepSeek-V2). The experts
                         of the other groups get -inf, never 0: with negative scores 0 would win
    capacity_factor, capacity
                         at most ceil(factor x real tokens x k / E), or exactly `capacity`, tokens of
                         this call per expert; the lowest weights go first; never more than there
                         are tokens
    balance_loss, balance_coef, z_loss_coef
                         "switch" or "variance" (ferry.torch.losses), and the router z-loss, summed
                         into aux_loss
    Errors: ValueError that names the argument, its value and what is allowed
    """

    def __init__(self, hidden: int, num_experts: int, num_topk: int, *, renormalise: bool = True,
                 scaling_factor: float = 1.0, num_groups: int = 1, topk_groups: int = 1,
                 group_score: str = "top2_sum", capacity_factor: Optional[float] = None,
                 capacity: Optional[int] = None, balance_loss: Optional[str] = None,
                 balance_coef: float = 0.01, z_loss_coef: float = 0.0,
                 dtype: Optional[torch.dtype] = None) -> None:
        super().__init__()
        self.hidden, self.num_experts, self.num_topk = hidden, num_experts, num_topk
        self.renormalise, self.scaling_factor = renormalise, scaling_factor
        self.num_groups, self.topk_groups, self.group_score = num_groups, topk_groups, group_score
        self.capacity_factor, self.capacity = capacity_factor, capacity
        self.balance_loss, self.balance_coef = balance_loss, balance_coef
        self.z_loss_coef = z_loss_coef
        self._check()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype))
        #: int64 [E]: choices in training since the last `take_load`. Not a buffer: DDP would overwrite
        #: it with rank 0's.
        self.load = torch.zeros(num_experts, dtype=torch.int64)
        self.reset_parameters()

    def reset_parameters(self, seed: Optional[int] = None) -> None:
        """Uniform in +-1/sqrt(hidden), as nn.Linear; from PyTorch's generator without a seed."""
        seed = int(torch.randint(1 << 62, ())) if seed is None else seed
        uniform_(self.weight, self.hidden ** -0.5, seed_of(seed, "gate"))

    def forward(self, x: Tensor, mask: Optional[Tensor] = None,
                replay: Optional[GateOutput] = None) -> GateOutput:
        """Chooses experts.

        Shapes: x [..., hidden], T rows in all; mask bool [...], False = padding: such a token gets
                no expert, takes no capacity and counts in no loss
        replay: what an earlier call on these tokens gave: its choice is taken as it is, also its -1
                and its counts, so that a recomputed layer routes as it did before
        A token with NaN or Inf, or whose logits overflow, gets no expert: one of them must not end
        the step of every rank (see GateOutput.not_finite)
        Errors: ValueError (shapes)
        """
        x = x.reshape(-1, self._width(x))
        mask = None if mask is None else self._mask(mask, x.shape[0])
        with no_autocast(x):
            logits, not_finite = self._logits(x)
            if not_finite is not None:
                real = torch.ones_like(not_finite) if mask is None else mask
                mask, not_finite = real & ~not_finite, real & not_finite
            scores = self._scores(logits)
            # A non-reentrant checkpoint wants a replay to save the same tensors in the same order:
            # what differs between the two is done without a graph.
            with torch.no_grad():
                chosen_idx = (self._choose(scores, mask) if replay is None
                              else self._replayed(replay, x.shape[0]))
            weights = self._weights(scores, chosen_idx)
            if replay is None:
                topk_idx, counts, dropped = self._limited(chosen_idx, weights, mask)
                if self.training:
                    self.load = self.load.to(counts.device) + counts
            else:
                topk_idx, counts, dropped = replay.topk_idx, replay.counts, replay.dropped
            weights = weights.masked_fill(topk_idx < 0, 0.0)
            aux_loss = self._aux_loss(logits, scores, counts, mask)
        return GateOutput(topk_idx, weights, scores, counts, dropped, aux_loss, chosen_idx,
                          replay is not None, not_finite)

    def take_load(self) -> Tensor:
        """int64 [E]: this rank's choices in training since the last call; starts anew."""
        load, self.load = self.load, torch.zeros_like(self.load)
        return load

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, num_experts={self.num_experts}, num_topk={self.num_topk}"

    def _logits(self, x: Tensor) -> Tuple[Tensor, Optional[Tensor]]:
        """float32 [T, E], and which tokens' are not finite: those are zeros here, and so are their
        gradients, because zero times NaN would be NaN in the gradient of the weight."""
        finite = torch.isfinite(x.detach()).all(-1, keepdim=True)
        if not bool(finite.all()):
            x = x.masked_fill(~finite, 0.0)
        logits = fp32_linear(x, self.weight)
        finite = finite & torch.isfinite(logits.detach()).all(-1, keepdim=True)
        if bool(finite.all()):
            return logits, None
        return logits.masked_fill(~finite, 0.0), ~finite.squeeze(-1)

    def _choose(self, scores: Tensor, mask: Optional[Tensor]) -> Tensor:
        """int64 [T, k], before any capacity."""
        topk_idx = stable_topk(self._choice(scores), self.num_topk)
        return topk_idx if mask is None else topk_idx.masked_fill(~mask.unsqueeze(-1), -1)

    @torch.no_grad()
    def _limited(self, chosen_idx: Tensor, weights: Tensor, mask: Optional[Tensor]):
        """topk_idx, counts and dropped, after the capacity if there is one."""
        counts = losses.expert_counts(chosen_idx, self.num_experts)
        if self.capacity is None and self.capacity_factor is None:
            return chosen_idx, counts, torch.zeros_like(counts)
        num_real = chosen_idx.shape[0] if mask is None else int(mask.sum())
        limit = capacity_of(num_real, self.num_topk, self.num_experts, self.capacity_factor,
                            self.capacity)
        topk_idx, dropped = apply_capacity(chosen_idx, weights, self.num_experts, limit)
        return topk_idx, counts, dropped

    # What the kinds of gates differ in.
    def _scores(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def _choice_scores(self, scores: Tensor) -> Tensor:
        return scores

    def _shares(self, scores: Tensor) -> Tensor:
        """Scores as probabilities over experts, for the balance losses."""
        return scores

    def _choice(self, scores: Tensor) -> Tensor:
        """What top-k ranks."""
        choice = self._choice_scores(scores)
        if self.num_groups == 1:
            return choice
        groups = choice.unflatten(-1, (self.num_groups, -1))
        if self.group_score == "max":
            worth = groups.amax(-1)
        else:
            worth = groups.topk(2, dim=-1).values.sum(-1)
        allowed = torch.zeros_like(worth, dtype=torch.bool)
        allowed.scatter_(-1, stable_topk(worth, self.topk_groups), True)
        return groups.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)

    def _weights(self, scores: Tensor, topk_idx: Tensor) -> Tensor:
        weights = scores.gather(-1, topk_idx.clamp(min=0))
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _RENORMALISE_EPSILON)
        return weights * self.scaling_factor

    def _aux_loss(self, logits, scores, counts, mask) -> Tensor:
        loss = logits.new_zeros(())
        if self.balance_loss is not None:
            shares = self._shares(scores)
            kind: Callable = (losses.switch_loss if self.balance_loss == "switch"
                              else losses.variance_loss)
            loss = loss + self.balance_coef * kind(counts, shares, mask)
        if self.z_loss_coef:
            loss = loss + self.z_loss_coef * losses.z_loss(logits, mask)
        return loss

    def _replayed(self, replay: GateOutput, num_tokens: int) -> Tensor:
        if tuple(replay.topk_idx.shape) != (num_tokens, self.num_topk):
            raise ValueError(f"gate: replay.topk_idx has shape {list(replay.topk_idx.shape)}; "
                             f"allowed: [{num_tokens}, {self.num_topk}], the tokens of x by num_topk")
        return replay.chosen_idx

    def _width(self, x: Tensor) -> int:
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"gate: x has shape {list(x.shape)}; allowed: [..., {self.hidden}], "
                             "because hidden was given to the gate")
        return self.hidden

    def _mask(self, mask: Tensor, num_tokens: int) -> Tensor:
        if mask.dtype != torch.bool or mask.numel() != num_tokens:
            raise ValueError(f"gate: mask is {mask.dtype} {list(mask.shape)}; allowed: torch.bool "
                             f"with {num_tokens} values, True = a real token; fix: mask.bool()")
        return mask.reshape(-1)

    def _check(self) -> None:
        def refuse(what: str, allowed: str) -> None:
            raise ValueError(f"{type(self).__name__}: {what}; allowed: {allowed}")
        if not 1 <= self.num_topk <= self.num_experts:
            refuse(f"num_topk = {self.num_topk}", f"1..{self.num_experts}, because num_experts = "
                   f"{self.num_experts}")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            refuse(f"num_groups = {self.num_groups}", f"a divisor of num_experts = "
                   f"{self.num_experts}")
        group_size = self.num_experts // self.num_groups
        if not 1 <= self.topk_groups <= self.num_groups:
            refuse(f"topk_groups = {self.topk_groups}", f"1..{self.num_groups}, the groups")
        if self.num_topk > self.topk_groups * group_size:
            refuse(f"num_topk = {self.num_topk} with topk_groups = {self.topk_groups} groups of "
                   f"{group_size}", "at most the experts of the chosen groups")
        if self.group_score not in ("top2_sum", "max"):
            refuse(f"group_score = {self.group_score!r}", "'top2_sum', 'max'")
        if self.num_groups > 1 and self.group_score == "top2_sum" and group_size < 2:
            refuse("group_score = 'top2_sum' with groups of one expert", "'max'")
        if self.balance_loss not in (None, "switch", "variance"):
            refuse(f"balance_loss = {self.balance_loss!r}", "None, 'switch', 'variance'")
        if self.capacity is not None and self.capacity_factor is not None:
            refuse("capacity and capacity_factor are both given", "one of them")
        if self.capacity is not None and self.capacity < 1:
            refuse(f"capacity = {self.capacity}", "at least 1, or None for no limit")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            refuse(f"capacity_factor = {self.capacity_factor}", "above 0, or None for no limit")


class SoftmaxGate(TopkGate):
    """Top-k of a softmax over all experts (Switch, GShard, Mixtral, DeepSeek-V2, Qwen)."""

    def _scores(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=-1)


class SigmoidGate(TopkGate):
    """Sigmoid scores with a selection bias, as in DeepSeek-V3.

    `selection_bias` float32 [E] is added to choose experts and groups; the weights are the unbiased
    scores. It is no parameter: `ferry.torch.update_selection_bias` moves it after a step. It stays
    FP32 when the model is moved to another dtype, where steps of 0.001 would be rounded away.
    Source: DeepSeek-V3 Technical Report, section 2.1.2; the published model's router
    """

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.register_buffer("selection_bias", torch.zeros(self.num_experts))

    def _scores(self, logits: Tensor) -> Tensor:
        return fp32_sigmoid(logits)

    def _choice_scores(self, scores: Tensor) -> Tensor:
        return scores + self.selection_bias

    def _shares(self, scores: Tensor) -> Tensor:
        return scores / (scores.sum(-1, keepdim=True) + _RENORMALISE_EPSILON)

    def _apply(self, fn):
        kept = self.selection_bias
        super()._apply(fn)
        if self.selection_bias.dtype != torch.float32:
            self.selection_bias = kept.to(self.selection_bias.device)
        return self
