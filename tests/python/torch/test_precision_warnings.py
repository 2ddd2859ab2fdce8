"""What the layer warns of, once, and of nothing else."""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ferry
from ferry.torch import GateOutput, MoELayer, SigmoidGate, SoftmaxGate, topk_from_logits

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from precision import RoundedSoftmaxGate  # noqa: E402

SIZES = (16, 12, 8, 2)


class OwnGate(nn.Module):
    """A router computed in a dtype, with weights in float32 as the layer wants them."""

    def __init__(self, dtype, scores_dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)))
        self.dtype, self.scores_dtype = dtype, scores_dtype

    def forward(self, x):
        scores = torch.softmax(x.float() @ self.weight.t(), -1).to(self.dtype)
        idx, weights = topk_from_logits(scores.float(), 2)
        weights = scores.gather(-1, idx).float()
        return GateOutput(idx, weights, None if self.scores_dtype is None
                          else scores.to(self.scores_dtype))


class EqualGate(OwnGate):
    """Weights of 1/k, which are numbers of every format."""

    def forward(self, x):
        idx, _ = topk_from_logits(x.float() @ self.weight.t(), 2)
        return GateOutput(idx, torch.full(idx.shape, 0.5))


def told(num_tokens=64, calls=1, grad_scale=1.0, dtype=torch.float32, x_dtype=None, **options):
    """Texts of the warnings of a layer that is made and trained."""
    def run(group):
        layer = MoELayer(*SIZES, group=group, dtype=dtype, seed=1, **options)
        for call in range(calls):
            x = torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(call))
            out = layer(x.to(x_dtype or dtype).requires_grad_())
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(call))
                         .to(out.dtype) * grad_scale)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ferry.run(run)
    return [str(one.message) for one in caught if one.category is ferry.PrecisionWarning]


@pytest.mark.parametrize("options", [
    {}, {"gate": "sigmoid"}, {"dtype": torch.bfloat16}, {"wire_dispatch": "int8"},
    {"dtype": torch.bfloat16, "params_dtype": torch.float32},
    {"wire_dispatch": "fp8_e4m3fn", "wire_combine": "bf16"},
    {"dtype": torch.float16}, {"wire_combine": "f16", "wire_dispatch": "f16"},
    {"wire_combine": "sparse_bf16"}, {"wire_dispatch": "sparse_bf16", "wire_sparse_ratio": 0.3},
    {"wire": "auto", "max_relative_error": 0.01}])
def test_sound_settings_are_not_warned_of(options):
    assert told(calls=3, **options) == []


def test_gates_of_one_s_own():
    (text,) = told(gate=OwnGate(torch.bfloat16), calls=3)
    assert "OwnGate" in text and "bfloat16" in text and "docs/precision.md" in text
    assert "float16" in told(gate=OwnGate(torch.float16))[0]
    assert told(gate=OwnGate(torch.float32)) == [] and told(gate=EqualGate(torch.float32)) == []
    assert len(told(gate=OwnGate(torch.float32, torch.float16))) == 1  # the scores tell


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_softmax(dtype):
    (text,) = told(gate=RoundedSoftmaxGate(16, 8, 2, rounded_to=dtype), calls=3)
    assert "RoundedSoftmaxGate" in text


def test_few_tokens_are_no_evidence_until_they_are_many():
    gate = OwnGate(torch.bfloat16)
    assert told(num_tokens=2, gate=gate) == []
    assert told(num_tokens=0, gate=gate) == []


@pytest.mark.parametrize("wire", ["int8", "fp8_e4m3fn"])
def test_a_quantised_combine(wire):
    (text,) = told(wire_combine=wire, calls=2)
    assert f"wire_combine = {wire!r}" in text


def test_a_combine_that_is_thinned():
    (text,) = told(wire_combine="sparse_bf16", wire_sparse_ratio=0.3)
    assert "wire_combine = 'sparse_bf16' with wire_sparse_ratio = 0.3" in text


F16_GRADIENTS = [dict(dtype=torch.float16), dict(dtype=torch.float16, x_dtype=torch.float32),
                 dict(wire_combine_backward="f16"), dict(wire_dispatch_backward="f16"),
                 dict(wire_dispatch_backward="sparse_f16")]


@pytest.mark.parametrize("options", F16_GRADIENTS)
def test_gradients_that_f16_does_not_hold(options):
    (text,) = told(grad_scale=2.0 ** -20, calls=3, **options)
    assert "f16" in text and "set_aux_loss_scale" in text
    assert told(grad_scale=2.0 ** -12, **options) == []
    assert told(grad_scale=0.0, **options) == []


def test_small_gradients_that_other_formats_hold():
    assert told(grad_scale=2.0 ** -20) == told(grad_scale=2.0 ** -20, dtype=torch.bfloat16) == []


def test_every_layer_says_it_once_and_its_copies_do_not():
    def run(group):
        layers = [MoELayer(*SIZES, group=group, wire_combine="int8") for _ in range(2)]
        copy.deepcopy(layers[0])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ferry.run(run)
    assert len(caught) == 2 and {Path(one.filename).name for one in caught} == {Path(__file__).name}


def test_it_can_be_made_an_error():
    def run(group):
        MoELayer(*SIZES, group=group, wire_combine="int8")

    with warnings.catch_warnings():
        warnings.simplefilter("error", ferry.PrecisionWarning)
        with pytest.raises(ferry.PrecisionWarning, match="wire_combine"):
            ferry.run(run)


def test_library_s_gates_keep_fp32_in_a_half_precision_model():
    for gate in (SoftmaxGate(16, 8, 2), SigmoidGate(16, 8, 2)):
        assert told(gate=gate, dtype=torch.bfloat16) == []
