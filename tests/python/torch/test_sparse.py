"""sparse_all_to_all: what comes is what an oracle in NumPy says, on one node and across nodes."""

import math

import numpy as np
import pytest
import torch

import ferry
from ferry.torch import sparse_all_to_all

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def tensor_of(source, target, dtype):
    """Every pair has a shape of its own, some without elements, one longer than a row."""
    shape = [(3, 50), (7,), (0, 4), (2, 1100), ()][(source + 2 * target) % 5]
    generator = torch.Generator().manual_seed(10 * source + target)
    made = torch.randn(shape, generator=generator) * 1e4
    if made.numel() > 40:
        made.view(-1)[::3] = 0
        made.view(-1)[5:9] = 123.0  # equal values: the first are kept
    return made.to(dtype)


def expected(tensor, compress_type, ratio):
    """One value at a time."""
    flat = tensor.float().clamp(-65504, 65504) if compress_type == "fp16" else tensor.float()
    values = flat.to(DTYPES[compress_type]).to(tensor.dtype).reshape(-1)
    sizes = values.float().abs().numpy()
    kept = torch.zeros_like(values)
    for begin in range(0, len(values), 128):
        places = range(begin, min(begin + 128, len(values)))
        largest = sorted(places, key=lambda place: (-sizes[place], place))
        for place in largest[:math.ceil(np.float32(ratio) * np.float32(128))]:
            kept[place] = values[place]
    return kept.view(tensor.shape)


def check(group, dtype, compress_type, ratio):
    for _ in range(2):  # the second call finds the exchange of the first
        sent = [tensor_of(group.rank, target, dtype) for target in range(group.size)]
        before = [tensor.clone() for tensor in sent]
        received = sparse_all_to_all(sent, group, compress_type, ratio)
        assert all(torch.equal(a, b) for a, b in zip(sent, before))
        for source, tensor in enumerate(received):
            want = expected(tensor_of(source, group.rank, dtype), compress_type, ratio)
            assert tensor.dtype == dtype and tensor.shape == want.shape
            assert torch.equal(tensor, want), (source, group.rank)


@pytest.mark.parametrize("nodes, ranks", ((1, 1), (1, 3), (2, 2), (3, 1)))
def test_every_topology_gives_the_same(nodes, ranks):
    ferry.run(check, nodes, ranks, args=(torch.float32, "fp16", 0.3))


@pytest.mark.parametrize("compress_type", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("ratio", (1, 0.01))
def test_dtypes(dtype, compress_type, ratio):
    ferry.run(check, 2, 1, args=(dtype, compress_type, ratio))


def test_few_bytes_cross():
    def body(group):
        sent = [torch.randn(256, 2048) for _ in range(group.size)]
        before = group.counters()["payload_bytes"]
        sparse_all_to_all(sent, group, "fp16", 0.05)
        assert group.counters()["payload_bytes"] - before < 256 * 2048 * 4 * 0.065

    ferry.run(body, 2, 1)


def test_refusals_reach_every_rank():
    def refused(group, words, sent=None, error=ferry.InvalidArgumentError, **options):
        with pytest.raises(error, match=words):
            sparse_all_to_all([torch.ones(3)] * group.size if sent is None else sent, group,
                              **options)

    def body(group):
        first = group.rank == 0
        refused(group, "1 tensors on rank 0; allowed: 2", [torch.ones(3)] if first else None)
        refused(group, "compress_type = 'int4'", compress_type="int4" if first else "fp16")
        refused(group, "sparse_ratio = 0", sparse_ratio=0 if first else 0.3)
        refused(group, r"tensor_list\[1\] is torch.int64",
                [torch.ones(3), torch.ones(3, dtype=torch.int64)] if first else None)
        refused(group, r"tensor_list\[1\] is torch.float16 on cpu",
                [torch.ones(3), torch.ones(3).half()] if first else None)
        refused(group, "sparse_ratio is 0.3 on rank 0 and 0.5 on rank 1",
                error=ferry.MismatchError, sparse_ratio=0.3 if first else 0.5)
        check(group, torch.float32, "bf16", 0.5)  # and the group goes on

    ferry.run(body, 2, 1)


def test_without_a_group():
    with pytest.raises(ferry.InvalidArgumentError, match="0 open groups of ferry.init"):
        sparse_all_to_all([torch.ones(3)])
    with ferry.init(mpi="off"):
        assert torch.equal(sparse_all_to_all([torch.arange(3.0)], sparse_ratio=1)[0],
                           torch.arange(3.0))
