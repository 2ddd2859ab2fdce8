"""Arrays in and out: nothing is copied, nothing dangles, and what cannot be taken says the fix."""

import gc
import threading
import weakref

import numpy as np
import pytest

import ferry
from ferry import _ferry
from oracle import from_rows, to_rows

torch = pytest.importorskip("torch")
HIDDEN, EXPERTS, TOKENS = 96, 4, 6


def exchange_of(group, dtype="f32", **options):
    return ferry.Exchange(group, ferry.Placement.contiguous(EXPERTS, group.size), HIDDEN, dtype,
                          **options)


def ids_of(group, kind=np.int64):
    return (np.arange(TOKENS * 2).reshape(TOKENS, 2) % EXPERTS).astype(kind)


def address(array):
    return array.__array_interface__["data"][0]


def test_rows_are_views():
    def layer(group):
        exchange = exchange_of(group)
        plan = exchange.plan(ids_of(group))
        rows = exchange.dispatch(plan, np.ones((TOKENS, HIDDEN), np.float32))
        first, second = rows.numpy(), rows.numpy()
        assert address(first) == address(second) and address(first) % 64 == 0
        tensor = torch.from_dlpack(rows)
        assert tensor.data_ptr() == address(first) and tensor.shape == rows.shape
        assert tensor.stride() == (first.strides[0] // 4, 1)
        tensor[0] = 5
        assert (first[0] == 5).all()
        assert np.asarray(rows) is not None and address(np.asarray(rows)) == address(first)
        with pytest.raises(ValueError):
            plan.expert_counts[0] = 1

    ferry.run(layer, 1, 2)


def test_outputs_in_a_view_are_read_in_place():
    """combine sends y in place where it lies in a window: the pool does not grow for a copy."""
    def layer(group):
        exchange = exchange_of(group)
        plan = exchange.plan(ids_of(group))
        rows = exchange.dispatch(plan, np.ones((TOKENS, HIDDEN), np.float32))
        held = group.pool_bytes()
        exchange.combine(plan, torch.from_dlpack(rows))
        exchange.combine(plan, rows.numpy())
        assert group.pool_bytes() == held
        exchange.combine(plan, rows.numpy().copy())
        assert group.pool_bytes() > held

    ferry.run(layer, 1, 2)


@pytest.mark.parametrize("dtype", ("f32", "bf16", "f16"))
def test_torch_tensors(dtype):
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]

    def layer(group):
        exchange = exchange_of(group, dtype)
        x = torch.arange(TOKENS * HIDDEN).reshape(TOKENS, HIDDEN).remainder(100).to(kind)
        ids = torch.from_numpy(ids_of(group))
        plan = exchange.plan(ids, torch.full((TOKENS, 2), 0.5))
        rows = exchange.dispatch(plan, x)
        y = torch.from_dlpack(exchange.output(plan))
        assert y.dtype == kind
        y.copy_(torch.from_dlpack(rows))
        out = exchange.combine(plan, y)
        assert isinstance(out, ferry.Array) and out.dtype == dtype
        assert torch.equal(torch.from_dlpack(out), x)
        given = torch.empty_like(x)
        assert exchange.combine(plan, y, given) is given and torch.equal(given, x)
        # NumPy and torch give the same bits.
        as_numpy = exchange.dispatch(plan, to_rows(x.float().numpy(), dtype))
        assert (as_numpy.numpy() == rows.numpy()).all()
        assert (from_rows(rows.numpy(), dtype) ==
                torch.from_dlpack(rows).float().numpy()).all()

    ferry.run(layer, 2, 1)


@pytest.mark.parametrize("kind", (np.int32, np.int64))
def test_inputs_are_not_copied(kind):
    """A change behind Ferry's back, between start and wait, is seen: it reads the caller's memory."""
    def layer(group):
        exchange = exchange_of(group)
        if group.rank == 1:
            group.barrier()
        ids = ids_of(group, kind)
        planning = exchange.start_plan(ids)
        if group.rank == 0:
            group.barrier()
        plan = planning.wait()
        wide = np.zeros((TOKENS, HIDDEN + 8), np.float32)
        rows = exchange.dispatch(plan, wide[:, :HIDDEN])  # rows lie apart
        return rows.num_rows

    assert sum(ferry.run(layer, 1, 2)) == 2 * TOKENS * 2
    base = np.arange(12, dtype=kind).reshape(6, 2)
    view, _, is_numpy = _ferry.as_numpy(base, "call", 0)
    assert view is base and is_numpy
    tensor = torch.from_numpy(base)
    assert address(_ferry.as_numpy(tensor, "call", 0)[0]) == tensor.data_ptr()


BAD = {
    "a column slice": (lambda: np.zeros((TOKENS, 2 * HIDDEN), np.float32)[:, ::2],
                       "np.ascontiguousarray(x)"),
    "a transposed tensor": (lambda: torch.zeros(HIDDEN, TOKENS).T, "x.contiguous()"),
    "the same row again": (lambda: np.broadcast_to(np.zeros(HIDDEN, np.float32),
                                                   (TOKENS, HIDDEN)), "np.ascontiguousarray(x)"),
    "three dimensions": (lambda: np.zeros((TOKENS, HIDDEN, 1), np.float32), "reshape it"),
    "float64": (lambda: np.zeros((TOKENS, HIDDEN)), "float64"),
    "another dtype": (lambda: np.zeros((TOKENS, HIDDEN), np.float16), "f16"),
    "a list": (lambda: [[0.0] * HIDDEN] * TOKENS, "NumPy array"),
    "other bytes": (lambda: np.zeros((TOKENS, HIDDEN), ">f4"), "byte order"),
    "a tensor with gradients": (lambda: torch.zeros(TOKENS, HIDDEN, requires_grad=True),
                                "x.detach()"),
    "too few rows": (lambda: np.zeros((TOKENS - 1, HIDDEN), np.float32), f"[{TOKENS}, {HIDDEN}]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_an_error_on_every_rank(name):
    make, words = BAD[name]

    texts = []

    def simple(group):
        exchange = exchange_of(group)
        plan = exchange.plan(ids_of(group))
        with pytest.raises(ferry.InvalidArgumentError) as caught:
            # Every rank holds an expert of rank 1's tokens, so all of them need its rows.
            exchange.dispatch(plan, make() if group.rank == 1
                              else np.zeros((TOKENS, HIDDEN), np.float32))
        texts.append(str(caught.value))
        exchange.dispatch(exchange.plan(ids_of(group)), np.zeros((TOKENS, HIDDEN), np.float32))

    ferry.run(simple, 2, 1)
    assert len(set(texts)) == 1 and words in texts[0] and "rank 1" in texts[0], texts


class OnDevice:
    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self):
        raise AssertionError("asked for memory of a device")


class OfCuda:
    __cuda_array_interface__ = {"shape": (TOKENS, HIDDEN), "typestr": "<f4", "data": (0, False)}


@pytest.mark.parametrize("kind", (OnDevice, OfCuda))
def test_device_memory_names_the_fix(kind):
    def layer(group):
        exchange = exchange_of(group)
        plan = exchange.plan(ids_of(group))
        with pytest.raises(ValueError, match=r"x\.cpu\(\)"):
            exchange.dispatch(plan, kind())

    ferry.run(layer)


@pytest.mark.parametrize("ids", (np.zeros((TOKENS, 2)), np.zeros((TOKENS, 4), np.int64)[:, ::2],
                                 np.zeros(TOKENS, np.int64), np.full((TOKENS, 2), EXPERTS),
                                 np.full((TOKENS, 2), -2)))
def test_bad_ids_are_an_error_on_every_rank(ids):
    def layer(group):
        exchange = exchange_of(group)
        with pytest.raises(ferry.InvalidArgumentError) as caught:
            exchange.plan(ids if group.rank == 1 else ids_of(group))
        exchange.plan(ids_of(group))
        return str(caught.value)

    texts = ferry.run(layer, 2, 1)
    assert texts[0] == texts[1] and "rank 1" in texts[0]


def test_bf16_of_numpy_is_told():
    def layer(group):
        exchange = exchange_of(group, "bf16")
        plan = exchange.plan(ids_of(group))
        with pytest.raises(ValueError, match="uint16"):
            exchange.dispatch(plan, np.zeros((TOKENS, HIDDEN), np.float32))
        plan = exchange.plan(ids_of(group))
        rows = exchange.dispatch(plan, np.full((TOKENS, HIDDEN), 0x3F80, np.uint16))
        assert torch.from_dlpack(rows).dtype == torch.bfloat16 and rows.numpy().dtype == np.uint16
        assert (torch.from_dlpack(rows) == 1).all()

    ferry.run(layer)


def test_outputs_that_must_not_be_written():
    def layer(group):
        exchange = exchange_of(group)
        plan = exchange.plan(ids_of(group))
        out = np.zeros((TOKENS, HIDDEN), np.float32)
        out.flags.writeable = False
        with pytest.raises(ValueError, match="must not be written"):
            exchange.combine(plan, exchange.output(plan), out)

    ferry.run(layer)


def keep_rows(group):
    exchange = exchange_of(group)
    plan = exchange.plan(ids_of(group))
    x = np.full((TOKENS, HIDDEN), group.rank + 1, np.float32)
    rows = exchange.dispatch(plan, x)
    group.barrier()  # what is started now is cancelled on all ranks by the first that leaves
    return rows.numpy(), torch.from_dlpack(rows), plan, exchange.start_dispatch(plan, x)


@pytest.mark.parametrize("nodes", (1, 2))
def test_views_outlive_their_group(nodes):
    kept = ferry.run(keep_rows, nodes, 2 // nodes)
    gc.collect()
    for view, tensor, plan, pending in kept:
        assert view.size > 0 and set(np.unique(view)) == {1.0, 2.0}
        assert (tensor.numpy() == view).all()
        assert plan.expert_counts.sum() == plan.num_rows
        assert pending.done()
        with pytest.raises(ferry.Error):
            pending.wait()
    tensors = [one[1] for one in kept]
    views = [one[0] for one in kept]
    del kept, view, tensor, plan, pending
    gc.collect()
    dropper = threading.Thread(target=tensors.clear)  # the last view goes on another thread
    dropper.start()
    dropper.join()
    assert views[0].size > 0 and set(np.unique(views[0])) == {1.0, 2.0}  # on its own


def test_a_slot_is_free_when_its_last_view_goes():
    def layer(group):
        exchange = exchange_of(group)
        plan = exchange.plan(ids_of(group))
        held = [exchange.output(plan).numpy() for _ in range(3)]
        most = group.pool_bytes()
        assert len({address(one) for one in held}) == 3
        del held[1]
        exchange.output(plan)
        assert group.pool_bytes() == most
        group.set_limits(pool_limit_bytes=most)
        with pytest.raises(MemoryError, match="output of plan"):
            [exchange.output(plan) for _ in range(3)]

    ferry.run(layer)


def test_a_plan_of_more_tokens_than_allowed_is_refused():
    def layer(group):
        exchange = exchange_of(group)
        group.set_limits(num_tokens_limit=TOKENS)
        exchange.plan(ids_of(group))
        group.set_limits(num_tokens_limit=TOKENS - 1)
        with pytest.raises(ferry.LimitExceededError, match="raise num_tokens_limit"):
            exchange.plan(ids_of(group))

    ferry.run(layer)


def test_a_pending_keeps_its_arrays():
    def layer(group):
        exchange = exchange_of(group)
        plan = exchange.plan(ids_of(group))
        x = np.full((TOKENS, HIDDEN), 3, np.float32)
        watched = weakref.ref(x)
        if group.rank == 1:
            group.barrier()
        pending = exchange.start_dispatch(plan, x)
        del x
        gc.collect()
        if group.rank == 0:
            assert watched() is not None
            group.barrier()
        assert (pending.wait().numpy() == 3).all()
        gc.collect()
        assert watched() is None

    ferry.run(layer, 2, 1)


def test_what_python_cannot_read_ends_the_call_on_every_rank():
    bad = {"a type without bytes": lambda: np.zeros((3, 4), "V0"),
           "a buffer with gaps": lambda: memoryview(bytearray(64))[::2]}
    for what, make in bad.items():
        def rank(group):
            exchange = ferry.Exchange(group, ferry.Placement.contiguous(4, group.size), 4, "f32")
            plan = exchange.plan(np.zeros((3, 1), np.int32))
            x = make() if group.rank == 1 else np.zeros((3, 4), np.float32)
            with pytest.raises(ferry.InvalidArgumentError) as raised:
                exchange.dispatch(plan, x)
                exchange.combine(plan, exchange.output(plan))
            return str(raised.value)
        texts = ferry.run(rank, ranks_per_node=2, deadline_s=20)
        assert texts[0] == texts[1] and "x" in texts[0] and "rank 1" in texts[0], (what, texts)
