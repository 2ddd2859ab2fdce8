"""Layers against the oracle: strategies, layouts, dtypes, shapes of groups; forward and backward."""

import itertools
import time

import numpy as np
import pytest

import ferry
from oracle import (Inputs, combined, distinct, expert_rows, from_rows, to_rows, token_rows)

STRATEGIES = ("flat", "rank_dedup", "node_gather", "node_dedup")
EXPERTS, TOPK, HIDDEN = 7, 3, 24
TOKENS = (5, 0, 9, 1)


def run_layer(group, dtype, options, ids=np.int64):
    all_inputs = [Inputs(rank, TOKENS[rank], HIDDEN, TOPK, EXPERTS, ids)
                  for rank in range(group.size)]
    own = all_inputs[group.rank]
    exchange = ferry.Exchange(group, ferry.Placement.contiguous(EXPERTS, group.size), HIDDEN, dtype,
                              **options)
    plan = exchange.plan(own.topk_idx, own.topk_weights)
    rows = exchange.dispatch(plan, to_rows(own.x, dtype))
    return exchange, plan, rows, own, all_inputs


def check_expert_major(group, dtype, options, ids=np.int64):
    exchange, plan, rows, own, all_inputs = run_layer(group, dtype, options, ids)
    expected = expert_rows(all_inputs, plan.local_experts)
    values = from_rows(rows.numpy(), dtype)
    counts = [sum(row[0] == expert for row in expected) for expert in plan.local_experts]
    assert plan.expert_counts.tolist() == counts
    assert plan.expert_offsets.tolist() == [0, *itertools.accumulate(counts)]
    assert rows.shape == (len(expected), HIDDEN) and plan.num_rows == rows.num_rows
    y = exchange.output(plan)
    scaled = np.empty_like(values)
    for place, (expert, _, _, row) in enumerate(expected):
        assert (values[place] == row).all(), (place, expert)
        scaled[place] = values[place] * (expert + 1)
    y.numpy()[:] = to_rows(scaled, dtype)
    weighted = options.get("weights", "at_combine") == "at_combine"
    out = exchange.combine(plan, y)
    assert (from_rows(out.numpy(), dtype) == combined(own, weighted)).all()
    # The same from an array of the caller's, into one of the caller's.
    given = np.full_like(to_rows(own.x, dtype), 77)
    assert exchange.combine(plan, np.ascontiguousarray(y.numpy()), given) is given
    assert (given == out.numpy()).all()
    return exchange, plan, own, expected, y


@pytest.mark.parametrize("dtype", ("f32", "bf16", "f16"))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_and_dtypes(strategy, dtype):
    for nodes in (1, 2):
        ferry.run(check_expert_major, nodes, 4 // nodes,
                  args=(dtype, {"strategy": strategy, "wire_combine": "f32"}))


def test_quantised_wires():
    """Every row crosses twice; errors stay within the bounds of docs/wire-formats.md."""
    def layer(group):
        hidden, block = 300, 64
        exchange = ferry.Exchange(group, ferry.Placement.contiguous(4, 4), hidden, "f32",
                                  wire_dispatch="fp8_e4m3fn", wire_combine="int8",
                                  wire_dispatch_backward="int8", wire_block_columns=block)
        assert exchange.options["wire_dispatch"] == "fp8_e4m3fn"
        assert exchange.options["wire_combine_backward"] == "f32"
        assert exchange.options["wire_dispatch_backward"] == "int8"
        assert exchange.options["wire_block_columns"] == block
        x = np.random.default_rng(group.rank).normal(size=(9, hidden)).astype(np.float32)
        plan = exchange.plan(np.full((9, 1), (group.rank + 2) % 4), np.ones((9, 1), np.float32))
        out = exchange.combine(plan, exchange.dispatch(plan, x)).numpy()
        for begin in range(0, hidden, block):
            before, after = x[:, begin:begin + block], out[:, begin:begin + block]
            step = np.abs(before).max(axis=1, keepdims=True) / 254 * 1.07
            assert (np.abs(after - before) <= np.abs(before) / 16 + step).all()
        assert (out != x).any()

    ferry.run(layer, nodes=2, ranks_per_node=2)


def test_rows_beyond_the_error_limit():
    """Of two tokens with one expert elsewhere, the one with values of two sizes escalates."""
    def layer(group):
        exchange = ferry.Exchange(group, ferry.Placement.contiguous(2, 2), 256, "f32",
                                  wire_dispatch="int8", wire_combine="f32",
                                  max_relative_error=0.01)
        x = np.ones((2, 256), np.float32)
        x[1, ::16] = 300  # the ones become 0 in int8
        x[1, 1::16] = 1.7
        plan = exchange.plan(np.full((2, 1), 1 - group.rank), np.ones((2, 1), np.float32))
        rows = exchange.dispatch(plan, x)
        assert (rows.numpy()[1] == x[1]).mean() < 1 and abs(rows.numpy()[1] / x[1] - 1).max() < .004
        used = exchange.wire_statistics
        assert used["dispatch"]["rows"] == 2 and used["dispatch"]["escalated_rows"] == 1
        assert used["dispatch"]["payload_bytes"] == (8 + 256) + 512 + 1
        assert used["combine"]["rows"] == 0

    ferry.run(layer, nodes=2, ranks_per_node=1)


def test_sums_beyond_f16_escalate():
    """A sum that int8 holds, and f16 does not, goes home unharmed where it misses the limit."""
    def layer(group):
        exchange = ferry.Exchange(group, ferry.Placement.contiguous(4, 2), 256, "f16",
                                  strategy="node_dedup", wire_combine="int8",
                                  max_relative_error=0.0079)
        far, own = 2 * (1 - group.rank), 2 * group.rank
        plan = exchange.plan(np.array([[far, far + 1, own]]), np.array([[1, 1, -1]], np.float32))
        rows = exchange.dispatch(plan, np.zeros((1, 256), np.float16)).numpy()
        y = np.full(rows.shape, 230, np.float16)
        y[:, 1] = 60000
        out = np.asarray(exchange.combine(plan, y))
        assert exchange.wire_statistics["combine"]["escalated_rows"] == 1
        assert abs(out[0, 1] - 60000) <= 120000 / 256 and (abs(out[0, 2:] - 230) <= 2).all()

    ferry.run(layer, nodes=2, ranks_per_node=1)


def test_automatic_wires():
    """Formats that are named stand; the others follow from the error."""
    def layer(group):
        def options(**given):
            made = ferry.Exchange(group, ferry.Placement.contiguous(2, 2), 8, "f32", **given)
            return made.options
        chosen = options(wire="auto", max_relative_error=0.02)
        assert chosen["wire_dispatch"] == "int8" and chosen["wire_combine"] == "bf16"
        assert abs(chosen["max_relative_error"] - 0.02) < 1e-6
        named = options(wire="auto", max_relative_error=0.02, wire_dispatch="f32")
        assert named["wire_dispatch"] == "f32" and named["max_relative_error"] == 0
        assert options(wire="auto")["wire_dispatch"] == options(wire=None)["wire_dispatch"] == "f32"
        assert options(wire="auto", max_relative_error=None)["max_relative_error"] == 0
        for quantised in ("wire_dispatch", "wire_combine", "wire_combine_backward"):
            for name in ("int8", "fp8"):
                kept = options(wire="auto", max_relative_error=0.005, **{quantised: name})
                assert abs(kept["max_relative_error"] - 0.005) < 1e-6
        with pytest.raises(ferry.InvalidArgumentError, match="max_relative_error = 0.003"):
            options(wire="auto", max_relative_error=0.003, wire_dispatch="int8")
        with pytest.raises(ferry.InvalidArgumentError,
                           match="max_relative_error = 0.02 beside wire_sparse_ratio = 0.5"):
            options(wire="auto", max_relative_error=0.02, wire_combine="sparse_f16",
                    wire_sparse_ratio=0.5)
        whole = options(wire="auto", max_relative_error=0.02, wire_combine="sparse_f16")
        assert whole["wire_dispatch"] == "int8" and whole["wire_combine"] == "sparse_f16"
        for rate, wire in ((30e9, "bf16"), (10e9, "int8"), (0, "int8"), (None, "int8")):
            fast = options(wire="auto", max_relative_error=0.02, link_bits_per_s=rate)
            assert fast["wire_dispatch"] == wire
        with pytest.raises(ferry.InvalidArgumentError, match="link_bits_per_s = -1"):
            options(wire="auto", link_bits_per_s=-1)
        with pytest.raises(ferry.InvalidArgumentError, match="link_bits_per_s without wire"):
            options(link_bits_per_s=1e9)
        with pytest.raises(ferry.InvalidArgumentError, match="allowed: None, 'auto'"):
            options(wire="int8")
        with pytest.raises(ferry.InvalidArgumentError, match="max_relative_error"):
            ferry.choose_wires("bf16", 1)

    ferry.run(layer, nodes=2, ranks_per_node=1)


def test_sparse_wires():
    """Zeros do not cross, and of the rest the largest."""
    def layer(group):
        exchange = ferry.Exchange(group, ferry.Placement.contiguous(2, 2), 256, "f32",
                                  wire_dispatch="sparse_f32", wire_combine="sparse_f16",
                                  wire_sparse_ratio=0.25)
        x = np.zeros((3, 256), np.float32)
        x[:, ::3] = np.arange(86)
        plan = exchange.plan(np.full((3, 1), 1 - group.rank), np.ones((3, 1), np.float32))
        rows = exchange.dispatch(plan, x).numpy()
        kept = np.zeros(256, bool)
        for begin in (0, 128):
            kept[np.arange(begin, begin + 128)[np.argsort(-x[0, begin:begin + 128])[:32]]] = True
        assert (rows == x * kept).all()
        assert exchange.wire_statistics["dispatch"]["payload_bytes"] <= 3 * (32 + 4 * 64)

    ferry.run(layer, nodes=2, ranks_per_node=1)


def test_unequal_nodes_and_int32_ids():
    ferry.run(check_expert_major, topology=ferry.Topology.from_sizes([1, 3]),
              args=("f32", {"fragment_bytes": 512, "range_tokens": 2}, np.int32))


def test_a_link_with_a_rate():
    ferry.run(check_expert_major, 2, 2, link_bits_per_s=1e9, progress_thread=True,
              args=("f32", {}))


@pytest.mark.parametrize("weights", ("at_expert", "none"))
@pytest.mark.parametrize("strategy", ("rank_dedup", "node_gather", "node_dedup"))
def test_token_major(strategy, weights):
    def layer(group):
        options = {"strategy": strategy, "layout": "token_major", "weights": weights,
                   "wire_combine": "f32"}
        exchange, plan, rows, own, all_inputs = run_layer(group, "f32", options)
        expected = token_rows(all_inputs, plan.local_experts)
        assert rows.shape == (len(expected), HIDDEN)
        assert plan.topk_idx.shape == plan.topk_weights.shape == (len(expected), TOPK if expected
                                                                  else 0)
        sources = plan.row_sources
        y = exchange.output(plan)
        for place, (rank, token, row) in enumerate(expected):
            assert (sources.rank[place], sources.token[place]) == (rank, token)
            assert (rows.numpy()[place] == row).all()
            local, weight = plan.topk_idx[place], plan.topk_weights[place]
            scale = sum(weight[slot] * (plan.local_experts[local[slot]] + 1)
                        for slot in range(TOPK) if local[slot] >= 0)
            y.numpy()[place] = row * scale
        out = exchange.combine(plan, y).numpy()
        assert (out == combined(own, weights == "at_expert")).all()

    ferry.run(layer, 2, 2)


def test_row_options():
    def layer(group):
        all_inputs = [Inputs(rank, TOKENS[rank], HIDDEN, TOPK, EXPERTS) for rank in range(4)]
        own = all_inputs[group.rank]
        exchange = ferry.Exchange(group, ferry.Placement.from_map([3, 3, 0, 1, 1, 0, 3]), HIDDEN,
                                  "f32", row_alignment=4, extra_bytes=8, row_sources=True)
        plan = exchange.plan(own.topk_idx, own.topk_weights)
        extra = np.array([[group.rank, token] for token in range(len(own.x))], np.int32)
        rows = exchange.dispatch(plan, own.x, extra.reshape(-1, 2))
        assert rows.extra.shape == (plan.num_rows, 8)
        sources = plan.row_sources
        expected = iter(expert_rows(all_inputs, plan.local_experts))
        for place in range(plan.num_rows):
            if sources.rank[place] < 0:  # alignment
                assert not rows.numpy()[place].any() and sources.weight[place] == 0
                continue
            _, rank, token, row = next(expected)
            assert (sources.rank[place], sources.token[place]) == (rank, token)
            assert rows.extra[place].view(np.int32).tolist() == [rank, token]
            assert (rows.numpy()[place] == row).all()
        assert next(expected, None) is None
        assert all(offset % 4 == 0 for offset in plan.expert_offsets)

    ferry.run(layer, 2, 2)


@pytest.mark.parametrize("num_tokens", ((0, 0, 0, 0), (1, 0, 0, 0), (0, 3, 0, 4095)))
def test_zero_tokens(num_tokens):
    def layer(group):
        own = Inputs(group.rank, num_tokens[group.rank], HIDDEN, TOPK, EXPERTS)
        exchange = ferry.Exchange(group, ferry.Placement.contiguous(EXPERTS, 4), HIDDEN, "f32")
        for _ in range(3):
            plan = exchange.plan(own.topk_idx, own.topk_weights)
            rows = exchange.dispatch(plan, own.x)
            assert rows.numpy().shape == (plan.num_rows, HIDDEN)
            out = exchange.combine(plan, rows)
            assert out.shape == own.x.shape
        return plan.num_rows

    num_rows = ferry.run(layer, 2, 2)
    if num_tokens == (0, 0, 0, 0):
        assert num_rows == [0, 0, 0, 0]


def test_started_calls_and_gather():
    def layer(group):
        own = Inputs(group.rank, TOKENS[group.rank], HIDDEN, TOPK, EXPERTS)
        exchange = ferry.Exchange(group, ferry.Placement.contiguous(EXPERTS, 4), HIDDEN, "f32",
                                  strategy="node_gather", wire_combine="f32")
        gathering = exchange.start_gather(own.x)
        planning = exchange.start_plan(own.topk_idx, own.topk_weights, gathering=gathering)
        plan, rows = planning.wait(), gathering.wait()
        assert planning.wait() is plan and gathering.done() and gathering.wait() is rows
        pair = exchange.start_plan_and_dispatch(own.topk_idx, own.topk_weights, own.x)
        while not pair.progress():
            pass
        second_plan, second = pair.wait()
        assert (second.numpy() == rows.numpy()).all()
        outs = [exchange.start_combine(plan, rows), exchange.start_combine(second_plan, second)]
        one, other = [pending.wait().numpy() for pending in reversed(outs)]
        assert (one == other).all()
        assert exchange.metadata_rounds == 2
        assert group.pool_bytes() > 0

    ferry.run(layer, 2, 2)


def test_stalls_are_counted():
    def layer(group):
        exchange = ferry.Exchange(group, ferry.Placement.contiguous(2, 2), HIDDEN, "f32")
        if group.rank == 0:
            time.sleep(0.1)
        exchange.plan(np.zeros((3, 1), np.int64))
        return exchange.host_stalls, exchange.stall_us

    stalls, stall_us = ferry.run(layer, 2, 1)[1]
    assert stalls >= 1 and stall_us > 5


def test_backward():
    def layer(group):
        exchange, plan, own, expected, y = check_expert_major(
            group, "f32", {"wire_combine": "f32", "row_sources": True})
        grad_out = np.random.default_rng(group.rank).integers(
            -3, 4, own.x.shape).astype(np.float32)
        grad_weights = np.full(own.topk_idx.shape, 77, np.float32)
        grads = exchange.combine_backward(plan, grad_out, y, grad_weights)
        every = group.all_gather(grad_out)
        for place, (_, rank, token, _) in enumerate(expected):
            weight = plan.row_sources.weight[place]
            assert (grads.numpy()[place] == weight * every[rank][token]).all()
        for token, ids in enumerate(own.topk_idx):
            for slot, expert in enumerate(ids):
                wanted = (0 if expert < 0 else
                          float(grad_out[token] @ (own.x[token] * (expert + 1))))
                assert grad_weights[token, slot] == wanted
        grad_x = exchange.dispatch_backward(plan, grads)
        for token, ids in enumerate(own.topk_idx):
            total = sum(own.topk_weights[token, slot] for slots in distinct(ids).values()
                        for slot in slots)
            assert (grad_x.numpy()[token] == total * grad_out[token]).all()
        # Without weights, in arrays of the caller's.
        plain = exchange.combine_backward(plan, grad_out).numpy()
        assert (plain == grads.numpy()).all()
        given = np.empty_like(own.x)
        assert exchange.dispatch_backward(plan, plain, grad_x=given) is given
        assert (given == grad_x.numpy()).all()

    ferry.run(layer, 2, 2)


def test_backward_of_row_weights():
    def layer(group):
        exchange, plan, rows, own, _ = run_layer(group, "f32", {"weights": "at_expert"})
        local = np.repeat(plan.local_experts, plan.expert_counts).astype(np.float32)
        grad_weights = np.empty(own.topk_idx.shape, np.float32)
        exchange.dispatch_backward(plan, rows, grad_row_weights=local + 1,
                                   grad_weights=grad_weights)
        assert (grad_weights == np.where(own.topk_idx < 0, 0, own.topk_idx + 1)).all()

    ferry.run(layer, 2, 2)


def test_the_plan_says_what_it_sends():
    def layer(group):
        exchange, plan, rows, _, _ = run_layer(group, "f32", {})
        summary = plan.summary
        assert summary.rows_received == rows.num_rows
        assert summary.window_bytes == rows.num_rows * rows.numpy().strides[0]
        exchange.combine(plan, rows)
        sent = summary.inter_node_bytes_dispatch + summary.inter_node_bytes_combine
        assert group.counters()["payload_bytes"] == sent
        return sent

    assert sum(ferry.run(layer, 2, 2)) > 0
