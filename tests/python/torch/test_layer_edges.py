"""What a layer does with tokens that are not finite, casts, micro-batches, writes in place, and with
the answers of gates and experts of one's own."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ferry
from ferry.torch import (GateOutput, MoELayer, SoftmaxGate, set_aux_loss_scale,
                         topk_from_logits)
from test_layer import EXPERTS, HIDDEN, INNER, K, PlainGate, batch


class ScaledGate(PlainGate):
    """Answers with other objects than a GateOutput."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return self.kind(*topk_from_logits(self.proj(x), K))


@dataclass
class LabelledOutput(GateOutput):
    label: str = "mine"


def only_the_choice(idx, weights):
    return SimpleNamespace(topk_idx=idx, topk_weights=weights)


@pytest.mark.parametrize("gate, overlap", [("softmax", 1), ("sigmoid", 3), ("own", 2)])
def test_a_token_that_is_not_finite_spoils_only_its_own_row(gate, overlap):
    def rank_work(group, spoil):
        made = PlainGate() if gate == "own" else gate
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, gate=made, seed=3, overlap=overlap)
        x = batch(12 * group.rank, 12 * group.rank + 12)[0]
        bad = torch.zeros(12, dtype=torch.bool)
        if group.rank == 1:
            bad[2] = bad[7] = True
        if spoil:
            x[2 if group.rank == 1 else slice(0, 0), 4] = float("nan")
            x[7 if group.rank == 1 else slice(0, 0)] = float("inf")
        x.requires_grad_()
        out = layer(x, mask=None if spoil else ~bad)
        weight = layer.experts.w1
        out.square().mean().backward()
        return bad, out.detach(), x.grad, weight.grad, layer.statistics.counts
    runs = [ferry.run(rank_work, ranks_per_node=2, args=(spoil,)) for spoil in (True, False)]
    for (bad, out, grad, experts, counts), (_, *wanted) in zip(*runs):
        assert torch.isnan(out[bad]).all() and torch.isnan(grad[bad]).all()
        assert torch.equal(out[~bad], wanted[0][~bad])
        assert torch.allclose(grad[~bad], wanted[1][~bad], rtol=1e-5, atol=1e-8)
        assert torch.allclose(experts, wanted[2], rtol=1e-5, atol=1e-8)
        assert torch.equal(counts, wanted[3])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_token_that_is_not_finite_in_a_checkpoint(reentrant):
    def rank_work(group):
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, seed=3)
        x = batch(0, 6)[0]
        x[group.rank] = float("nan")
        x.requires_grad_()
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        assert torch.isnan(x.grad).all(1).tolist() == [t == group.rank for t in range(6)]
        assert layer.dispatcher.metadata_rounds == 1
    ferry.run(rank_work, ranks_per_node=2)


def test_chunks_count_by_their_real_tokens():
    """The same real tokens at the end of chunks or together: one mean, whatever the padding."""
    def rank_work(group):
        gate = SoftmaxGate(HIDDEN, EXPERTS, K, z_loss_coef=0.5)
        gate.reset_parameters(5)
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, gate=gate, overlap=2)
        x, mask = batch(0, 8)[0], torch.tensor([True] + [False] * 3 + [True] * 4)
        layer(x, mask=mask).mul(0).sum().backward()
        grad, gate.weight.grad = gate.weight.grad, None
        loss = gate(x, mask=mask).aux_loss
        loss.backward()
        assert torch.allclose(grad, gate.weight.grad, rtol=1e-5, atol=1e-8)
        assert float(layer.statistics.aux_loss) == pytest.approx(float(loss), rel=1e-6)
    ferry.run(rank_work, ranks_per_node=2)


def test_micro_batches_scale_the_auxiliary_loss():
    def rank_work(group):
        gate = SoftmaxGate(HIDDEN, EXPERTS, K, z_loss_coef=0.5)  # a mean over tokens
        gate.reset_parameters(5)
        model = nn.Sequential(MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, gate=gate))
        x, grads = batch(0, 12)[0], []
        for parts in (1, 4):
            set_aux_loss_scale(model, 1 / parts)
            gate.weight.grad = None
            for part in x.chunk(parts):
                (model(part).square().mean() / parts).backward()
            grads.append(gate.weight.grad)
        assert torch.allclose(*grads, rtol=1e-4, atol=1e-7)
    ferry.run(rank_work, ranks_per_node=2)


@pytest.mark.parametrize("balance_loss", [None, "switch"])
def test_the_output_may_be_changed_in_place(balance_loss):
    def rank_work(group):
        gate = SoftmaxGate(HIDDEN, EXPERTS, K, balance_loss=balance_loss)
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, 1, group=group, gate=gate)
        results = []
        for add in (torch.Tensor.add, torch.Tensor.add_):
            x = batch(0, 6)[0].requires_grad_()
            layer.zero_grad()
            out = add(layer(x.view(2, 3, HIDDEN)), x.view(2, 3, HIDDEN))
            out.square().sum().backward()
            results.append((out.detach(), x.grad, gate.weight.grad.clone()))
        assert all(torch.equal(a, b) for a, b in zip(*results))
    ferry.run(rank_work, ranks_per_node=2)


def test_a_model_that_was_cast_is_refused():
    def rank_work(group):
        for cast, options in [("bfloat16", {}), ("half", {}), ("double", {}),
                              ("half", {"dtype": torch.bfloat16})]:
            layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, **options)
            getattr(layer, cast)()
            with pytest.raises(ValueError, match="instead of casting .* gate stays in FP32"):
                layer(batch(0, 3)[0])
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, 1, group=group, dtype=torch.bfloat16)
        before = layer.gate.weight.detach().clone()
        layer.gate.weight.grad = torch.ones(EXPERTS, HIDDEN)
        nn.Sequential(layer).bfloat16()[0](batch(0, 3)[0].bfloat16())
        assert torch.equal(layer.gate.weight, before)
        assert layer.gate.weight.grad.dtype == torch.float32
    ferry.run(rank_work)


@pytest.mark.parametrize("kind", [LabelledOutput, only_the_choice])
@pytest.mark.parametrize("reentrant", [True, False])
def test_other_outputs_of_gates_and_experts_under_autocast(kind, reentrant):
    class LinearExperts(nn.Linear):
        def forward(self, rows, expert_counts):
            return super().forward(rows)  # bf16 under autocast

    def rank_work(group):
        experts = LinearExperts(HIDDEN, HIDDEN)
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, gate=ScaledGate(kind),
                         experts=experts)
        x = batch(0, 6)[0].requires_grad_()
        mask = torch.tensor([True] * 5 + [False])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = checkpoint(layer, x, mask, use_reentrant=reentrant)
        assert out.dtype == torch.float32 and (out[5] == 0).all()
        out.sum().backward()
        assert torch.isfinite(x.grad).all() and experts.weight.grad.abs().sum() > 0
    ferry.run(rank_work, ranks_per_node=2)
