"""Activation checkpoints: one plan per step, the same routing when computed again, gradients as without,
for both kinds of PyTorch's checkpoint and with several micro-batches in flight."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ferry
from ferry.torch import MoELayer, SigmoidGate, SoftmaxGate, checkpoints

HIDDEN, INNER, EXPERTS, K = 16, 12, 8, 2
BOTH = pytest.mark.parametrize("use_reentrant", [True, False])


def tokens(rank, number=0, count=None):
    count = (3 * rank + 5) if count is None else count
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 * rank + number))


class Block(nn.Module):
    """Two layers with dense work around them; as one region or not."""

    def __init__(self, group, use_reentrant=None, **options):
        super().__init__()
        self.first = MoELayer(HIDDEN, INNER, EXPERTS, K, 1, group=group, seed=1, **options)
        self.second = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, seed=2, **options)
        self.use_reentrant = use_reentrant

    def body(self, x):
        h = torch.tanh(self.first(x)) + x
        return h + self.second(torch.sin(h))

    def forward(self, x):
        if self.use_reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant)

    def rounds(self):
        return [self.first.dispatcher.metadata_rounds, self.second.dispatcher.metadata_rounds]


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def run(work, nodes=2, **options):
    return ferry.run(work, nodes=nodes, ranks_per_node=4 // nodes, kwargs=options)


@BOTH
@pytest.mark.parametrize("options", [{}, {"overlap": 3}, {"weights": "at_expert"}])
def test_one_plan_and_the_same_gradients(use_reentrant, options):
    def work(group):
        plain, saving = Block(group, **options), Block(group, use_reentrant, **options)
        results = []
        for model in (plain, saving):
            x = tokens(group.rank).requires_grad_()
            out = model(x)
            out.square().sum().backward()
            results.append((out.detach(), x.grad, *gradients(model)))
        assert all(torch.equal(a, b) for a, b in zip(*results))
        chunks = options.get("overlap", 1)
        assert plain.rounds() == saving.rounds() == [chunks, chunks]
        assert plain.first.statistics.counts.sum() == saving.first.statistics.counts.sum()
        assert torch.equal(plain.first.gate.take_load(), saving.first.gate.take_load())
    run(work)


@BOTH
@pytest.mark.parametrize("backward", ["in order", "in reverse", "together"])
def test_micro_batches_in_flight(use_reentrant, backward):
    """Some ranks have no tokens in two of them, so that nothing in the tokens tells them apart."""
    def work(group):
        results = []
        for kind in (None, use_reentrant):
            model = Block(group, kind)
            xs = [tokens(group.rank, n, count=0 if group.rank == 1 and n < 2 else None)
                  .requires_grad_() for n in range(3)]
            losses = [model(x).square().sum() for x in xs]
            if backward == "together":
                sum(losses).backward()
            else:
                for loss in losses if backward == "in order" else losses[::-1]:
                    loss.backward()
            results.append([x.grad for x in xs] + gradients(model))
            assert model.rounds() == [3, 3]
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(*results))
    run(work)


class Fickle(SoftmaxGate):
    """All scores tie, and each time it breaks ties another way."""

    calls = 0

    def _choose(self, scores, mask):
        self.calls += 1
        return (super()._choose(scores, mask) + self.calls) % self.num_experts


@BOTH
def test_the_same_routing_where_recomputed_scores_tie(use_reentrant):
    def work(group):
        gate = Fickle(HIDDEN, EXPERTS, K)
        nn.init.zeros_(gate.weight)
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, gate=gate, seed=1)
        seen = []
        gate.register_forward_hook(lambda module, inputs, output: seen.append(output.topk_idx))
        x = tokens(group.rank).requires_grad_()
        checkpoint(layer, x, use_reentrant=use_reentrant).square().sum().backward()
        assert len(seen) == 2 and torch.equal(seen[0], seen[1]) and gate.calls == 1
        assert layer.dispatcher.metadata_rounds == 1
    run(work)


class Ignorant(nn.Module):
    """A gate that cannot replay and does not repeat itself."""

    def __init__(self, gate):
        super().__init__()
        self.inner = gate

    def forward(self, x):
        return self.inner(x)


def test_a_gate_that_changes_its_mind_is_refused():
    def work(group):
        gate = Fickle(HIDDEN, EXPERTS, K)
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, gate=Ignorant(gate), seed=1)
        x = tokens(group.rank, count=4).requires_grad_()
        out = checkpoint(layer, x, use_reentrant=True)
        with pytest.raises(ValueError, match="take replay="):
            out.sum().backward()
    run(work, nodes=1)


@BOTH
def test_capacity_drops_the_same_tokens(use_reentrant):
    def work(group):
        results = []
        for kind in (None, use_reentrant):
            gate = SigmoidGate(HIDDEN, EXPERTS, K, capacity_factor=0.6, balance_loss="switch")
            gate.reset_parameters(4)
            layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, gate=gate, seed=1)
            x = tokens(group.rank, count=12).requires_grad_()
            out = layer(x) if kind is None else checkpoint(layer, x, use_reentrant=kind)
            out.square().sum().backward()
            assert layer.statistics.dropped.sum() > 0 and layer.dispatcher.metadata_rounds == 1
            results.append([out.detach(), x.grad] + gradients(layer))
        assert all(torch.equal(a, b) for a, b in zip(*results))
    run(work)


@pytest.mark.parametrize("kinds", [(True, True), (False, True), (True, False)])
def test_a_checkpoint_in_a_checkpoint(kinds):
    def work(group):
        outer, inner = kinds
        results = []
        for nested in (False, True):
            model = Block(group, inner if nested else None)
            x = tokens(group.rank).requires_grad_()
            out = checkpoint(model, x, use_reentrant=outer) if nested else model(x)
            out.square().sum().backward()
            assert model.rounds() == [1, 1]
            results.append([x.grad] + gradients(model))
        assert all(torch.equal(a, b) for a, b in zip(*results))
    run(work)


@pytest.mark.parametrize("kinds", [(True, True), (False, True), (True, False)])
def test_one_layer_in_two_checkpoints_of_a_checkpoint(kinds):
    def work(group):
        outer, inner = kinds
        results = []
        for nested in (False, True):
            layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, seed=1)

            def once(h):
                return checkpoint(layer, h, use_reentrant=inner) if nested else layer(h)

            def twice(h):
                return once(torch.sin(once(h)) + h)
            x = tokens(group.rank).requires_grad_()
            out = checkpoint(twice, x, use_reentrant=outer) if nested else twice(x)
            out.square().sum().backward()
            assert layer.dispatcher.metadata_rounds == 2
            results.append([x.grad] + gradients(layer))
        assert all(torch.equal(a, b) for a, b in zip(*results))
    run(work)


@BOTH
def test_one_layer_twice_in_a_region(use_reentrant):
    def work(group):
        results = []
        for kind in (None, use_reentrant):
            layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, seed=1)
            x = tokens(group.rank).requires_grad_()

            def twice(h):
                return layer(torch.sin(layer(h)) + h)
            out = twice(x) if kind is None else checkpoint(twice, x, use_reentrant=kind)
            out.square().sum().backward()
            assert layer.dispatcher.metadata_rounds == 2
            results.append([x.grad] + gradients(layer))
        assert all(torch.equal(a, b) for a, b in zip(*results))
    run(work)


@BOTH
def test_notes_go_with_backward_and_without(use_reentrant, monkeypatch):
    """Neither a plan that backward has used nor one of a step that never ran backward is kept."""
    kept = []
    remember = checkpoints.remember

    def watched(layer, entry):
        kept.append(weakref.ref(entry))
        remember(layer, entry)
    monkeypatch.setattr(checkpoints, "remember", watched)

    def work(group):
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, seed=1)
        x = tokens(group.rank).requires_grad_()
        loss = checkpoint(layer, x, use_reentrant=use_reentrant).square().sum()
        gc.collect()
        assert kept[-1]() is not None
        loss.backward()
        gc.collect()
        assert [ref for ref in kept if ref() is not None] == []  # while `loss` still lives
        loss = checkpoint(layer, x, use_reentrant=use_reentrant).square().sum()
        assert kept[-1]() is not None
        del loss
        gc.collect()
        with torch.no_grad():
            layer(x)
        layer(x).sum().backward()
        gc.collect()
        assert [ref for ref in kept if ref() is not None] == [] and len(kept) == 4
    ferry.run(work)


def test_in_backward_is_known():
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(checkpoints.in_backward()))
    y.backward()
    assert seen == [True] and not checkpoints.in_backward()
