"""The classifier of examples/, small: sound precisions end where FP32 does, a wrong one does not; its
formats round as they should."""

import sys
import warnings
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

import ferry

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from digits_model import Config  # noqa: E402
from precision import STREAM_FORMATS, rounded  # noqa: E402
from train_digits import train  # noqa: E402

SEEDS = (1, 2)
SMALL = 2.0 ** -16  # of the loss: gradients of a step with so many times as many tokens
F16 = dict(stream_format="f16", row_dtype="f16")


@lru_cache(maxsize=None)
def outcome(seed=1, options=(), exchange=(), steps=60, nodes=2):
    """Loss on the images of training, and texts of the warnings."""
    config = Config(steps=steps, batch=32, learning_rate=6e-3, seed=seed,
                    exchange=dict(exchange), **dict(options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = ferry.run(train, nodes, 1, args=(config,))
    assert all(result == results[0] for result in results)
    return results[0]["train"]["loss"], [str(one.message) for one in caught
                                         if one.category is ferry.PrecisionWarning]


def losses(exchange=(), **options):
    return np.array([outcome(seed, tuple(options.items()), tuple(dict(exchange).items()))[0]
                     for seed in SEEDS])


def test_sound_precisions_end_where_fp32_does_and_a_wrong_one_does_not():
    exact = losses()
    assert exact.max() < 0.7  # of ln 10 = 2.3
    spread = exact.std(ddof=1)
    sound = losses({"wire_dispatch": "int8", "wire_combine": "bf16"}, **F16,
                   loss_scale=SMALL * 2 ** 17, dynamic_loss_scale=True)
    assert np.abs(sound - exact).max() <= 0.05, (sound, exact)
    wrong = losses(**F16, loss_scale=SMALL)
    assert (wrong - exact).min() >= 5 * spread, (wrong, exact)
    for seed in SEEDS:
        texts = outcome(seed, tuple({**F16, "loss_scale": SMALL}.items()))[1]
        assert len(texts) == 2 * 2 and all("f16" in text for text in texts)  # ranks x layers
        assert outcome(seed)[1] == []


def test_small_gradients_change_no_bit_of_fp32():
    plain, small = (outcome(options=tuple(options.items()), steps=8)[0]
                    for options in ({}, {"loss_scale": SMALL}))
    assert plain == small
    assert outcome(steps=8, options=(("row_dtype", "f16"),))[0] != plain


def test_splits_train_alike():
    assert outcome(steps=8, nodes=1)[0] == pytest.approx(outcome(steps=8)[0], rel=1e-4)


@pytest.mark.parametrize("format, step", [("bf16", 2 ** -8), ("f16", 2 ** -11), ("fp8_e4m3fn", 2 ** -4)])
def test_a_float_stream_is_off_by_half_a_step(format, step):
    x = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    x = torch.where(x.abs() < 0.05, torch.full_like(x, 0.05), x)  # no denormals of the block
    off = (rounded(x, format) - x).abs() / x.abs()
    assert step / 2 < float(off.max()) <= step * (1 + 2 ** -14)
    assert torch.equal(rounded(rounded(x, format), format), rounded(x, format)) or format[:3] == "fp8"


def test_an_int8_stream_is_off_by_half_a_step_of_each_block():
    x = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    x[0, :128] = 0
    off = (rounded(x, "int8") - x).abs()
    for begin, end in ((0, 128), (128, 256), (256, 300)):
        largest = x[:, begin:end].abs().amax(1, keepdim=True)
        assert bool((off[:, begin:end] <= largest / 254 * (1 + 2 ** -12)).all())
        assert float((off[:, begin:end] / largest.clamp(min=1)).max()) > 1 / 400


@pytest.mark.parametrize("format", STREAM_FORMATS)
def test_gradients_of_a_stream(format):
    x = torch.full((2, 8), 0.75, requires_grad=True)
    rounded(x, format).backward(torch.full((2, 8), 2.0 ** -30))
    assert float(x.grad[0, 0]) == (0.0 if format == "f16" else 2.0 ** -30)
