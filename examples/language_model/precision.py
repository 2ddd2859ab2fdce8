"""Dtypes by name, a gate below FP32, and loss scaling: to compare sound settings with wrong ones.

Ferry's gates compute in FP32 whatever the model's dtype. `RoundedSoftmaxGate` is what many models do
instead: its logits and probabilities are rounded to half precision, so that it can be seen what that
costs. A CPU has no half-precision products; values are computed in FP32 and rounded after each step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferry.torch import SoftmaxGate

_FIRST_DYNAMIC = 2.0 ** 16
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


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
