"""Says once per layer when numbers are kept in a format that is known to harm training.

What a layer can know of that, and no more: its own options; the values that its gate returns; the gradient
that comes to its output. It cannot know what its output is added to, nor whether there is a loss scaler: it
looks at what the gradients are. docs/precision.md shows what each of them does to a model.
"""

import warnings
from typing import Any, Optional

import torch
from torch import Tensor

from ferry._errors import PrecisionWarning
from ferry.torch.gates import GateOutput

_QUANTISED = ("fp8_e4m3fn", "int8")
_F16 = {"f16", "sparse_f16"}
_HALVES = (torch.bfloat16, torch.float16)
#: Values of a gate that are looked at, and how many of them must differ for a verdict: 16 FP32 numbers
#: are all numbers of f16 by chance once in 2^208 times.
_LOOKED_AT, _DIFFERENT = 4096, 16
#: A number of f16 below this has fewer bits than one of bf16: 2^-24 apart, so 7 of them.
_SMALL_GRADIENT = 2.0 ** -17


def _half_of(values: Tensor) -> Optional[torch.dtype]:
    """The half-precision dtype that values were rounded to, if they are many enough to tell."""
    if values.dtype in _HALVES:
        return values.dtype
    some = torch.unique(values.detach().reshape(-1)[:_LOOKED_AT].float())
    if len(some) < _DIFFERENT:
        return None
    return next((half for half in _HALVES if torch.equal(some.to(half).float(), some)), None)


class PrecisionWarnings:
    """Those of one layer. Looks at the 1st, 2nd, 4th, 8th, ... call, so that looking costs nothing.

    options   of its exchange, with defaults filled in
    """

    def __init__(self, options: Any, dtype: torch.dtype) -> None:
        gradients = (options["wire_combine_backward"], options["wire_dispatch_backward"])
        self._f16_gradients = dtype == torch.float16 or bool(_F16 & set(gradients))
        self._told, self._num_calls = set(), 0
        combine = options["wire_combine"]
        if combine in _QUANTISED:
            self._tell("combine", f"MoELayer: wire_combine = {combine!r}: the sums that come home from "
                       "other nodes are rounded to 8 bits; where they feed a layer norm or the residual "
                       "stream, one channel with large values takes them from the others; fix: "
                       "wire_combine='bf16'; wire_dispatch may stay as it is")
        elif combine.startswith("sparse") and options["wire_sparse_ratio"] < 1:
            self._tell("combine", f"MoELayer: wire_combine = {combine!r} with wire_sparse_ratio = "
                       f"{options['wire_sparse_ratio']:g}: the sums that come home from other nodes lose "
                       "their smaller values, which a layer norm or the residual stream needs; fix: "
                       "wire_combine='bf16'; wire_dispatch may stay as it is")

    def __deepcopy__(self, memo: dict) -> "PrecisionWarnings":
        """A copy of the layer has been told of, too."""
        return self

    def begin_call(self) -> bool:
        """Counts a call of the layer; whether it is one to look at."""
        self._num_calls += 1
        return self._num_calls & (self._num_calls - 1) == 0

    @torch.no_grad()  # a checkpoint counts what is saved for backward
    def look_at_gate(self, gate: str, output: GateOutput) -> None:
        weights = output.topk_weights[output.topk_idx >= 0]
        half = _half_of(weights) or (None if output.scores is None else _half_of(output.scores))
        if half is not None:
            self._tell("gate", f"MoELayer: {gate} returns numbers of {half}: routing that is computed "
                       "in half precision; fix: logits, softmax and weights in float32, without "
                       "autocast, as ferry.torch.SoftmaxGate does it")

    def look_at_gradient_of(self, out: Tensor) -> None:
        """At the gradient of the layer's output, when it comes."""
        if self._f16_gradients and out.requires_grad and "gradient" not in self._told:
            out.register_hook(self._look_at_gradient)

    @torch.no_grad()
    def _look_at_gradient(self, grad: Tensor) -> None:
        values = grad[grad != 0].float()
        typical = float(values.square().mean().sqrt()) if values.numel() else _SMALL_GRADIENT
        if typical < _SMALL_GRADIENT:
            self._tell("gradient", "MoELayer: gradients are sent or kept in f16, and that of the "
                       f"layer's output is {typical:.1e} (root mean square): f16 keeps fewer bits of it "
                       "than bf16, and none below 6e-8; fix: scale the loss (with "
                       "ferry.torch.set_aux_loss_scale), or use bf16")

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(text + " (docs/precision.md)", PrecisionWarning, stacklevel=4)
