"""Formats by name, a gate and a residual stream below FP32, and loss scaling: to compare sound settings
with wrong ones (docs/precision.md).

Ferry's gates compute in FP32 whatever the model's dtype. `RoundedSoftmaxGate` is what many models do
instead: its logits and probabilities are rounded to half precision, so that it can be seen what that
costs. `rounded` does the same to what is between layers. A CPU has no half-precision products; values
are computed in FP32 and rounded after each step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ferry.torch import SoftmaxGate

_FIRST_DYNAMIC = 2.0 ** 16
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
#: A scale per token and so many values: as Ferry's rows between nodes (docs/wire-formats.md).
_BLOCK = 128
STREAM_FORMATS = [*DTYPES, "fp8_e4m3fn", "int8"]


def _nearest_code(x: Tensor, format: str) -> Tensor:
    """The nearest number of a quantised format that has the scale 1; |x| up to 127 or 448."""
    if format == "int8":
        return x.round()
    step = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2.0 ** -6))) - 3)
    return (x / step).round() * step


class _Quantise(torch.autograd.Function):
    """To a quantised format and back; gradients pass as they are."""

    @staticmethod
    def forward(ctx, x, format):
        blocks = functional.pad(x, (0, -x.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
        largest = {"int8": 127.0, "fp8_e4m3fn": 448.0}[format]
        scale = (blocks.abs().amax(-1, keepdim=True) / largest).clamp(min=2.0 ** -126)
        return (_nearest_code(blocks / scale, format) * scale).flatten(-2)[..., :x.shape[-1]]

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def rounded(x: Tensor, format: str) -> Tensor:
    """x as it is after it was kept in a format; in "bf16" and "f16" its gradient is kept so as well."""
    if format == "f32":
        return x
    return _Round.apply(x, DTYPES[format]) if format in DTYPES else _Quantise.apply(x, format)


@torch.no_grad()
def add_outlier(model: nn.Module, first_channel: Tensor, value: float) -> None:
    """Gives a model what large ones grow while they learn: a channel of the residual stream that is large
    for every token, and layer norms that make up for it.

    first_channel   of what starts the stream, such as the first of its biases
    Source: Sun et al.: Massive Activations in Large Language Models
    """
    first_channel.fill_(value)
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        hidden = norm.weight.numel()
        norm.weight.fill_(value * hidden ** -0.5)  # about the deviation over the channels
        norm.bias.fill_(value / hidden)            # and their mean
        norm.weight[0] = norm.bias[0] = 0.0


class _Round(torch.autograd.Function):
    """To a half-precision dtype and back; the gradient is rounded as well."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.to(dtype).float()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).float(), None


class RoundedSoftmaxGate(SoftmaxGate):
    """A softmax gate whose logits, probabilities and weights pass through `rounded_to`."""

    def __init__(self, *sizes: int, rounded_to: torch.dtype, **options) -> None:
        super().__init__(*sizes, **options)
        self.rounded_to = rounded_to

    def _scores(self, logits: Tensor) -> Tensor:
        return _Round.apply(torch.softmax(_Round.apply(logits, self.rounded_to), -1),
                            self.rounded_to)

    def _weights(self, scores: Tensor, topk_idx: Tensor) -> Tensor:
        return _Round.apply(super()._weights(scores, topk_idx), self.rounded_to)


def softmax_gate(sizes: tuple[int, int, int], dtype: str, balance: float) -> SoftmaxGate:
    """A gate for (hidden, num_experts, num_topk) in "f32", as it should be, or in "bf16" or "f16"."""
    options = {"balance_loss": "switch" if balance else None, "balance_coef": balance}
    if dtype == "f32":
        return SoftmaxGate(*sizes, **options)
    return RoundedSoftmaxGate(*sizes, rounded_to=DTYPES[dtype], **options)


class LossScale:
    """What the loss is multiplied with before backward, so that small gradients survive f16.

    initial   the first scale; 1 = none, or 2^16 where it is dynamic
    dynamic   halved when a step's gradient is not finite, doubled after `patience` good steps
    """

    def __init__(self, initial: float = 1.0, dynamic: bool = False, patience: int = 100) -> None:
        self.value = _FIRST_DYNAMIC if dynamic and initial == 1.0 else initial
        self._dynamic, self._patience, self._good = dynamic, patience, 0

    def update(self, finite: bool) -> None:
        """After a step that was taken (finite) or left out."""
        if not self._dynamic:
            return
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self._good == self._patience:
            self.value, self._good = self.value * 2, 0

    def state(self) -> dict:
        return {"value": self.value, "good": self._good}

    def restore(self, state: dict) -> None:
        self.value, self._good = state["value"], state["good"]
