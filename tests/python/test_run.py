"""ferry.run: results, failures, Ctrl-C, the GIL, threads; and groups and their ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import ferry
from ferry import _ferry
from ferry._errors import ERROR_TYPES

PROGRAMS = Path(__file__).parent / "programs"


def test_results_come_by_rank():
    def body(group, offset, *, factor):
        return (group.rank + offset) * factor

    assert ferry.run(body, 2, 2, args=(1,), kwargs={"factor": 10}) == [10, 20, 30, 40]


def test_a_group_knows_its_shape():
    def body(group):
        return (group.rank, group.size, group.nodes, group.node, group.local_rank,
                group.transport, threading.current_thread().name)

    shape = ferry.Topology.from_map([0, 1, 0])
    assert ferry.run(body, topology=shape) == [
        (0, 3, 2, 0, 0, "threads", "ferry rank 0"), (1, 3, 2, 1, 0, "threads", "ferry rank 1"),
        (2, 3, 2, 0, 1, "threads", "ferry rank 2")]


def test_an_exception_ends_all_ranks_and_is_the_original():
    class Mine(Exception):
        pass

    error, others = Mine("rank 2 has had enough"), []

    def body(group):
        if group.rank == 2:
            raise error
        try:
            group.barrier()
        except ferry.PeerFailedError as failed:
            others.append(str(failed))
            raise

    with pytest.raises(Mine) as caught:
        ferry.run(body, 2, 2)
    assert caught.value is error and error.rank == 2
    assert "rank 2 of 4" in error.__notes__[0]
    assert len(others) == 3 and all("Mine: rank 2 has had enough" in text for text in others)


def test_ranks_that_cannot_be_made():
    with pytest.raises(ferry.InvalidArgumentError, match="topology"):
        ferry.run(lambda group: None, 0)
    with pytest.raises(ferry.InvalidArgumentError, match="link_bits_per_s"):
        ferry.run(lambda group: None, link_bits_per_s=-1)


def test_a_rank_may_run_a_group_of_its_own():
    def body(group):
        inner = ferry.run(lambda own: own.rank + 10 * group.rank, 1, 2)
        group.barrier()
        return inner

    assert ferry.run(body, 1, 2) == [[0, 1], [10, 11]]


def test_the_gil_is_free_while_ferry_waits():
    """Rank 1 computes in Python while rank 0 waits for it; with the GIL held it could not."""
    def body(group):
        if group.rank == 0:
            group.barrier()
            return 0
        steps = 0
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            steps += 1
        group.barrier()
        return steps

    assert ferry.run(body, 1, 2)[1] > 1000


def test_ranks_get_on_while_one_computes():
    """Two ranks of a sub-group exchange again and again while the third is in Python code."""
    rounds = []

    def body(group):
        if group.rank == 2:
            while len(rounds) < 20:
                sum(range(1000))
        else:
            pair = group.subgroup([0, 1])
            for _ in range(20):
                pair.barrier()
                if pair.rank == 0:
                    rounds.append(1)
        group.barrier()

    ferry.run(body, 1, 3)


@pytest.mark.parametrize("what", ("waiting", "python", "both"))
def test_ctrl_c(what):
    child = subprocess.Popen([sys.executable, "-B", PROGRAMS / "interrupted.py", what],
                             stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "running\n"
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        began = time.monotonic()
        output, _ = child.communicate(timeout=20)
    finally:
        child.kill()
    assert "KeyboardInterrupt after" in output, output
    assert "all ranks ended" in output and child.returncode == 0, output
    assert time.monotonic() - began < 10


def test_a_deadline_names_the_rank():
    def body(group):
        if group.rank == 1:
            time.sleep(0.6)
            return None
        with pytest.raises(TimeoutError, match="rank 1") as caught:
            group.barrier()
        return caught.value.code

    assert ferry.run(body, 2, 1, deadline_s=0.2)[0] == "timeout"


def test_a_second_thread_is_refused():
    def body(group):
        caught = []

        def other():
            try:
                group.barrier()
            except ferry.WrongThreadError as error:
                caught.append(error)

        if group.rank == 0:
            thread = threading.Thread(target=lambda: (time.sleep(0.1), other()))
            thread.start()
            group.barrier()
            thread.join()
            return caught
        time.sleep(0.4)
        group.barrier()
        return None

    assert len(ferry.run(body, 1, 2)[0]) == 1


def test_a_closed_group_refuses_calls():
    kept = []

    def body(group):
        exchange = ferry.Exchange(group, ferry.Placement.contiguous(2, 1), 4, "f32")
        kept.extend([group, exchange, exchange.plan(np.zeros((1, 1), np.int64))])
        with pytest.raises(ferry.InvalidArgumentError, match="has left"):
            with group:
                pass
            group.barrier()

    ferry.run(body)
    group, exchange, plan = kept
    assert group.closed
    for call in (group.barrier, lambda: exchange.output(plan), group.pool_bytes,
                 lambda: exchange.dispatch(plan, np.zeros((1, 4), np.float32)),
                 lambda: ferry.Exchange(group, ferry.Placement.contiguous(2, 1), 4)):
        with pytest.raises(ferry.InvalidArgumentError, match="rank 0 has left"):
            call()
    group.close()  # again: nothing


def test_dropped_and_cancelled_pendings():
    # Rank 1 starts when rank 0 has given up: a plan that both have started may be done by then.
    cancelled, dropped = threading.Event(), threading.Event()

    def body(group):
        exchange = ferry.Exchange(group, ferry.Placement.contiguous(2, 2), 4, "f32")
        ids = np.array([[0], [1]])
        if group.rank == 1:
            assert cancelled.wait(60)
        pending = exchange.start_plan(ids)
        if group.rank == 0:
            pending.cancel("changed my mind")
            cancelled.set()
        with pytest.raises(ferry.CancelledError, match="changed my mind"):
            pending.wait()
        if group.rank == 0:
            pending = exchange.start_plan(ids)
            del pending
            dropped.set()
        else:
            assert dropped.wait(60)
            with pytest.raises(ferry.CancelledError, match="dropped"):
                exchange.start_plan(ids).wait()
        return exchange.plan(ids).num_rows

    assert ferry.run(body, 2, 1) == [2, 2]


def test_pendings_dropped_on_another_thread():
    """Garbage of one rank may be collected by another one's thread; it is let go by its owner."""
    def body(group):
        exchange = ferry.Exchange(group, ferry.Placement.contiguous(2, 2), 4, "f32")
        plan = exchange.plan(np.array([[0], [1]]))
        box = [exchange.start_dispatch(plan, np.ones((2, 4), np.float32))]
        box[0].wait()
        box.append(ferry.Exchange(group, ferry.Placement.contiguous(2, 2), 4, "f32"))
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        group.barrier()
        return exchange.dispatch(plan, np.ones((2, 4), np.float32)).numpy().sum()

    assert ferry.run(body, 1, 2) == [8, 8]


def test_all_gather_and_all_reduce():
    torch = pytest.importorskip("torch")

    def body(group):
        rank = group.rank
        assert group.all_gather(bytes(rank)) == [bytes(other) for other in range(3)]
        arrays = group.all_gather(np.full((rank, 2), rank, np.int16))
        assert [one.shape for one in arrays] == [(0, 2), (1, 2), (2, 2)]
        assert (arrays[2] == 2).all() and arrays[1].dtype == np.int16
        tensors = group.all_gather(torch.full((2,), rank, dtype=torch.bfloat16))
        assert torch.from_dlpack(tensors[2]).tolist() == [2, 2]
        # In rank order in FP64: 1e8 - 1e8 + 1 is 1, which FP32 from the left would also lose.
        values = np.array([(1e8, -1e8, 1.0)[rank], rank], np.float32)
        assert group.all_reduce(values).tolist() == [1, 3]
        assert group.all_reduce(values, "max").tolist() == [np.float32(1e8), 2]
        assert group.all_reduce(np.array([2 ** 62], np.int64), "max")[0] == 2 ** 62
        bits = np.array([0x3F80], np.uint16)
        assert group.all_reduce(bits, dtype="bf16").tolist() == [0x4040]
        assert group.all_reduce(np.float32(rank)).shape == ()
        with pytest.raises(ferry.InvalidArgumentError, match="'sum', 'max'"):
            group.all_reduce(values, "mean")
        for given, dtype in (values, "bf16"), (bits, "f16"):
            with pytest.raises(ferry.InvalidArgumentError, match="leave it out"):
                group.all_reduce(given, dtype=dtype)
        with pytest.raises(ferry.MismatchError, match="rank"):
            group.all_reduce(np.zeros(1 + rank // 2))

    ferry.run(body, 3, 1)


@pytest.mark.parametrize("wrong, text", [
    ("text", "array on rank 1 is a str"),
    (np.array([None]), "elements of object"),
    (np.zeros(2, "datetime64[s]"), "elements of datetime64"),
])
def test_an_array_that_one_rank_cannot_give_is_refused_on_all(wrong, text):
    def body(group):
        refusals = []
        for call in group.all_gather, group.all_reduce:
            with pytest.raises(ferry.InvalidArgumentError, match=text) as caught:
                call(wrong if group.rank == 1 else np.ones(3))
            refusals.append(str(caught.value))
        assert group.all_gather(np.full(1, group.rank))[2] == [2]
        return refusals

    first, *others = ferry.run(body, 3, 1)
    assert first[0].startswith("all_gather: ") and first[1].startswith("all_reduce: ")
    assert others == [first, first]


def test_operations_that_differ_are_refused_on_all():
    def body(group):
        texts = []
        for op, kind in ("max", ferry.MismatchError), ("mean", ferry.InvalidArgumentError):
            with pytest.raises(kind) as caught:
                group.all_reduce(np.ones(2), "sum" if group.rank == 0 else op)
            texts.append(str(caught.value))
        return texts

    first, *others = ferry.run(body, 3, 1)
    assert "rank 1 asked for max, rank 0 for sum" in first[0] and "'mean' on rank 1" in first[1]
    assert others == [first, first]


def layer(group):
    exchange = ferry.Exchange(group, ferry.Placement.contiguous(group.size, group.size), 8, "f32")
    ids = np.arange(4).reshape(4, 1) % group.size
    plan = exchange.plan(ids, np.ones((4, 1), np.float32))
    rows = exchange.dispatch(plan, np.ones((4, 8), np.float32))
    rows.numpy()[:] *= group.rank + 1
    assert (exchange.combine(plan, rows.numpy()) == ids + 1).all()


@pytest.mark.parametrize("nodes", (1, 2))
def test_subgroups(nodes):
    def body(group):
        rank = group.rank
        ep = group.subgroup([0, 1] if rank < 2 else [2, 3])
        dp = group.subgroup([0, 2] if rank % 2 == 0 else [1, 3])
        assert (ep.rank, dp.rank) == (rank % 2, rank // 2)
        assert (ep.nodes, dp.nodes) == (1, nodes)
        for one in (dp, ep, group, dp):
            layer(one)
        assert dp.all_reduce(np.array([rank])).tolist() == [2 * (rank % 2) + 2]
        if rank < 2:
            with group.subgroup([1, 0]) as turned:
                assert turned.rank == 1 - rank
                layer(turned)
            assert turned.closed
        with pytest.raises(ferry.InvalidArgumentError, match="subgroup"):
            group.subgroup([0, 4])
        return ep

    for ep in ferry.run(body, nodes, 4 // nodes):
        assert ep.closed


def test_a_failure_ends_subgroups_too():
    def body(group):
        if group.rank == 2:
            raise KeyError("gone")
        pair = group.subgroup([0, 1])
        if group.rank == 0:
            pair.barrier()
        group.barrier()

    with pytest.raises(KeyError) as caught:
        ferry.run(body, 1, 3)
    assert caught.value.rank == 2


def test_every_code_has_its_class():
    assert set(_ferry.ERROR_CODES) == set(ERROR_TYPES)
    also = {"invalid_argument": ValueError, "mismatch": ValueError, "stale_plan": ValueError,
            "limit_exceeded": MemoryError, "resource_exhausted": MemoryError,
            "wrong_thread": RuntimeError, "timeout": TimeoutError, "peer_failed": ConnectionError,
            "corrupt_message": ConnectionError, "cancelled": RuntimeError,
            "unsupported": NotImplementedError}
    assert set(also) == set(_ferry.ERROR_CODES)
    for code in _ferry.ERROR_CODES:
        with pytest.raises(ferry.Error) as caught:
            _ferry.raise_error(code, "a text")
        assert type(caught.value) is ERROR_TYPES[code] and isinstance(caught.value, also[code])
        assert caught.value.code == code and str(caught.value) == "a text"


def test_foreign_plans_and_wrong_options():
    def body(group):
        placement = ferry.Placement.contiguous(2, 1)
        one, other = (ferry.Exchange(group, placement, 4, "f32") for _ in range(2))
        plan = one.plan(np.zeros((1, 1), np.int64))
        with pytest.raises(ferry.StalePlanError, match="belongs to exchange"):
            other.dispatch(plan, np.zeros((1, 4), np.float32))
        for words, options in (("strategy", {"strategy": "fastest"}), ("layout", {"layout": "x"}),
                               ("weights", {"weights": 3}), ("no option", {"colour": 1}),
                               ("wire_combine", {"wire_combine": "fp4"}),
                               ("wire_block_columns", {"wire_block_columns": 96}),
                               ("max_relative_error", {"max_relative_error": 0.01}),
                               ("max_relative_error", {"wire_combine": "int8",
                                                       "max_relative_error": 0.003}),
                               ("wire_sparse_ratio", {"wire_sparse_ratio": 0.5}),
                               ("wire_sparse_ratio", {"wire_combine": "sparse_f16",
                                                      "wire_sparse_ratio": 0}),
                               ("row_alignment", {"row_alignment": "two"}),
                               ("row_alignment", {"row_alignment": 0})):
            with pytest.raises(ferry.InvalidArgumentError, match=words):
                ferry.Exchange(group, placement, 4, "f32", **options)
        with pytest.raises(ferry.InvalidArgumentError, match="dtype"):
            ferry.Exchange(group, placement, 4, np.float32)
        with pytest.raises(ferry.InvalidArgumentError, match="hidden"):
            ferry.Exchange(group, placement, 0)
        with pytest.raises(ferry.UnsupportedError, match="node_gather"):
            one.start_gather(np.zeros((1, 4), np.float32)).wait()
        with pytest.raises(ferry.InvalidArgumentError, match="pool"):
            group.set_limits(pool=1)
        assert one.options["strategy"] == "node_dedup" and one.options["wire_combine"] == "f32"

    ferry.run(body)


def test_ranks_that_disagree():
    def body(group):
        strategy = "flat" if group.rank else "node_dedup"
        exchange = ferry.Exchange(group, ferry.Placement.contiguous(2, 2), 4, strategy=strategy)
        with pytest.raises(ferry.MismatchError, match="strategy"):
            exchange.plan(np.zeros((1, 1), np.int64))

    ferry.run(body, 2, 1)


def test_an_array_where_others_gather_bytes():
    def body(group):
        if group.rank == 1:
            group.all_gather(b"\xff" * 1000)
            return
        with pytest.raises(ferry.MismatchError, match="make the same call"):
            group.all_gather(np.zeros(3))

    ferry.run(body, 2, 1)


def test_one_rank_without_a_launcher():
    with ferry.init() as group:
        assert (group.rank, group.size) == (0, 1)
        layer(group)
    with ferry.init(mpi="off") as group:
        layer(group)
    with pytest.raises(ferry.InvalidArgumentError, match="mpi4py"):
        ferry.init(comm=3)
    with pytest.raises(ferry.InvalidArgumentError, match="no launcher"):
        ferry.init(topology=ferry.Topology.uniform(1, 2))


def test_torchrun_gets_the_line_to_use():
    said = subprocess.run(
        [sys.executable, "-c", "import ferry; ferry.init()"], capture_output=True, text=True,
        timeout=30, check=False,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "8"})
    assert "ferry.UnsupportedError" in said.stderr and "mpirun -n 8" in said.stderr
