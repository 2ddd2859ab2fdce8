"""Gates against plain loops over Python numbers."""

import math

import pytest
import torch

from ferry.torch import SigmoidGate, SoftmaxGate, precision, topk_from_logits
from ferry.torch.capacity import apply_capacity, capacity_of


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def choose(values, k):
    """Ids of the k largest, ties to the lowest id."""
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:k]


def set_logits(gate, logits):
    """Makes a gate whose logits for the unit vectors are the rows of `logits`."""
    with torch.no_grad():
        gate.weight.copy_(torch.tensor(logits).t())
    return torch.eye(len(logits))


def logits_of(gate, x):
    return (x.double() @ gate.weight.double().t()).tolist()


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_softmax_topk(renormalise, k):
    gate = SoftmaxGate(16, 8, k, renormalise=renormalise)
    x = torch.randn(50, 16)
    result = gate(x)
    for token, row in enumerate(logits_of(gate, x)):
        total = sum(math.exp(v) for v in row)
        probabilities = [math.exp(v) / total for v in row]
        ids = choose(probabilities, k)
        kept = sum(probabilities[e] for e in ids) if renormalise else 1
        assert result.topk_idx[token].tolist() == ids
        assert result.topk_weights[token].tolist() == pytest.approx(
            [probabilities[e] / kept for e in ids], rel=1e-5)
    assert result.counts.sum() == 50 * k and result.dropped.sum() == 0


@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
def test_sigmoid_groups_and_bias(group_score):
    gate = SigmoidGate(12, 16, 4, num_groups=4, topk_groups=2, group_score=group_score,
                       scaling_factor=2.5)
    gate.selection_bias.copy_(torch.randn(16))
    x = torch.randn(40, 12)
    result = gate(x)
    bias = gate.selection_bias.double().tolist()
    for token, row in enumerate(logits_of(gate, x)):
        scores = [sigmoid(v) for v in row]
        biased = [s + b for s, b in zip(scores, bias)]
        groups = [sorted(biased[4 * g:4 * g + 4])[::-1] for g in range(4)]
        worth = [g[0] + g[1] if group_score == "top2_sum" else g[0] for g in groups]
        allowed = choose(worth, 2)
        ids = choose([b if e // 4 in allowed else -math.inf for e, b in enumerate(biased)], 4)
        kept = sum(scores[e] for e in ids)
        assert result.topk_idx[token].tolist() == ids
        assert result.topk_weights[token].tolist() == pytest.approx(
            [2.5 * scores[e] / kept for e in ids], rel=1e-5)


def test_masked_groups_lose_against_negative_scores():
    gate = SigmoidGate(1, 8, 2, num_groups=4, topk_groups=1)
    x = set_logits(gate, [[0.0] * 8])
    gate.selection_bias.copy_(torch.tensor([-9, -9, -8, -8, -7, -7, -9, -9.0]))
    result = gate(x)
    assert result.topk_idx.tolist() == [[4, 5]]
    assert result.topk_weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("kind", [SoftmaxGate, SigmoidGate])
def test_ties_go_to_the_lowest_id_and_stay_there(kind):
    gate = kind(4, 32, 6)
    torch.nn.init.zeros_(gate.weight)
    x = torch.randn(300, 4)
    first, again = gate(x).topk_idx, gate(x, replay=gate(x)).topk_idx
    assert first.tolist() == [[0, 1, 2, 3, 4, 5]] * 300
    assert torch.equal(first, again)


def test_tied_groups_go_to_the_lowest_group():
    gate = SigmoidGate(4, 32, 4, num_groups=8, topk_groups=2)
    torch.nn.init.zeros_(gate.weight)
    assert gate(torch.randn(9, 4)).topk_idx.tolist() == [[0, 1, 2, 3]] * 9


@pytest.mark.parametrize("kind", [SoftmaxGate, SigmoidGate])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 17, 33, 40])
def test_bits_of_a_token_do_not_depend_on_the_batch(num_rows, kind):
    gate = kind(300, 25, 3)
    x = torch.randn(64, 300)
    whole = gate(x)
    part = gate(x[64 - num_rows:])
    assert torch.equal(whole.topk_idx[64 - num_rows:], part.topk_idx)
    assert torch.equal(whole.topk_weights[64 - num_rows:], part.topk_weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_has_fp32_weights(dtype):
    gate = SoftmaxGate(64, 16, 4).to(dtype)
    x = torch.randn(30, 64).to(dtype)
    result = gate(x)
    exact = torch.softmax(x.double() @ gate.weight.double().t(), -1)
    exact = exact.gather(1, result.topk_idx)
    exact = exact / exact.sum(1, keepdim=True)
    assert result.topk_weights.dtype == torch.float32
    assert (result.topk_weights - exact).abs().max() < 1e-6  # bf16 would be off by 1e-3
    result.topk_weights.square().sum().backward()
    assert gate.weight.grad.dtype == dtype and gate.weight.grad.abs().sum() > 0


def test_autocast_changes_nothing():
    gate = SigmoidGate(64, 16, 4)
    x = torch.randn(30, 64)
    plain = gate(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = gate(x)
    assert torch.equal(plain.topk_idx, cast.topk_idx)
    assert torch.equal(plain.topk_weights, cast.topk_weights)


def test_the_selection_bias_stays_fp32():
    gate = SigmoidGate(8, 4, 1)
    gate.selection_bias.copy_(torch.tensor([1.001, 1.002, 1.003, 1.004]))
    kept = gate.selection_bias.clone()
    moved = torch.nn.Sequential(gate).to(torch.bfloat16)[0]
    assert moved.weight.dtype == torch.bfloat16
    assert torch.equal(moved.selection_bias, kept)
    assert "selection_bias" in moved.state_dict()


def test_weights_have_the_right_gradient():
    gate = SigmoidGate(5, 6, 3, scaling_factor=1.5).double()
    x = torch.randn(4, 5)
    replay = gate(x)

    def weights(weight):
        scores = torch.sigmoid(x.double() @ weight.t()).gather(1, replay.topk_idx)
        return 1.5 * scores / scores.sum(1, keepdim=True)
    direction = torch.randn(4, 3)
    (gate(x, replay=replay).topk_weights * direction).sum().backward()
    reference = gate.weight.detach().clone().requires_grad_()
    (weights(reference) * direction).sum().backward()
    assert torch.allclose(gate.weight.grad, reference.grad, rtol=1e-5, atol=1e-6)


def drop_by_hand(idx, weights, capacity, num_experts):
    kept, dropped = [list(row) for row in idx], [0] * num_experts
    for expert in range(num_experts):
        slots = [(t, j) for t, row in enumerate(idx) for j, e in enumerate(row) if e == expert]
        slots.sort(key=lambda slot: (-weights[slot[0]][slot[1]], slot))
        for t, j in slots[capacity:]:
            kept[t][j] = -1
            dropped[expert] += 1
    return kept, dropped


@pytest.mark.parametrize("capacity", [1, 3, 8, 1000])
def test_capacity_drops_the_lowest_weights(capacity):
    idx = torch.stack([torch.randperm(6)[:3] for _ in range(40)])
    idx[torch.rand(40, 3) < 0.2] = -1
    weights = (torch.rand(40, 3) * 4).round() / 4  # many ties
    kept, dropped = apply_capacity(idx, weights, 6, capacity)
    wanted, wanted_dropped = drop_by_hand(idx.tolist(), weights.tolist(), capacity, 6)
    assert kept.tolist() == wanted
    assert dropped.tolist() == wanted_dropped


def test_capacity_in_a_gate_counts_and_empties():
    gate = SoftmaxGate(8, 4, 2, capacity_factor=0.5)
    x = torch.randn(32, 8)
    free = SoftmaxGate(8, 4, 2)
    free.load_state_dict(gate.state_dict())
    result, chosen = gate(x), free(x)
    limit = math.ceil(0.5 * 32 * 2 / 4)
    assert torch.equal(result.counts, chosen.counts)  # the true total
    assert result.dropped.tolist() == [max(0, c - limit) for c in chosen.counts.tolist()]
    assert result.dropped.sum() > 0
    assert (result.topk_idx == -1).sum() == result.dropped.sum()
    assert (result.topk_weights[result.topk_idx == -1] == 0).all()
    kept = result.topk_idx >= 0
    assert torch.equal(result.topk_weights[kept], chosen.topk_weights[kept])
    result.topk_weights.sum().backward()
    assert torch.isfinite(gate.weight.grad).all()


@pytest.mark.parametrize("options", [{"capacity": 1000}, {"capacity_factor": 64.0}])
def test_a_capacity_above_the_tokens_is_clamped(options):
    gate = SoftmaxGate(8, 4, 2, **options)
    result = gate(torch.randn(5, 8))
    assert result.dropped.sum() == 0 and (result.topk_idx >= 0).all()
    assert capacity_of(5, 2, 4, options.get("capacity_factor"), options.get("capacity")) == 5


def test_padding_is_removed_before_capacity():
    gate = SoftmaxGate(8, 4, 1, capacity=4, renormalise=False)
    with torch.no_grad():
        gate.weight.zero_()
        gate.weight[2, 0] = 1.0
    x = torch.zeros(12, 8)
    x[:, 0] = torch.arange(12.0) + 1  # all to expert 2; padding has the largest weights
    mask = torch.arange(12) < 6
    result = gate(x, mask=mask)
    assert result.topk_idx.flatten().tolist() == [-1, -1, 2, 2, 2, 2] + [-1] * 6
    assert result.counts.tolist() == [0, 0, 6, 0]
    assert result.dropped.tolist() == [0, 0, 2, 0]
    assert (result.topk_weights[6:] == 0).all()


def test_no_tokens():
    result = SigmoidGate(8, 4, 2, capacity_factor=1.0, balance_loss="switch", z_loss_coef=1.0)(
        torch.zeros(0, 8))
    assert list(result.topk_idx.shape) == [0, 2] and list(result.topk_weights.shape) == [0, 2]
    assert result.counts.tolist() == [0] * 4 and float(result.aux_loss) == 0


def test_batched_tokens_and_mask():
    gate = SoftmaxGate(8, 4, 2)
    x, mask = torch.randn(3, 5, 8), torch.rand(3, 5) < 0.5
    batched, flat = gate(x, mask=mask), gate(x.view(15, 8), mask=mask.view(15))
    assert torch.equal(batched.topk_idx, flat.topk_idx) and batched.topk_idx.shape == (15, 2)


def test_load_counts_training_once():
    gate = SoftmaxGate(8, 4, 2)
    x = torch.randn(10, 8)
    result = gate(x)
    gate(x, replay=result)  # a recomputed layer
    gate.eval()(x)
    assert torch.equal(gate.take_load(), result.counts)
    assert gate.take_load().sum() == 0


def test_a_replay_routes_as_before():
    """Also where the scores tell otherwise by now; drops, counts and the loss stay as they were."""
    options = {"capacity": 3, "balance_loss": "switch", "balance_coef": 1.0}
    gate = SoftmaxGate(8, 4, 2, **options)
    x = torch.randn(10, 8)
    first = gate(x)
    again = gate(x, replay=first)
    assert again.replayed and first.dropped.sum() > 0
    for name in ("topk_idx", "topk_weights", "counts", "dropped", "aux_loss"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    other = gate(x.flip(0), replay=first)
    assert torch.equal(other.topk_idx, first.topk_idx)
    other.topk_weights.sum().backward()
    assert gate.weight.grad is not None


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_topk_from_logits(score):
    logits = torch.randn(20, 6).bfloat16()
    idx, weights = topk_from_logits(logits, 2, score=score)
    values = logits.double().exp() if score == "softmax" else torch.sigmoid(logits.double())
    for token in range(20):
        ids = choose(logits[token].tolist(), 2)
        assert idx[token].tolist() == ids
        total = sum(float(values[token, e]) for e in ids)
        assert weights[token].tolist() == pytest.approx(
            [float(values[token, e]) / total for e in ids], rel=1e-5)


@pytest.mark.parametrize("options, words", [
    ({"num_topk": 9}, "num_topk = 9"), ({"num_groups": 3}, "divisor of num_experts = 8"),
    ({"num_groups": 4, "topk_groups": 5}, "topk_groups = 5"),
    ({"num_groups": 4, "topk_groups": 1, "num_topk": 3}, "experts of the chosen groups"),
    ({"group_score": "sum"}, "'top2_sum', 'max'"), ({"balance_loss": "even"}, "'variance'"),
    ({"num_groups": 8, "topk_groups": 8}, "groups of one expert"),
    ({"capacity": 0}, "at least 1"), ({"capacity_factor": 0.0}, "above 0"),
    ({"capacity": 1, "capacity_factor": 1.0}, "one of them")])
def test_refusals(options, words):
    arguments = {"num_topk": 2, **options}
    with pytest.raises(ValueError, match=words):
        SigmoidGate(8, 8, **arguments)


def test_refused_inputs():
    gate = SoftmaxGate(8, 4, 2)
    with pytest.raises(ValueError, match=r"allowed: \[..., 8\]"):
        gate(torch.zeros(3, 7))
    with pytest.raises(ValueError, match="mask.bool"):
        gate(torch.zeros(3, 8), mask=torch.ones(3))
    with pytest.raises(ValueError, match=r"\[3, 2\]"):
        gate(torch.zeros(3, 8), replay=gate(torch.zeros(2, 8)))


@pytest.mark.parametrize("make", [SoftmaxGate, SigmoidGate])
def test_a_token_that_is_not_finite_gets_no_expert(make):
    gate = make(8, 6, 2, balance_loss="switch", z_loss_coef=0.1, capacity_factor=1.0)
    x = torch.randn(7, 8)
    bad = torch.tensor([False, True, False, True, True, False, False])
    spoilt = x.clone()
    spoilt[1, 3], spoilt[3, 0], spoilt[4] = float("nan"), float("inf"), 3e38  # the last overflows
    padding = torch.tensor([True, True, True, True, True, True, False])
    spoilt[6] = float("nan")

    def run(x, mask):
        gate.weight.grad = None
        x = x.clone().requires_grad_()
        result = gate(x, mask=mask)
        (result.topk_weights.square().sum() + result.aux_loss).backward()
        return result, gate.weight.grad, x.grad
    result, grad, grad_x = run(spoilt, padding)
    assert torch.equal(result.not_finite, bad)
    assert (result.topk_idx[bad] == -1).all() and (result.topk_weights[bad] == 0).all()
    wanted, wanted_grad, wanted_grad_x = run(x, padding & ~bad)
    assert wanted.not_finite is None and torch.equal(result.topk_idx, wanted.topk_idx)
    assert torch.equal(result.topk_weights, wanted.topk_weights)
    assert torch.equal(result.counts, wanted.counts)
    assert torch.allclose(result.aux_loss, wanted.aux_loss)
    assert torch.allclose(grad, wanted_grad) and torch.allclose(grad_x, wanted_grad_x)


def test_the_router_uses_no_tf32(monkeypatch):
    matmul, seen = torch.backends.cuda.matmul, []
    monkeypatch.setattr(matmul, "allow_tf32", True)
    real = torch.Tensor.__matmul__

    def product(left, right):
        seen.append(matmul.allow_tf32)
        return real(left, right)
    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    precision._RowLinear.apply(torch.empty(3, 4, device="meta"), torch.empty(2, 4, device="meta"))
    assert seen == [False] and matmul.allow_tf32 is True
