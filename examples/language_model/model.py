"""A decoder-only language model over bytes, with a Mixture of Experts in every block.

Invariants: first weights are a function of the seed and of what a parameter is, so every rank and
every split of the ranks starts alike. Attention is causal, with rotary positions, so a text may be
longer than what the model was trained on; `Cache` then keeps the last `context` positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

import ferry
from ferry.torch import MoELayer, SharedExperts, SigmoidGate

from precision import DTYPES, rounded, softmax_gate

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of the model; `exchange` are options of ferry.Exchange.

    num_experts 0 makes the dense model of the same active width: topk + shared experts' in one
    gate      "sigmoid": balanced by a bias, the same for every split of the ranks; "softmax": by a loss
    balance   of the gate: rate of the bias, or coefficient of the loss
    row_dtype    of rows that go to experts and back, and their gradients: "f32", "bf16", "f16"
    gate_dtype   the same; below f32 it is there to show what it spoils
    stream_format   of the residual stream between layers, which layer norms read: a dtype, or
                 "fp8_e4m3fn" or "int8" with a scale per token and 128 values; the same
    """

    hidden: int = 128
    num_layers: int = 4
    num_heads: int = 4
    context: int = 128
    num_experts: int = 64
    num_topk: int = 8
    num_shared_experts: int = 1
    intermediate: int = 32
    gate: str = "sigmoid"
    balance: float = 0.01
    gate_dtype: str = "f32"
    row_dtype: str = "f32"
    stream_format: str = "f32"
    overlap: int = 1
    seed: int = 1
    exchange: dict = field(default_factory=dict)

    def check(self) -> None:
        """Errors: ValueError that names the option"""
        if self.hidden % (2 * self.num_heads):
            raise ValueError(f"hidden = {self.hidden}; allowed: a multiple of 2 x num_heads = "
                             f"{2 * self.num_heads}")
        if self.gate_dtype != "f32" and self.gate != "softmax":
            raise ValueError(f"gate_dtype = {self.gate_dtype} with gate = {self.gate}; allowed: "
                             "gate = softmax")


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding. Shapes: x [B, heads, T, d]; positions [T] -> as x.

    Source: Su et al.: RoFormer, section 3.2.2
    """
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions.float()[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Cache:
    """Keys and values of the positions so far, the last `context` of them, of one sequence batch."""

    def __init__(self, config: ModelConfig) -> None:
        self._context = config.context
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * config.num_layers
        self.position = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of new positions; returns all that are kept. Shapes: [B, heads, T, d]"""
        kept = self._layers[layer]
        if kept is not None:
            keys, values = torch.cat([kept[0], keys], 2), torch.cat([kept[1], values], 2)
        self._layers[layer] = (keys[:, :, -self._context:], values[:, :, -self._context:])
        return keys, values


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.num_heads, self.layer, self.context = config.num_heads, layer, config.context
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        batch, length, hidden = x.shape
        first = 0 if cache is None else cache.position
        positions = torch.arange(first, first + length)
        queries, keys, values = self.qkv(x).view(
            batch, length, 3, self.num_heads, hidden // self.num_heads).permute(2, 0, 3, 1, 4)
        queries, keys = rotate(queries, positions), rotate(keys, positions)
        if cache is not None:
            keys, values = cache.append(self.layer, keys, values)
        scores = queries @ keys.transpose(2, 3) / math.sqrt(keys.shape[-1])
        # A position sees itself and the `context - 1` before it.
        ages = positions[:, None] - torch.arange(first + length - keys.shape[2], first + length)
        scores = scores.masked_fill((ages < 0) | (ages >= self.context), float("-inf"))
        mixed = torch.softmax(scores, -1) @ values
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


def make_gate(config: ModelConfig) -> nn.Module:
    sizes = (config.hidden, config.num_experts, config.num_topk)
    if config.gate == "sigmoid":
        return SigmoidGate(*sizes)
    return softmax_gate(sizes, config.gate_dtype, config.balance)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, group: ferry.Group | None,
                 placement: ferry.Placement | None) -> None:
        super().__init__()
        self.stream_format = config.stream_format
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = nn.LayerNorm(config.hidden)
        seed = config.seed * 1000 + layer
        if config.num_experts == 0:
            width = (config.num_topk + config.num_shared_experts) * config.intermediate
            self.feed_forward = SharedExperts(config.hidden, width, seed=seed)
            return
        gate = make_gate(config)
        gate.reset_parameters(seed)
        self.feed_forward = MoELayer(
            config.hidden, config.intermediate, config.num_experts, config.num_topk,
            config.num_shared_experts, group=group, gate=gate, placement=placement,
            overlap=config.overlap, dtype=DTYPES[config.row_dtype], params_dtype=torch.float32,
            seed=seed, **config.exchange)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        x = rounded(x + self.attention(self.attention_norm(x), cache), self.stream_format)
        return rounded(x + self.feed_forward(self.feed_forward_norm(x)), self.stream_format)


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out.

    group      the ranks that share the experts; all of them make the same calls, also without tokens
    placement  which rank holds which expert; None = contiguous blocks
    """

    def __init__(self, config: ModelConfig, group: ferry.Group | None,
                 placement: ferry.Placement | None = None) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.hidden)
        self.blocks = nn.ModuleList(Block(config, layer, group, placement)
                                    for layer in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden)
        random = torch.Generator().manual_seed(config.seed)
        depth = (2 * config.num_layers) ** -0.5  # what is added to the residual stream starts small
        with torch.no_grad():
            self.embedding.weight.normal_(0, 0.02, generator=random)
            for block in self.blocks:
                block.attention.qkv.weight.normal_(0, config.hidden ** -0.5, generator=random)
                block.attention.out.weight.normal_(0, depth * config.hidden ** -0.5,
                                                   generator=random)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Shapes: tokens int64 [B, T] -> logits float32 [B, T, 256]"""
        x = rounded(self.embedding(tokens), self.config.stream_format)
        for block in self.blocks:
            x = block(x, cache)
        if cache is not None:
            cache.position += tokens.shape[1]
        return self.norm(x) @ self.embedding.weight.t()

    def loss(self, sequences: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte; 0 without a sequence, with gradients for every rank.

        Shapes: sequences uint8 or int64 [B, T + 1]
        """
        sequences = sequences.long()
        logits = self(sequences[:, :-1])
        if sequences.shape[0] == 0:
            return logits.sum()
        return functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())

    def moe_layers(self) -> list[MoELayer]:
        """The layers with experts, in order."""
        return [module for module in self.modules() if isinstance(module, MoELayer)]
