"""Losses against their formulas in plain numbers, and the bias update against a loop."""

import pytest
import torch

from ferry.torch import (SigmoidGate, SoftmaxGate, count_variance, expert_counts, switch_loss,
                         update_selection_bias, variance_loss, z_loss)


def routed(num_tokens=30, num_experts=6, k=2):
    logits = torch.randn(num_tokens, num_experts, requires_grad=True)
    shares = torch.softmax(logits, -1)
    idx = shares.topk(k).indices
    return logits, shares, idx


def test_expert_counts_leave_out_empty_slots():
    idx = torch.tensor([[0, 3], [-1, 3], [-1, -1]], dtype=torch.int32)
    assert expert_counts(idx, 5).tolist() == [1, 0, 0, 2, 0]


def test_count_variance():
    counts = [4, 0, 7, 1]
    mean = sum(counts) / 4
    wanted = sum((c - mean) ** 2 for c in counts) / 4 / mean
    assert float(count_variance(torch.tensor(counts))) == pytest.approx(wanted, rel=1e-6)
    assert float(count_variance(torch.tensor([3, 3, 3]))) == 0
    assert float(count_variance(torch.zeros(3))) == 0


def test_variance_loss_is_that_of_the_counts_and_lowers_them():
    logits, shares, idx = routed()
    counts = expert_counts(idx, 6)
    loss = variance_loss(counts, shares)
    assert float(loss) == pytest.approx(float(count_variance(counts)), rel=1e-5)
    loss.backward()
    # d/dc of var/mean is positive where c is above the mean, so a full expert's logit goes down.
    mean_grad, above = logits.grad.sum(0), counts.float() - counts.float().mean()
    assert mean_grad[above.argmax()] > 0 and mean_grad[above.argmin()] < 0


@pytest.mark.parametrize("k", [1, 2])
def test_switch_loss(k):
    logits, shares, idx = routed(k=k)
    loss = switch_loss(expert_counts(idx, 6), shares)
    wanted = 0.0
    for expert in range(6):
        fraction = sum(row.count(expert) for row in idx.tolist()) / (30 * k)
        wanted += fraction * sum(row[expert] for row in shares.tolist()) / 30
    assert float(loss) == pytest.approx(6 * wanted, rel=1e-5)
    loss.backward()
    assert logits.grad.abs().sum() > 0


def test_switch_loss_is_one_when_even_and_e_when_collapsed():
    even = torch.full((8, 4), 0.25)
    assert float(switch_loss(torch.tensor([2, 2, 2, 2]), even)) == pytest.approx(1)
    one = torch.eye(4)[torch.zeros(8, dtype=torch.long)]
    assert float(switch_loss(torch.tensor([8, 0, 0, 0]), one)) == pytest.approx(4)


def test_z_loss():
    logits = torch.randn(7, 5, requires_grad=True)
    wanted = sum(float(torch.tensor(row).double().exp().sum().log()) ** 2
                 for row in logits.tolist()) / 7
    assert float(z_loss(logits)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", ["switch", "variance"])
@pytest.mark.parametrize("gate_type", [SoftmaxGate, SigmoidGate])
def test_aux_loss_of_a_gate_leaves_padding_out(kind, gate_type):
    gate = gate_type(8, 6, 2, balance_loss=kind, balance_coef=0.5, z_loss_coef=0.25)
    x = torch.randn(20, 8)
    mask = torch.arange(20) < 11
    padded, real = gate(x, mask=mask), gate(x[:11])
    assert float(padded.aux_loss) == pytest.approx(float(real.aux_loss), rel=1e-5)
    logits = x[:11] @ gate.weight.t()
    shares = torch.softmax(logits, -1)
    if gate_type is SigmoidGate:
        shares = torch.sigmoid(logits)
        shares = shares / shares.sum(-1, keepdim=True)
    balance = switch_loss if kind == "switch" else variance_loss
    wanted = 0.5 * balance(real.counts, shares) + 0.25 * z_loss(logits)
    assert float(real.aux_loss) == pytest.approx(float(wanted), rel=1e-4)
    real.aux_loss.backward()
    assert gate.weight.grad.abs().sum() > 0


def test_bias_moves_by_the_sign_of_mean_minus_load():
    gate = SigmoidGate(8, 4, 2)
    x = torch.randn(50, 8)
    load = gate(x).counts.tolist()
    mean = sum(load) / 4
    update_selection_bias(gate, rate=0.01)
    wanted = [0.01 * ((mean > c) - (mean < c)) for c in load]
    assert gate.selection_bias.tolist() == pytest.approx(wanted)
    update_selection_bias(gate, rate=0.01)  # nothing routed since: nothing moves
    assert gate.selection_bias.tolist() == pytest.approx(wanted)


def test_bias_uses_the_loads_of_all_ranks():
    model = torch.nn.ModuleList([SigmoidGate(8, 4, 1), SoftmaxGate(8, 4, 1), SigmoidGate(8, 4, 1)])
    for gate in model:
        gate(torch.randn(40, 8))
    mine = torch.cat([model[0].load, model[2].load])
    others = torch.tensor([90, 0, 0, 0, 0, 0, 90, 0])
    calls = []

    def all_reduce(loads):
        calls.append(loads.clone())
        loads += others
    update_selection_bias(model, 0.5, all_reduce)
    assert len(calls) == 1 and torch.equal(calls[0], mine)
    total = (mine + others).view(2, 4).double()
    wanted = 0.5 * torch.sign(total.mean(1, keepdim=True) - total)
    assert torch.equal(model[0].selection_bias, wanted[0].float())
    assert torch.equal(model[2].selection_bias, wanted[1].float())


def test_bias_balances_a_lopsided_router():
    gate = SigmoidGate(8, 8, 2)
    x = torch.randn(400, 8) + 1
    first = count_variance(gate.eval()(x).counts)
    gate.train()
    for _ in range(300):
        gate(x)
        update_selection_bias(gate, rate=0.005)
    assert count_variance(gate(x).counts) < 0.05 * first
