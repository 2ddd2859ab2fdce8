"""The model of train_digits.py: a residual convolutional network with a Mixture of Experts in each block.

A token of ferry.torch.MoELayer is a place of the image. First weights are a function of the seed, so
every rank and every split of the ranks starts alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

import ferry
from ferry.torch import MoELayer

from precision import DTYPES, add_outlier, rounded, softmax_gate


@dataclass(frozen=True)
class Config:
    """Sizes, training and precision; `exchange` are options of ferry.Exchange.

    row_dtype, gate_dtype   as in train_lm.py
    stream_format   of the residual stream between layers, which layer norms read: a dtype, or
                    "fp8_e4m3fn" or "int8" with a scale per place
    outlier         see precision.add_outlier
    """

    hidden: int = 32
    num_blocks: int = 2
    num_experts: int = 8
    num_topk: int = 2
    intermediate: int = 32
    balance: float = 0.01
    steps: int = 150
    batch: int = 64
    learning_rate: float = 3e-3
    seed: int = 1
    gate_dtype: str = "f32"
    row_dtype: str = "f32"
    stream_format: str = "f32"
    outlier: float = 0.0
    loss_scale: float = 1.0
    dynamic_loss_scale: bool = False
    batch_order: int | None = None
    exchange: dict = field(default_factory=dict)


class Block(nn.Module):
    """x + convolution(norm(x)), then + experts(norm(x)). Shapes: x [B, 4, 4, hidden] -> the same"""

    def __init__(self, config: Config, group: ferry.Group, seed: int) -> None:
        super().__init__()
        self.format = config.stream_format
        self.norms = nn.ModuleList(nn.LayerNorm(config.hidden) for _ in range(2))
        self.convolution = nn.Conv2d(config.hidden, config.hidden, 3, padding=1)
        gate = softmax_gate((config.hidden, config.num_experts, config.num_topk), config.gate_dtype,
                            config.balance)
        gate.reset_parameters(seed)
        self.experts = MoELayer(
            config.hidden, config.intermediate, config.num_experts, config.num_topk, group=group,
            gate=gate, dtype=DTYPES[config.row_dtype], params_dtype=torch.float32, seed=seed,
            **config.exchange)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.convolution(self.norms[0](x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = rounded(x + functional.silu(mixed), self.format)
        return rounded(x + self.experts(self.norms[1](x)), self.format)


class Classifier(nn.Module):
    """Images in, logits of ten digits out. Shapes: float32 [B, 8, 8] -> [B, 10]"""

    def __init__(self, config: Config, group: ferry.Group) -> None:
        super().__init__()
        self.format = config.stream_format
        self.stem = nn.Conv2d(1, config.hidden, 3, stride=2, padding=1)  # 4 x 4 places
        self.blocks = nn.ModuleList(Block(config, group, config.seed * 1000 + block)
                                    for block in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, 10)
        random = torch.Generator().manual_seed(config.seed)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, (nn.Conv2d, nn.Linear)):
                    bound = (module.weight[0].numel()) ** -0.5
                    module.weight.uniform_(-bound, bound, generator=random)
                    module.bias.zero_()
        if config.outlier:
            add_outlier(self, self.stem.bias[:1], config.outlier)

    def forward(self, images: Tensor) -> Tensor:
        x = rounded(self.stem(images.unsqueeze(1)).permute(0, 2, 3, 1), self.format)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean((1, 2)))
