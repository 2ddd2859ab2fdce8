"""The recipes of docs/trace-format.md, run as they stand there on stand-ins of what the systems return,
and the form that the page describes, against the bytes that are written."""

import ast
import base64
import json
import re
import struct
from types import SimpleNamespace

import numpy
import pytest
import torch

from conftest import ROOT
from ferry.torch import topk_from_logits, write_trace

PAGE = (ROOT / "docs/trace-format.md").read_text()


def run_recipe(name, tmp_path, monkeypatch, **names):
    code = re.search(rf"<!-- recipe: {name} -->\n```python\n(.*?)```", PAGE, re.S).group(1)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"docs/trace-format.md: {name}", "exec"), dict(names))
    trace = tmp_path / "trace"
    weights = trace / "topk_weights.npy"
    return (numpy.load(trace / "topk_idx.npy"), numpy.load(weights) if weights.exists() else None,
            json.loads((trace / "meta.json").read_text()))


@pytest.mark.parametrize("probabilities", [True, False])
@pytest.mark.parametrize("renormalise", [True, False])
def test_hugging_face(tmp_path, monkeypatch, renormalise, probabilities):
    logits = tuple(torch.randn(2 * 5, 8).bfloat16().requires_grad_() for _ in range(3))
    returned = tuple(values.float().softmax(1) for values in logits) if probabilities else logits
    attention_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])

    class Mixtral:
        config = SimpleNamespace(num_local_experts=8, num_experts_per_tok=2, hidden_size=16,
                                 model_type="mixtral")

        def __call__(self, input_ids, attention_mask, output_router_logits):
            assert output_router_logits
            return SimpleNamespace(router_logits=returned)
    if not renormalise:
        Mixtral.config = SimpleNamespace(num_experts=8, num_experts_per_tok=2, hidden_size=16,
                                         model_type="qwen2_moe", norm_topk_prob=False)
    idx, weights, meta = run_recipe("hugging_face", tmp_path, monkeypatch, model=Mixtral(),
                                    input_ids=torch.zeros(2, 5), attention_mask=attention_mask)
    assert idx.shape == (7, 3, 2) and meta["sequence_lengths"] == [5, 2]
    assert (meta["num_experts"], meta["hidden"]) == (8, 16)
    for layer in range(3):
        ids, values = topk_from_logits(logits[layer][:7], 2, renormalise=renormalise)
        assert (idx[:, layer] == ids.numpy()).all()
        assert (weights[:, layer] == values.detach().numpy()).all()


@pytest.mark.parametrize("prompt_apart", [True, False])
def test_vllm(tmp_path, monkeypatch, prompt_apart):
    random = numpy.random.default_rng(3)
    routed = [random.integers(0, 16, (tokens, 4, 3)).astype(numpy.int16) for tokens in (9, 5)]

    class Engine:
        def generate(self, prompts, sampling_params):
            requests = []
            for array in routed:
                cut = 4 if prompt_apart else 0
                request = SimpleNamespace(outputs=[SimpleNamespace(routed_experts=array[cut:])])
                if prompt_apart:
                    request.prompt_routed_experts = array[:cut]
                requests.append(request)
            return requests
    idx, weights, meta = run_recipe("vllm", tmp_path, monkeypatch, llm=Engine(), prompts=["a", "b"],
                                    sampling_params=None, num_experts=16)
    assert (idx == numpy.concatenate(routed)).all() and weights is None
    assert meta["sequence_lengths"] == [9, 5] and meta["phase"] == "serving"


@pytest.mark.parametrize("dense", [[-1, -1, -1], [0, 0, 0], [7, 7, 2]])
def test_sglang(tmp_path, monkeypatch, dense):
    random = numpy.random.default_rng(4)
    routed = [random.random((tokens, 5, 16)).argsort(2)[..., :3].astype("<i4") for tokens in (6, 11)]
    for array in routed:
        array[:, 0] = dense  # the first layer has no experts
    routed[0][1, 2] = -1  # a token without experts
    answers = [{"text": "", "meta_info": {
        "routed_experts": base64.b64encode(array.tobytes()).decode()}} for array in routed]
    idx, weights, meta = run_recipe("sglang", tmp_path, monkeypatch, answers=answers, num_layers=5,
                                    num_topk=3, num_experts=16)
    assert (idx == numpy.concatenate(routed)[:, 1:]).all() and weights is None
    assert meta["sequence_lengths"] == [6, 11]


def read_npy_by_the_page(path):
    data = path.read_bytes()
    assert data[:6] == bytes.fromhex("93 4E 55 4D 50 59".replace(" ", "")) and data[6:8] == b"\x01\0"
    length = struct.unpack("<H", data[8:10])[0]
    header = data[10:10 + length].decode("ascii")
    fields = ast.literal_eval(header)
    assert set(fields) == {"descr", "fortran_order", "shape"} and header.endswith("\n")
    assert fields["fortran_order"] is False
    return fields["descr"], fields["shape"], data[10 + length:]


def test_the_bytes_are_those_of_the_page(tmp_path):
    random = numpy.random.default_rng(5)
    idx = random.integers(-1, 300, (4, 3, 2))
    weights = random.random((4, 3, 2))
    write_trace(tmp_path, numpy.asfortranarray(idx), 300, weights)
    descr, shape, values = read_npy_by_the_page(tmp_path / "topk_idx.npy")
    assert descr == "<i2" and shape == (4, 3, 2) and len(values) == 4 * 3 * 2 * 2
    t, layer, j = 2, 1, 1
    at = (t * 3 + layer) * 2 + j
    assert struct.unpack_from("<h", values, 2 * at)[0] == idx[t, layer, j]
    descr, shape, values = read_npy_by_the_page(tmp_path / "topk_weights.npy")
    assert descr == "<f4" and struct.unpack_from("<f", values, 4 * at)[0] == numpy.float32(
        weights[t, layer, j])
    write_trace(tmp_path / "many", idx, 40000)
    assert read_npy_by_the_page(tmp_path / "many/topk_idx.npy")[0] == "<i4"
    few = numpy.array([[[127, -1]]])
    write_trace(tmp_path / "few", few, 128)
    assert read_npy_by_the_page(tmp_path / "few/topk_idx.npy") == ("|i1", (1, 1, 2), b"\x7f\xff")
