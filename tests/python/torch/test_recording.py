"""Recorded routing against what the routers said, and as the `ferry` command reads it."""

import json
import os
import shutil
import subprocess

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conftest import ROOT
from ferry.torch import SigmoidGate, SoftmaxGate, record_routing, topk_from_logits, write_trace


def ferry_command():
    """The built command, or a loud skip."""
    for path in (os.environ.get("FERRY_COMMAND"), ROOT / "build/release/bin/ferry",
                 shutil.which("ferry")):
        if path and os.access(path, os.X_OK):
            return str(path)
    return pytest.skip("no ferry command: build it, or name it in FERRY_COMMAND")


class Model(nn.Module):
    def __init__(self, routers):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"mlp": nn.Linear(8, 8), "gate": router})
                                     for router in routers])
        self.outputs = []

    def forward(self, x):
        for block in self.blocks:
            self.outputs.append(block["gate"](x))
            x = block["mlp"](x)
        return x


class LogitsRouter(nn.Linear):
    top_k = 2


class PairRouter(nn.Module):
    """(weights, ids), as many models' routers return."""

    num_experts = 6

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 6)

    def forward(self, x):
        weights, ids = torch.softmax(self.proj(x), -1).topk(3, -1)
        return weights, ids


class LogitsAndIdsRouter(PairRouter):
    """Logits and ids: the weights have to be made of them."""

    def forward(self, x):
        logits = self.proj(x.reshape(-1, 8))
        return logits, logits.topk(3, -1).indices


class ScoresRouter(PairRouter):
    """(logits, scores of all experts that are 0 where not chosen, ids)."""

    def forward(self, x):
        logits = self.proj(x.reshape(-1, 8))
        values, ids = logits.topk(3, -1)
        scores = torch.zeros_like(logits).scatter_(-1, ids, torch.softmax(values, -1))
        return logits, scores, ids


def load(directory):
    meta = json.loads((directory / "meta.json").read_text())
    weights = directory / "topk_weights.npy"
    return (numpy.load(directory / "topk_idx.npy"),
            numpy.load(weights) if weights.exists() else None, meta)


def test_ferrys_gates(tmp_path):
    model = Model([SoftmaxGate(8, 6, 2), SigmoidGate(8, 6, 3)])
    model(torch.randn(2, 8))  # outside: leaves no mark
    model.outputs.clear()
    with record_routing(model, output=tmp_path / "trace", model="small", phase="test") as recorder:
        model(torch.randn(3, 5, 8))
        model(torch.randn(4, 8))
    model(torch.randn(2, 8))
    idx, weights, meta = load(tmp_path / "trace")
    assert idx.shape == (19, 2, 3) and weights.dtype == numpy.float32
    for layer in range(2):
        said = [model.outputs[layer], model.outputs[2 + layer]]
        k = said[0].topk_idx.shape[1]
        assert (idx[:, layer, :k] == torch.cat([o.topk_idx for o in said]).numpy()).all()
        assert (weights[:, layer, :k] == torch.cat(
            [o.topk_weights for o in said]).detach().numpy()).all()
    assert (idx[:, 0, 2] == -1).all() and (weights[:, 0, 2] == 0).all()
    assert meta["sequence_lengths"] == [5, 5, 5, 4]
    assert (meta["num_experts"], meta["hidden"], meta["model"], meta["phase"]) == (
        6, 8, "small", "test")
    assert meta["layers"] == recorder.layer_names == ["blocks.0.gate", "blocks.1.gate"]


@pytest.mark.parametrize("router, select", [
    (LogitsRouter, LogitsRouter), (PairRouter, "gate"), (LogitsAndIdsRouter, "gate"),
    (ScoresRouter, lambda name, module: name.endswith("gate")), (ScoresRouter, ["nothing", "gate"])])
def test_any_router(tmp_path, router, select):
    torch.manual_seed(1)
    model = Model([router(8, 6) if router is LogitsRouter else router() for _ in range(3)])
    with record_routing(model, select, tmp_path):
        model(torch.randn(2, 7, 8))
    idx, weights, meta = load(tmp_path)
    assert meta["num_experts"] == 6 and meta["sequence_lengths"] == [7, 7]
    for layer, said in enumerate(model.outputs):
        if router is LogitsRouter:
            ids, values = topk_from_logits(said.view(14, 6), 2)
        elif router is PairRouter:
            values, ids = said[0].view(14, 3), said[1].view(14, 3)
        elif router is LogitsAndIdsRouter:
            ids, values = topk_from_logits(said[0], 3)
        else:
            ids = said[2]
            values = said[1].gather(1, ids)
        assert (idx[:, layer] == ids.numpy()).all()
        assert weights[:, layer] == pytest.approx(values.detach().numpy(), rel=1e-6)


def test_extract_and_no_weights(tmp_path):
    model = Model([nn.Linear(8, 6)])
    with record_routing(model, nn.Linear, tmp_path, num_experts=6,
                        extract=lambda m, i, o: (o[..., :6].argsort(-1)[..., :2], None)) as recorder:
        model(torch.randn(5, 8))
    assert recorder.layer_names == ["blocks.0.gate", "blocks.0.mlp"]
    assert load(tmp_path)[1] is None


def test_a_mask_leaves_padding_out(tmp_path):
    model = Model([SoftmaxGate(8, 6, 2)])
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0]])
    with record_routing(model, output=tmp_path) as recorder:
        recorder.next_batch(mask=mask)
        model(torch.randn(2, 4, 8))
        model(torch.randn(1, 3, 8))
    idx, _, meta = load(tmp_path)
    assert meta["sequence_lengths"] == [3, 2, 3]
    kept = model.outputs[0].topk_idx[mask.view(-1).bool()].numpy()
    assert (idx[:5, 0] == kept).all()


def test_flat_tokens_with_sequence_lengths(tmp_path):
    model = Model([SoftmaxGate(8, 6, 2)])
    with record_routing(model, output=tmp_path) as recorder:
        recorder.next_batch(sequence_lengths=[4, 6])
        model(torch.randn(10, 8))
    assert load(tmp_path)[2]["sequence_lengths"] == [4, 6]


class Chunked(nn.Module):
    """Calls its router once per micro-chunk, as a pipelined layer does."""

    def __init__(self):
        super().__init__()
        self.gate = SoftmaxGate(8, 6, 2)

    def forward(self, x):
        return torch.cat([self.gate(part).topk_weights for part in x.chunk(3)])


def test_micro_chunks_of_one_forward_are_one_sequence(tmp_path):
    x, chunked = torch.randn(10, 8), Chunked()
    with record_routing(chunked, output=tmp_path):
        chunked(x)
    idx, _, meta = load(tmp_path)
    assert meta["sequence_lengths"] == [10]
    assert (idx[:, 0] == chunked.gate(x).topk_idx.numpy()).all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_layer_counts_once(tmp_path, use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = SoftmaxGate(8, 6, 2)

        def forward(self, x):
            return checkpoint(lambda h: self.gate(h).topk_weights, x, use_reentrant=use_reentrant)
    model = Checkpointed()
    with record_routing(model, output=tmp_path):
        model(torch.randn(4, 8, requires_grad=True)).square().sum().backward()
    assert load(tmp_path)[0].shape == (4, 1, 2)
    assert model.gate.weight.grad.abs().sum() > 0


def test_nothing_is_written_when_the_body_raises(tmp_path):
    model = Model([SoftmaxGate(8, 6, 2)])
    with pytest.raises(KeyError):
        with record_routing(model, output=tmp_path / "trace"):
            model(torch.randn(2, 8))
            raise KeyError
    assert not (tmp_path / "trace").exists()
    assert not model._forward_hooks and not model.blocks[0]["gate"]._forward_hooks


def test_a_forward_that_raised_leaves_no_tokens(tmp_path):
    model = Model([SoftmaxGate(8, 6, 2), SoftmaxGate(8, 6, 2)])
    with record_routing(model, output=tmp_path):
        saved, model.blocks[1]["gate"].hidden = model.blocks[1]["gate"].hidden, 7
        with pytest.raises(ValueError):
            model(torch.randn(2, 8))
        model.blocks[1]["gate"].hidden = saved
        model(torch.randn(3, 8))
    assert load(tmp_path)[0].shape == (3, 2, 2)


def test_refusals(tmp_path):
    model = Model([nn.Linear(8, 6)])
    with pytest.raises(ValueError, match="the model has the types Linear, Model"):
        record_routing(model, "router")
    with pytest.raises(ValueError, match="num_topk="):
        with record_routing(model, "gate"):
            model(torch.randn(2, 8))
    with pytest.raises(ValueError, match="no router ran"):
        with record_routing(model, "gate", tmp_path):
            pass
    idx = numpy.zeros((4, 1, 2), dtype=numpy.int64)
    for arguments, words in [
            ((idx[0], 4), "num_topk"), ((idx.astype(float), 4), "integers"),
            ((idx + 4, 4), r"topk_idx\[0, 0, 0\] = 4 is not an expert"),
            ((idx - 2, 4), "= -2 is not"), ((idx, 0), "num_experts = 0"),
            ((idx, 4, numpy.zeros((4, 2))), r"\[4, 1, 2\], as topk_idx"),
            ((idx, 4, numpy.full((4, 1, 2), numpy.nan)), r"topk_weights\[0, 0, 0\] is not finite")]:
        with pytest.raises(ValueError, match=words):
            write_trace(tmp_path / "bad", *arguments)
    with pytest.raises(ValueError, match="add up to 5"):
        write_trace(tmp_path / "bad", idx, 4, sequence_lengths=[2, 3])
    assert not (tmp_path / "bad").exists()


def test_an_older_weights_file_goes(tmp_path):
    idx = numpy.zeros((4, 1, 2), dtype=numpy.int64)
    write_trace(tmp_path, idx, 4, numpy.ones((4, 1, 2)))
    write_trace(tmp_path, idx, 4)
    assert not (tmp_path / "topk_weights.npy").exists()


def rows_between_nodes(trace, layer, nodes, ranks_per_node):
    """Rows that node_dedup sends, from the arrays: as many consecutive experts on each rank, whole
    sequences to the rank whose even share holds their middle."""
    idx, _, meta = load(trace)
    ranks, total, first, rows = nodes * ranks_per_node, len(idx), 0, 0
    for length in meta["sequence_lengths"]:
        home = (2 * first + length) * ranks // (2 * total) // ranks_per_node
        for token in idx[first:first + length, layer]:
            there = {int(e) * ranks // meta["num_experts"] // ranks_per_node for e in token if e >= 0}
            rows += len(there - {home})
        first += length
    return rows


def run_json(*command):
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr + result.stdout
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("layer", [0, 1])
def test_the_command_reads_it(tmp_path, layer):
    command = ferry_command()
    model = Model([SoftmaxGate(8, 8, 3, capacity=2), SoftmaxGate(8, 8, 3)])
    with record_routing(model, output=tmp_path, model="recorded"):
        for length in (7, 12, 9, 12):
            model(torch.randn(1, length, 8))
    assert (load(tmp_path)[0] == -1).any()
    where = ("--trace", str(tmp_path), "--layer", str(layer), "--nodes", "2", "--ranks-per-node", "2",
             "--json")
    plan = run_json(command, "plan", "--cluster", "h100", *where)
    bench = run_json(command, "bench", "--strategy", "node_dedup", "--hidden", "64", "--repeat", "1",
                     *where)
    rows = rows_between_nodes(tmp_path, layer, 2, 2)
    dedup = next(line for line in plan if line["strategy"] == "node_dedup")
    assert (dedup["num_tokens"], dedup["layer"]) == (40, layer)
    assert dedup["dispatch"]["inter_node"]["rows"] == rows > 0
    assert bench[0]["strategy"] == "node_dedup"
