"""The exchange of a Mixture-of-Experts layer by torch.distributed (gloo), as one writes it by hand.

One row per (token, slot) by all_to_all_single: counts first, then rows that are packed with
index_select into buffers that stay allocated. Backward uses the same counts. Gloo moves bf16 as the
16-bit type that it knows; nothing computes with it on the way.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class GlooExchange:
    """plan, dispatch, combine and both ways back, for experts in blocks of equal size.

    Shapes: as ferry.Exchange with expert_major rows and weights at combine
    """

    def __init__(self, num_experts: int, hidden: int, dtype: torch.dtype) -> None:
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.local_experts = num_experts // self.ranks
        self.num_experts, self.hidden, self.dtype = num_experts, hidden, dtype
        self._buffers: dict[str, Tensor] = {}

    def _buffer(self, name: str, rows: int) -> Tensor:
        """Memory of that name for so many rows; it stays allocated."""
        kept = self._buffers.get(name)
        if kept is None or kept.shape[0] < rows:
            kept = self._buffers[name] = torch.zeros(rows, self.hidden, dtype=self.dtype)
        return kept[:rows]

    def _swap(self, received: Tensor, sent: Tensor, out_rows: list[int], in_rows: list[int]) -> None:
        if self.dtype == torch.bfloat16:
            received, sent = received.view(torch.float16), sent.view(torch.float16)
        dist.all_to_all_single(received, sent, out_rows, in_rows)

    def plan(self, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Exchanges counts per expert, and works out who sends which rows where."""
        self.topk, self.weights = topk_idx.shape[1], topk_weights
        flat = topk_idx.reshape(-1)
        self.order = torch.argsort(flat, stable=True)  # slots by expert, then token
        self.tokens = self.order // self.topk
        sent = torch.bincount(flat, minlength=self.num_experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        counts = received.view(self.ranks, self.local_experts)  # [source, expert]
        self.sent_rows = sent.view(self.ranks, -1).sum(1).tolist()
        self.received_rows = counts.sum(1).tolist()
        self.expert_counts = counts.sum(0).tolist()
        # Rows come by (source, expert) and are worked on by (expert, source).
        starts = (counts.reshape(-1).cumsum(0) - counts.reshape(-1)).view_as(counts)
        self.by_expert = torch.cat(
            [torch.arange(start, start + count)
             for start, count in zip(starts.t().reshape(-1).tolist(),
                                     counts.t().reshape(-1).tolist())])
        self.by_source = torch.empty_like(self.by_expert)
        self.by_source[self.by_expert] = torch.arange(len(self.by_expert))
        self.by_slot = torch.empty_like(self.order)
        self.by_slot[self.order] = torch.arange(len(self.order))

    def _to_experts(self, rows: Tensor, name: str) -> Tensor:
        """Rows by (expert, slot) of this rank -> rows of this rank's experts."""
        arrived = self._buffer("arrived", len(self.by_expert))
        self._swap(arrived, rows, self.received_rows, self.sent_rows)
        return torch.index_select(arrived, 0, self.by_expert,
                                  out=self._buffer(name, len(self.by_expert)))

    def _to_home(self, rows: Tensor, name: str) -> Tensor:
        """The other way; the result is by slot."""
        packed = torch.index_select(rows, 0, self.by_source,
                                    out=self._buffer("packed_back", len(self.by_source)))
        returned = self._buffer("returned", len(self.order))
        self._swap(returned, packed, self.sent_rows, self.received_rows)
        return torch.index_select(returned, 0, self.by_slot,
                                  out=self._buffer(name, len(self.order)))

    def dispatch(self, x: Tensor) -> Tensor:
        packed = torch.index_select(x, 0, self.tokens, out=self._buffer("sent", len(self.tokens)))
        return self._to_experts(packed, "rows")

    def combine(self, y: Tensor) -> Tensor:
        self.y_by_slot = self._to_home(y, "y").view(-1, self.topk, self.hidden)
        return torch.bmm(self.weights.to(self.dtype).unsqueeze(1), self.y_by_slot).squeeze(1)

    def combine_backward(self, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        grad_weights = torch.bmm(self.y_by_slot, grad_out.unsqueeze(2)).squeeze(2).float()
        slot_weights = self.weights.reshape(-1)[self.order].to(self.dtype).unsqueeze(1)
        packed = torch.index_select(grad_out, 0, self.tokens,
                                    out=self._buffer("sent", len(self.tokens)))
        return self._to_experts(packed.mul_(slot_weights), "grad_y"), grad_weights

    def dispatch_backward(self, grad_rows: Tensor) -> Tensor:
        return self._to_home(grad_rows, "grad_x").view(-1, self.topk, self.hidden).sum(1)
