"""Rows of a language model while it trains, through every wire format: errors stay within the bounds of
docs/wire-formats.md, which are computed here in float64."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import ferry

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from language_model import corpus as corpora  # noqa: E402
from language_model.corpus import Corpus  # noqa: E402
from language_model.model import ModelConfig  # noqa: E402
from language_model.training import TrainConfig, Trainer  # noqa: E402

HIDDEN, BLOCK = 192, 128  # the last block is short
STEPS = 40
LARGEST = {"int8": 127, "fp8_e4m3fn": 448}
#: Root mean square of a row's errors over that of its values: about the median of int8.
LIMIT = 0.006


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """By kind, float32 [rows, HIDDEN]: what experts read and give, and the gradients of both."""
    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "_PACKAGES", {})
        corpora.prepare(folder)

    def train(group):
        model = ModelConfig(hidden=HIDDEN, num_layers=2, context=64, num_experts=16, num_topk=2,
                            intermediate=64)
        trainer = Trainer(group, model, TrainConfig(steps=STEPS, batch=8, warmup=5), Corpus(folder))
        losses = [trainer.step()["loss"] for _ in range(STEPS)]
        assert losses[-1] < losses[0] - 1.5  # it has learnt something
        rows = {}

        def keep(kind, tensor):
            rows.setdefault(kind, []).append(tensor.detach().reshape(-1, HIDDEN).numpy().copy())

        def keep_gradients(_, home, out):
            keep("gradients home", home[0])
            keep("gradients out", out[0])

        for layer in trainer.model.moe_layers():
            layer.register_forward_pre_hook(lambda _, given: keep("rows out", given[0]))
            layer.experts.register_forward_hook(lambda _, given, y: keep("rows home", y))
            layer.register_full_backward_hook(keep_gradients)
        trainer.step()
        return {kind: np.concatenate(parts) for kind, parts in rows.items()}

    return ferry.run(train)[0]


def crossed(rows, **options):
    """The rows as they arrive on another node, and what was counted."""
    def swap(group):
        exchange = ferry.Exchange(group, ferry.Placement.contiguous(2, 2), HIDDEN, "f32",
                                  weights="none", wire_combine="f32", wire_block_columns=BLOCK,
                                  **options)
        own = np.ascontiguousarray(rows[group.rank::2])
        plan = exchange.plan(np.full((len(own), 1), 1 - group.rank),
                             np.ones((len(own), 1), np.float32))
        return exchange.dispatch(plan, own).numpy().copy(), exchange.wire_statistics["dispatch"]

    (second, used), (first, _) = ferry.run(swap, nodes=2, ranks_per_node=1)
    arrived = np.empty_like(rows)
    arrived[0::2], arrived[1::2] = first, second
    return arrived, used


def bound(rows, wire):
    x = np.abs(rows.astype(np.float64))
    if wire in ("bf16", "f16"):
        bits, smallest = {"bf16": (8, 2.0 ** -133), "f16": (11, 2.0 ** -24)}[wire]
        return np.maximum(x * 2.0 ** -bits, smallest / 2)
    blocks = np.concatenate([np.broadcast_to(x[:, begin:begin + BLOCK].max(1, keepdims=True),
                                             x[:, begin:begin + BLOCK].shape)
                             for begin in range(0, HIDDEN, BLOCK)], axis=1)
    scale = np.maximum(blocks / LARGEST[wire], 2.0 ** -126)
    step = scale / 2 if wire == "int8" else np.maximum(x / 16, scale / 1024)
    return step * (1 + 2.0 ** -14) + x * 2.0 ** -22


def relative_errors(rows, arrived):
    sizes = (rows.astype(np.float64) ** 2).sum(1)
    errors = ((arrived.astype(np.float64) - rows) ** 2).sum(1)
    return np.sqrt(errors[sizes > 0] / sizes[sizes > 0])


@pytest.mark.skipif(shutil.which("bible") is None, reason="needs bible-kjv and bible-kjv-text")
@pytest.mark.parametrize("kind", ("rows out", "rows home", "gradients out", "gradients home"))
@pytest.mark.parametrize("wire", ("bf16", "f16", "fp8_e4m3fn", "int8"))
def test_errors_of_recorded_rows_are_bounded(recorded, kind, wire):
    rows = recorded[kind]
    assert len(rows) >= 1000
    arrived, used = crossed(rows, wire_dispatch=wire)
    assert used["rows"] == (len(rows) + 1) // 2
    share = np.abs(arrived.astype(np.float64) - rows) / bound(rows, wire)
    assert 0.9 < share.max() <= 1  # the bound is kept, and says something
    print(f"{kind}, {wire}: relative error of rows {np.median(relative_errors(rows, arrived)):.4f}")


@pytest.mark.skipif(shutil.which("bible") is None, reason="needs bible-kjv and bible-kjv-text")
@pytest.mark.parametrize("kind", ("rows out", "rows home"))
def test_no_recorded_row_is_beyond_the_limit(recorded, kind):
    rows = recorded[kind]
    arrived, used = crossed(rows, wire_dispatch="int8", max_relative_error=LIMIT)
    assert relative_errors(rows, arrived).max() <= LIMIT * (1 + 1e-6)
    without, _ = crossed(rows, wire_dispatch="int8")
    beyond = (relative_errors(rows[0::2], without[0::2]) > LIMIT).sum()
    assert 0 < beyond == used["escalated_rows"] < used["rows"]
