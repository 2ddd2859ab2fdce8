"""sparse_all_to_all: what comes is what an oracle in NumPy says, on one node and across nodes."""

import math

import numpy as np
import pytest
import torch

import ferry
from ferry.torch import sparse_all_to_all

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def shape_of(source, target):
    """Every pair has a shape of its own, some without elements, one longer than a row."""
    return [(3, 50), (7,), (0, 4), (2, 1100), ()][(source + 2 * target) % 5]


def tensor_of(source, target, dtype):
    generator = torch.Generator().manual_seed(10 * source + target)
    made = torch.randn(shape_of(source, target), generator=generator) * 1e4
    if made.numel() > 40:
        flat = made.view(-1)
        flat[::3] = 0
        flat[6::9] = -0.0
        flat[5:9] = 123.0  # equal values: the first are kept
        flat[20] = -1e-30
        flat[30:34] = torch.tensor([3e38, -math.inf, 65504, 65519])
    if made.numel() > 1000:
        made.view(-1)[1000:1004] = torch.tensor([math.nan, math.inf, -math.nan, -3.4e38])
    return made.to(dtype)


def most_of(dtype, compress_type):
    if dtype == torch.float16 and compress_type == "bf16":
        return 65280.0
    return torch.finfo(DTYPES[compress_type]).max


def came_from(tensor, compress_type, ratio):
    """One value at a time: what comes, and where the gradient passes."""
    most = most_of(tensor.dtype, compress_type)
    exact = tensor.float().reshape(-1)
    saturated = exact.isfinite() & (exact.abs() > most)
    flat = torch.where(saturated, exact.clamp(-most, most), exact)
    values = flat.to(DTYPES[compress_type]).to(tensor.dtype)
    values[values == 0] = 0.0
    values[values.isnan()] = math.nan
    sizes = [(1, 0) if size != size else (0, size) for size in values.float().abs().tolist()]
    kept = torch.zeros_like(values)
    passes = torch.zeros(len(values), dtype=torch.bool)
    for begin in range(0, len(values), 128):
        places = range(begin, min(begin + 128, len(values)))
        keep = max(1, math.ceil(np.float32(ratio) * np.float32(len(places))))
        largest = sorted(places, key=lambda place: (-sizes[place][0], -sizes[place][1], place))
        for rank, place in enumerate(largest):
            if rank < keep or values[largest[keep - 1]] == 0:  # zeros are all alike
                kept[place] = values[place]
                passes[place] = not saturated[place]
    return kept.view(tensor.shape), passes.view(tensor.shape)


def expected(tensor, compress_type, ratio):
    return came_from(tensor, compress_type, ratio)[0]


def same_bits(a, b):
    as_integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(as_integers), b.view(as_integers))


def check(group, dtype, compress_type, ratio):
    for _ in range(2):  # the second call finds the exchange of the first
        sent = [tensor_of(group.rank, target, dtype) for target in range(group.size)]
        before = [tensor.clone() for tensor in sent]
        received = sparse_all_to_all(sent, group, compress_type, ratio)
        assert all(same_bits(a, b) for a, b in zip(sent, before))
        for source, tensor in enumerate(received):
            want = expected(tensor_of(source, group.rank, dtype), compress_type, ratio)
            assert tensor.dtype == dtype and tensor.shape == want.shape
            assert same_bits(tensor, want), (source, group.rank)


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


@pytest.mark.parametrize("dtype, value, ratio, kept", (
    (torch.float32, 3.4e38, 1 / 128, "inf"),  # an infinity before the largest number
    (torch.float16, 65504, 1, "finite"),      # is no f16 any more when rounded to bf16
))
def test_at_the_end_of_the_range(dtype, value, ratio, kept):
    def body(group):
        sent = torch.full((128,), value, dtype=dtype)
        if kept == "inf":
            sent[2] = math.inf
        for came in sparse_all_to_all([sent] * group.size, group, "bf16", ratio):
            if kept == "inf":
                assert came[2] == math.inf and (came != 0).sum() == 1
            else:
                assert (came == 65280).all()

    ferry.run(body, 2, 1)


def test_a_short_last_block_keeps_its_share():
    def body(group):
        sent = [torch.arange(1.0, 168.0)] * group.size
        for came in sparse_all_to_all(sent, group, "fp16", 0.3):
            assert (came[:128] != 0).sum() == 39 and (came[128:] != 0).sum() == 12

    ferry.run(body, 2, 1)


def test_exchanges_do_not_grow_with_the_ratios():
    def body(group):
        for percent in range(1, 30):
            sparse_all_to_all([torch.ones(3)] * group.size, group, "fp16", percent / 100)
        assert len(group.__dict__["_sparse_exchanges"]) == 1

    ferry.run(body, 2, 1)


def test_numbers_of_numpy_are_ratios():
    def body(group):
        mine = np.float32(0.3) if group.rank else 0.3
        sparse_all_to_all([torch.ones(3)] * group.size, group, sparse_ratio=mine)

    ferry.run(body, 2, 1)


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("nodes, ranks", ((2, 2), (1, 3)))
@pytest.mark.parametrize("ratio", (1, 0.3))
def test_gradients_go_home(dtype, nodes, ranks, ratio):
    """Where a value came through, its gradient is bit for bit that of what it became."""
    def grad_of(source, target):
        generator = torch.Generator().manual_seed(1000 + 10 * source + target)
        return torch.randn(shape_of(source, target), generator=generator).to(dtype) * 1e-3

    def body(group):
        sent = [tensor_of(group.rank, target, dtype).requires_grad_() for target in range(group.size)]
        received = sparse_all_to_all(sent, group, "fp16", ratio)
        torch.autograd.backward(received, [grad_of(source, group.rank)
                                           for source in range(group.size)])
        for target, tensor in enumerate(sent):
            passes = came_from(tensor.detach(), "fp16", ratio)[1]
            want = torch.where(passes, grad_of(group.rank, target), torch.zeros((), dtype=dtype))
            assert same_bits(tensor.grad, want), (group.rank, target)

    ferry.run(body, nodes, ranks)


def test_gradients_are_those_of_a_dense_exchange():
    """On 4 ranks of 2 nodes, through what comes before and after."""
    def body(group):
        torch.manual_seed(group.rank)
        base = torch.randn(2, 150, requires_grad=True)
        sent = [base * (target + 1) for target in range(group.size)]
        received = sparse_all_to_all(sent, group, "fp32", 1)
        sum((source + 2) * (tensor ** 2).sum() for source, tensor in enumerate(received)).backward()
        dense = base.detach().clone().requires_grad_()
        sum((group.rank + 2) * ((dense * (target + 1)) ** 2).sum()
            for target in range(group.size)).backward()
        assert torch.allclose(base.grad, dense.grad, rtol=1e-5)

    ferry.run(body, 2, 2)


def test_ranks_without_a_gradient_of_their_own_take_part():
    def body(group):
        mine = torch.ones(5 + group.rank, requires_grad=group.rank == 1)
        fixed = torch.ones(3)
        received = sparse_all_to_all([mine if target == 2 else fixed for target in range(group.size)],
                                     group, "fp32", 1)
        assert all(tensor.requires_grad for tensor in received)
        sum((group.rank + 1) * tensor.sum() for tensor in received).backward()
        assert (mine.grad == 3).all() if group.rank == 1 else mine.grad is None
        assert fixed.grad is None
        none = sparse_all_to_all([fixed] * group.size, group)
        assert not any(tensor.requires_grad for tensor in none)
        with torch.no_grad():
            quiet = sparse_all_to_all([mine] * group.size, group)
        assert not any(tensor.requires_grad for tensor in quiet)
        # torch's switch is of the thread, which is the rank
        torch.set_grad_enabled(group.rank != 0)
        with pytest.raises(ferry.MismatchError,
                           match="wanted on rank 1 and switched off on rank 0"):
            sparse_all_to_all([mine] * group.size, group)
        torch.set_grad_enabled(True)

    ferry.run(body, 2, 2)


def test_a_part_of_the_results_is_enough():
    def body(group):
        sent = [torch.ones(4, requires_grad=True) for _ in range(group.size)]
        received = sparse_all_to_all(sent, group, "fp32", 1)
        received[0].sum().backward()
        # What rank 0 sent is what both used.
        assert all((tensor.grad == (group.rank == 0)).all() for tensor in sent)

    ferry.run(body, 1, 2)


class Unreadable(torch.Tensor):
    """Raises a RuntimeError when its values are read."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.detach, torch.Tensor.reshape):
            raise RuntimeError("unreadable")
        return super().__torch_function__(func, types, args, kwargs or {})


REFUSED = {
    "1 tensors on rank 0; allowed: 2": {"sent": [torch.ones(3)]},
    "tensor_list is a NoneType on rank 0": {"sent": None},
    "tensor_list is a generator on rank 0": {"sent": (torch.ones(3) for _ in range(2))},
    "tensor_list is a Tensor on rank 0": {"sent": torch.ones(2, 3)},
    r"compress_type = \['fp16'\] on rank 0": {"compress_type": ["fp16"]},
    "compress_type = 'int4' on rank 0": {"compress_type": "int4"},
    "sparse_ratio = 0 on rank 0": {"sparse_ratio": 0},
    "sparse_ratio = True on rank 0": {"sparse_ratio": True},
    "sparse_ratio = nan on rank 0": {"sparse_ratio": math.nan},
    "sparse_ratio = '1' on rank 0": {"sparse_ratio": "1"},
    r"tensor_list\[1\] is torch.int64": {"sent": [torch.ones(3), torch.ones(3, dtype=torch.int64)]},
    r"tensor_list\[0\] is torch.sparse_coo on rank 0": {"sent": [torch.eye(3).to_sparse()] * 2},
    r"tensor_list\[1\] is torch.float16 on cpu": {"sent": [torch.ones(3), torch.ones(3).half()]},
    "tensor_list is on meta": {"sent": [torch.ones(3, device="meta")] * 2},
    "RuntimeError on rank 0: unreadable": {"sent": [torch.ones(3).as_subclass(Unreadable)] * 2},
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals_reach_every_rank(words):
    def body(group):
        given = {"sent": [torch.ones(3)] * group.size}
        if group.rank == 0:
            given.update(REFUSED[words])
        with pytest.raises(ferry.InvalidArgumentError, match=words) as caught:
            sparse_all_to_all(given.pop("sent"), group, **given)
        check(group, torch.float32, "bf16", 0.5)  # and the group goes on
        return str(caught.value)

    assert len(set(ferry.run(body, 2, 1, deadline_s=20))) == 1


def test_mismatches_reach_every_rank():
    def body(group):
        ones = [torch.ones(3)] * group.size
        with pytest.raises(ferry.MismatchError, match="sparse_ratio is 0.3 on rank 0 and 0.5 on"):
            sparse_all_to_all(ones, group, sparse_ratio=0.5 if group.rank == 1 else 0.3)
        # A refusal goes before a mismatch, wherever they are.
        with pytest.raises(ferry.InvalidArgumentError, match="compress_type = 'int4' on rank 2"):
            sparse_all_to_all(ones, group, "int4" if group.rank == 2 else "fp16",
                              0.5 if group.rank == 1 else 0.3)

    ferry.run(body, 3, 1, deadline_s=20)


def test_without_a_group():
    with pytest.raises(ferry.InvalidArgumentError, match="0 open groups of ferry.init"):
        sparse_all_to_all([torch.ones(3)])
    with pytest.raises(ferry.InvalidArgumentError, match="inside ferry.run, the one that"):
        ferry.run(lambda group: sparse_all_to_all([torch.ones(3)]))
    with ferry.init(mpi="off"):
        assert torch.equal(sparse_all_to_all([torch.arange(3.0)], sparse_ratio=1)[0],
                           torch.arange(3.0))
