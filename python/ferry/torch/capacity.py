"""Capacity: at most so many tokens per expert, the lowest weights dropped first, every drop counted."""

import math
from typing import Optional, Tuple

import torch
from torch import Tensor


def capacity_of(num_tokens: int, num_topk: int, num_experts: int, factor: Optional[float],
                capacity: Optional[int]) -> int:
    """Tokens that one expert takes: `capacity`, or ceil(factor x tokens x k / E), at least 1 and at
    most `num_tokens`, because a token goes to an expert once."""
    if capacity is None:
        capacity = max(1, math.ceil(factor * num_tokens * num_topk / num_experts))
    return min(capacity, num_tokens)


def apply_capacity(topk_idx: Tensor, topk_weights: Tensor, num_experts: int,
                   capacity: int) -> Tuple[Tensor, Tensor]:
    """Empties the slots that find no place at their expert.

    Shapes:  topk_idx int [T, k], -1 = none; topk_weights float32 [T, k]
    Ensures: each expert keeps its `capacity` slots of largest weight; among equal weights the earlier
             token, then the earlier slot
    Returns: topk_idx with -1 in dropped slots; int64 [E], slots dropped per expert
    """
    expert = topk_idx.reshape(-1)
    heaviest = torch.sort(topk_weights.detach().reshape(-1), descending=True, stable=True).indices
    by_expert = torch.sort(expert[heaviest], stable=True)
    order, sorted_expert = heaviest[by_expert.indices], by_expert.values
    taken = sorted_expert >= 0
    counts = torch.bincount(sorted_expert[taken], minlength=num_experts)
    first = torch.cumsum(counts, 0) - counts
    place = torch.arange(sorted_expert.numel(), device=expert.device) - (~taken).sum()
    over = taken & (place - first[sorted_expert.clamp(min=0)] >= capacity)
    kept = expert.clone()
    kept[order[over]] = -1
    return kept.view_as(topk_idx), (counts - capacity).clamp(min=0)
