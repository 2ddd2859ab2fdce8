"""The layer against one model over all tokens in float64, and its bits and gradients over every split
of the ranks, strategy and number of chunks."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import ferry
from ferry.torch import (GateOutput, MoELayer, SigmoidGate, SoftmaxGate, clip_grad_norm_,
                         record_routing, reduce_gradients, split_world, topk_from_logits)
from moe_oracle import close, expert, moe, same

HIDDEN, INNER, EXPERTS, K, TOKENS = 16, 12, 8, 2, 24
WORLD = 4


def batch(begin, end, dtype=torch.float32, seed=7):
    """Tokens begin..end of one fixed batch, and the gradient of their outputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    grad = torch.randn(TOKENS, HIDDEN, generator=generator)
    return x[begin:end].to(dtype).clone(), grad[begin:end].to(dtype)


def share(rank, ranks):
    """This rank's tokens: uneven, one rank has none where there are four."""
    cuts = {1: [0, 24], 2: [0, 9, 24], 4: [0, 9, 9, 13, 24]}[ranks]
    return cuts[rank], cuts[rank + 1]


def gradients(layer):
    """By name; experts by their global id."""
    result = {}
    for name, parameter in layer.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name.startswith("experts."):
            for place, chosen in enumerate(layer.local_experts):
                result[f"{name}.{chosen}"] = grad[place].clone()
        else:
            result[name] = grad.clone()
    return result


def step(group, parts=None, make=MoELayer, **options):
    """One forward and backward of a rank: output, gradient of x, gradients, rounds."""
    layer = make(HIDDEN, INNER, EXPERTS, K, group=group, seed=3, **options)
    begin, end = parts or share(group.rank, group.size)
    x, grad = batch(begin, end, options.get("dtype") or torch.float32)
    x.requires_grad_()
    out = layer(x)
    out.backward(grad)
    return out.detach(), x.grad, gradients(layer), layer.dispatcher.metadata_rounds


def over_ranks(results):
    """Outputs and gradients of x of all tokens; gradients summed over ranks."""
    total = {}
    for _, _, grads, _ in results:
        for name, grad in grads.items():
            total[name] = total[name] + grad if name in total else grad.clone()
    return torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results]), total


def reference(gate="softmax", num_shared_experts=0):
    """The layer in float64 over all tokens, from the same first weights."""
    def make(group):
        return MoELayer(HIDDEN, INNER, EXPERTS, K, num_shared_experts, group=group, seed=3, gate=gate)
    layer = ferry.run(make)[0]
    exact = {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
    x, grad = batch(0, TOKENS)
    x = x.double().requires_grad_()
    logits = x @ exact["gate.weight"].t()
    idx = logits.detach().argsort(dim=1, descending=True)[:, :K]
    scores = torch.softmax(logits, 1) if gate == "softmax" else torch.sigmoid(logits)
    weights = scores.gather(1, idx)
    out = moe(x, idx, weights / weights.sum(1, keepdim=True), exact["experts.w1"],
              exact["experts.w3"], exact["experts.w2"])
    if num_shared_experts:
        out = out + torch.stack([expert(row, *(exact[f"shared_experts.{n}"]
                                               for n in ("w1", "w3", "w2"))) for row in x])
    out.backward(grad.double())
    grads = {}
    for name, value in exact.items():
        if name.startswith("experts."):
            grads.update({f"{name}.{chosen}": value.grad[chosen] for chosen in range(EXPERTS)})
        else:
            grads[name] = value.grad
    return out.detach(), x.grad, grads


@pytest.mark.parametrize("nodes, options", [
    (1, {}), (2, {}), (2, {"overlap": 3}), (1, {"overlap": 8}), (2, {"weights": "at_expert"}),
    (2, {"weights": "at_expert", "overlap": 2}), (1, {"num_shared_experts": 2}),
    (2, {"num_shared_experts": 1, "overlap": 2}), (1, {"gate": "sigmoid"}),
    (2, {"row_alignment": 4, "overlap": 2}), (2, {"strategy": "node_gather"})])
def test_forward_and_gradients(nodes, options):
    results = ferry.run(step, nodes=nodes, ranks_per_node=WORLD // nodes, kwargs=options)
    out, grad_x, grads = over_ranks(results)
    wanted = reference(options.get("gate", "softmax"), options.get("num_shared_experts", 0))
    assert close(out, wanted[0], 1e-5) and close(grad_x, wanted[1], 1e-5)
    assert set(grads) == set(wanted[2])
    for name, grad in grads.items():
        assert close(grad, wanted[2][name], 1e-5), name
    assert [r[3] for r in results] == [options.get("overlap", 1)] * WORLD


@pytest.mark.parametrize("shared, overlap", [(0, 1), (1, 1), (1, 4)])
def test_ep_1_2_4_give_the_same_bits(shared, overlap):
    """The same tokens on 1, 2 or 4 ranks of a node. An expert sees the same rows unless chunks cut them
    elsewhere; shared experts see other numbers of tokens."""
    runs = [over_ranks(ferry.run(step, ranks_per_node=ranks, kwargs={
        "num_shared_experts": shared, "overlap": overlap})) for ranks in (1, 2, 4)]
    for out, grad_x, grads in runs[1:]:
        assert torch.equal(out, runs[0][0]) if (shared, overlap) == (0, 1) else same(out, runs[0][0])
        assert close(grad_x, runs[0][1].double(), 1e-6)
        for name, grad in grads.items():
            assert close(grad, runs[0][2][name].double(), 1e-6), name


@pytest.mark.parametrize("weights", ["at_combine", "at_expert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strategies_give_the_same_bits_over_f32_wires(weights, dtype):
    runs = [over_ranks(ferry.run(step, nodes=2, ranks_per_node=2, kwargs={
        "strategy": strategy, "wire_dispatch": "f32", "wire_combine": "f32", "weights": weights,
        "dtype": dtype, "overlap": 2}))
        for strategy in ("flat", "rank_dedup", "node_gather", "node_dedup")]
    for out, grad_x, grads in runs[1:]:
        assert torch.equal(out, runs[0][0]) and torch.equal(grad_x, runs[0][1])
        for name, grad in grads.items():
            assert torch.equal(grad, runs[0][2][name]), name


@pytest.mark.parametrize("options", [{}, {"overlap": 3}, {"weights": "at_expert"},
                                     {"strategy": "flat", "num_shared_experts": 1}], ids=str)
def test_rows_that_leave_with_their_metadata(options):
    """plan_and_dispatch changes nothing but the time: outputs, gradients, rounds."""
    def both(group):
        apart = step(group, wire_combine="f32", **options)
        together = step(group, wire_combine="f32", plan_and_dispatch=True, **options)
        for one, other in zip(apart[:2], together[:2]):
            assert torch.equal(other, one)
        assert apart[2].keys() == together[2].keys()
        for name in apart[2]:
            assert torch.equal(together[2][name], apart[2][name])
        return apart[3], together[3]

    chunks = options.get("overlap", 1)
    assert ferry.run(both, 2, 2) == [(chunks, chunks)] * WORLD


def split_step(world, ep, steps, **options):
    """Trains on the world's tokens, split into EP x DP; returns output, norms and weights."""
    split = split_world(world, ep)
    layers = nn.ModuleList([MoELayer(HIDDEN, INNER, EXPERTS, K, 1, group=split.expert_parallel,
                                     **options) for _ in range(2)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5, momentum=0.9)
    outputs, norms = [], []
    for number in range(steps):
        begin = 6 * world.rank  # as many tokens on each rank: a mean of means
        x, target = batch(begin, begin + 6, seed=number)
        h = x + layers[0](x)
        out = h + layers[1](h)
        outputs.append(out.detach())
        optimizer.zero_grad()
        (out - target).square().mean().backward()
        reduce_gradients(layers, world, split.expert_data_parallel)
        norms.append(float(clip_grad_norm_(layers, 0.2, world, split.expert_data_parallel)))
        optimizer.step()
    weights = {}
    for place, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if name.startswith("experts."):
                for local, chosen in enumerate(layer.local_experts):
                    weights[f"{place}.{name}.{chosen}"] = parameter[local].detach().clone()
            else:
                weights[f"{place}.{name}"] = parameter.detach().clone()
    return outputs, norms, weights


def test_ep_x_dp_train_alike():
    """EP4, EP2 x DP2, EP1 x DP4: same first output, same clipped norms, same weights after 20 steps."""
    runs = {ep: ferry.run(split_step, ranks_per_node=WORLD, args=(ep, 20)) for ep in (1, 2, 4)}
    first = {ep: torch.cat([outputs[0] for outputs, _, _ in results])
             for ep, results in runs.items()}
    base_norms, base = runs[1][0][1], runs[1][0][2]
    assert max(base_norms) > 0.2  # clipping did something
    for ep, results in runs.items():
        assert same(first[ep], first[1])
        for _, norms, weights in results:
            assert norms == results[0][1]  # every rank clips alike
            assert norms == pytest.approx(base_norms, rel=1e-5)
            for name, weight in weights.items():
                assert close(weight, base[name].double(), 1e-5), (ep, name)
    assert sum(len([n for n in w if ".experts.w1." in n]) for _, _, w in runs[4]) == 2 * EXPERTS


def test_half_precision_models():
    for dtype in (torch.bfloat16, torch.float16):
        results = ferry.run(step, nodes=2, ranks_per_node=2, kwargs={"dtype": dtype})
        out, grad_x, grads = over_ranks(results)
        assert out.dtype == dtype and torch.isfinite(out).all() and torch.isfinite(grad_x).all()
        exact = ferry.run(step, ranks_per_node=1)[0][0]
        assert close(out, exact.double(), 3e-2)
        assert all(grad.dtype == (torch.float32 if name == "gate.weight" else dtype)
                   for name, grad in grads.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_with_fp32_parameters(dtype):
    """What is exchanged is rounded, parameters and their gradients are not."""
    options = {"dtype": dtype, "params_dtype": torch.float32, "num_shared_experts": 1}
    out, _, grads = over_ranks(ferry.run(step, nodes=2, ranks_per_node=2, kwargs=options))
    wide, _, exact = over_ranks(ferry.run(step, ranks_per_node=1, kwargs={"num_shared_experts": 1}))
    assert out.dtype == dtype and close(out, wide.double(), 2e-2)
    for name, grad in grads.items():
        assert grad.dtype == torch.float32 and close(grad, exact[name].double(), 3e-2), name
    assert any(not torch.equal(grad, grad.to(dtype).float()) for grad in grads.values())
    with pytest.raises(ValueError, match="made for torch.float32; allowed: the same"):
        ferry.run(lambda group: MoELayer(HIDDEN, INNER, EXPERTS, K, group=group,
                                         **options).double()(batch(0, 3, dtype)[0]))
    with pytest.raises(ValueError, match="params_dtype = torch.bfloat16; allowed: torch.float32"):
        ferry.run(lambda group: MoELayer(HIDDEN, INNER, EXPERTS, K, group=group,
                                         params_dtype=torch.bfloat16))


def test_a_bf16_layer_in_an_fp32_model():
    def rank_work(group):
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, dtype=torch.bfloat16)
        x = batch(0, 5)[0].requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x.view(1, 5, HIDDEN))
        assert out.dtype == torch.float32 and out.shape == (1, 5, HIDDEN)
        out.sum().backward()
        assert x.grad.dtype == torch.float32 and x.grad.abs().sum() > 0
    ferry.run(rank_work, ranks_per_node=2)


def test_no_tokens_anywhere_and_evaluation():
    def rank_work(group):
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, 1, group=group, overlap=2)
        x = torch.zeros(0, HIDDEN, requires_grad=True)
        layer(x).sum().backward()
        assert layer.experts.w1.grad.abs().sum() == 0
        with torch.no_grad():
            first, again = layer.eval()(batch(0, 9)[0]), layer(batch(0, 9)[0])
        assert torch.equal(first, again) and not first.requires_grad
    ferry.run(rank_work, ranks_per_node=2)


def test_a_graph_without_backward_goes_with_its_output():
    def rank_work(group):
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, 1, group=group, overlap=2)
        held = []
        gc.disable()
        layer.experts.register_forward_hook(
            lambda module, inputs, output: held.append(weakref.ref(output.grad_fn)))
        out = layer(batch(0, 9)[0].requires_grad_())
        assert held[0]() is not None
        del out  # no cycle holds it: window memory cannot wait for the collector
        assert [ref for ref in held if ref() is not None] == []
        before = group.pool_bytes()
        for _ in range(5):
            layer(batch(0, 9)[0].requires_grad_()).sum().backward()
        assert group.pool_bytes() <= 3 * before
    try:
        ferry.run(rank_work, ranks_per_node=2)
    finally:
        gc.enable()


def test_padding_goes_to_no_expert():
    def rank_work(group):
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, overlap=2)
        x = batch(0, 12)[0]
        mask = torch.rand(12, generator=torch.Generator().manual_seed(group.rank)) < 0.6
        out = layer(x.view(2, 6, HIDDEN), mask=mask.view(2, 6)).view(12, HIDDEN)
        assert (out[~mask] == 0).all() and (out[mask].abs().sum(1) > 0).all()
        assert layer.statistics.counts.sum() == K * mask.sum()
        assert same(out[mask].detach(), layer(x)[mask].detach())
    ferry.run(rank_work, ranks_per_node=2)


@pytest.mark.parametrize("overlap", [1, 3])
def test_the_auxiliary_loss_is_in_backward(overlap):
    def rank_work(group):
        gate = SoftmaxGate(HIDDEN, EXPERTS, K, balance_loss="switch", balance_coef=0.3,
                           z_loss_coef=0.2)
        gate.reset_parameters(5)
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, gate=gate, overlap=overlap)
        layer.aux_loss_scale = 4.0
        x = batch(0, 9)[0]
        layer(x).mul(0).sum().backward()
        explicit = copy.deepcopy(gate)
        explicit.weight.grad = None
        parts = [x[b:e] for b, e in zip(range(0, 9, 9 // overlap), range(9 // overlap, 10, 9 // overlap))]
        loss = sum(explicit(part).aux_loss * len(part) / 9 for part in parts)
        (4 * loss).backward()
        assert torch.allclose(gate.weight.grad, explicit.weight.grad, rtol=1e-5, atol=1e-8)
        assert float(layer.statistics.aux_loss) == pytest.approx(float(loss), rel=1e-6)
    ferry.run(rank_work, ranks_per_node=2)


class PlainGate(nn.Module):
    """A gate of one's own that knows nothing of masks or replays."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(HIDDEN, EXPERTS)
        nn.init.constant_(self.proj.bias, 0)
        with torch.no_grad():
            self.proj.weight.copy_(torch.randn(EXPERTS, HIDDEN,
                                               generator=torch.Generator().manual_seed(1)))

    def forward(self, x):
        return GateOutput(*topk_from_logits(self.proj(x), K))


class DoublingExperts(nn.Module):
    """Expert e multiplies by (e + 2) * scale."""

    def __init__(self, local):
        super().__init__()
        self.factors = nn.Parameter(torch.tensor([float(e + 2) for e in local]))

    def forward(self, rows, expert_counts):
        counts = torch.as_tensor(list(expert_counts))
        return rows * self.factors.repeat_interleave(counts).unsqueeze(1)


@pytest.mark.parametrize("weights", ["at_combine", "at_expert"])
def test_a_gate_and_experts_of_ones_own(weights):
    def rank_work(group):
        local = [e for e in range(EXPERTS) if e % group.size == group.rank]
        placement = ferry.Placement.from_map([e % group.size for e in range(EXPERTS)])
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, gate=PlainGate(), weights=weights,
                         placement=placement, experts=DoublingExperts(local))
        assert layer.local_experts == tuple(local)
        x = batch(group.rank * 5, group.rank * 5 + 5)[0].requires_grad_()
        mask = torch.tensor([True, True, False, True, True])
        out = layer(x, mask=mask)
        idx, w = topk_from_logits(layer.gate.proj(x), K)
        wanted = x * (w * (idx + 2)).sum(1, keepdim=True) * mask.unsqueeze(1)
        assert torch.allclose(out, wanted, rtol=1e-5)
        out.sum().backward()
        return [(e, float(g)) for e, g in zip(local, layer.experts.factors.grad)], (
            idx[mask], w[mask].detach(), x[mask].detach())
    results = ferry.run(rank_work, nodes=2, ranks_per_node=2)
    for grads, _ in results:
        for chosen, grad in grads:
            wanted = sum(float((w * (idx == chosen)).sum(1) @ x.sum(1)) for _, (idx, w, x) in results)
            assert grad == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_several_groups_in_a_process():
    def rank_work(world):
        pairs = world.subgroup([0, 1] if world.rank < 2 else [2, 3])
        results = []
        whole = MoELayer(HIDDEN, INNER, EXPERTS, K, group=world, seed=3)
        halves = MoELayer(HIDDEN, INNER, EXPERTS, K, group=pairs, seed=3)
        x = batch(world.rank * 6, world.rank * 6 + 6)[0]
        for layer in (whole, halves, whole):
            h = x.clone().requires_grad_()
            out = layer(h)
            out.sum().backward()
            results.append((out.detach(), h.grad))
        return all(same(b, a) for r in results[1:] for a, b in zip(results[0], r))
    assert all(ferry.run(rank_work, ranks_per_node=WORLD))


def test_a_copy_exchanges_over_the_same_group():
    def rank_work(group):
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group)
        other = copy.deepcopy(layer)
        assert other.experts.w1 is not layer.experts.w1
        x = batch(0, 5)[0]
        assert torch.equal(layer(x), other(x))
        assert other.dispatcher.metadata_rounds == 2
    ferry.run(rank_work, ranks_per_node=2)


def test_layers_start_differently_and_alike_on_every_split():
    def rank_work(group):
        layers = [MoELayer(HIDDEN, INNER, EXPERTS, K, group=group) for _ in range(2)]
        return [layer.gate.weight.detach() for layer in layers]
    split = ferry.run(rank_work, ranks_per_node=2)
    whole = ferry.run(rank_work)
    assert not torch.equal(whole[0][0], whole[0][1])
    for rank in split:
        assert torch.equal(rank[0], whole[0][0]) and torch.equal(rank[1], whole[0][1])


def test_recorded_routing_of_a_pipelined_layer(tmp_path):
    def rank_work(group):
        model = nn.Sequential(MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, overlap=3))
        with record_routing(model, output=tmp_path / str(group.rank)):
            model(batch(0, 10)[0])
        recorder = record_routing(model)
        with recorder as seen:
            model(batch(0, 10)[0])
        idx, weights = seen.arrays()
        wanted = model[0].gate(batch(0, 10)[0])
        assert (idx[:, 0] == wanted.topk_idx.numpy()).all()
        assert (weights[:, 0] == wanted.topk_weights.detach().numpy()).all()
    ferry.run(rank_work, ranks_per_node=2)


def test_refusals():
    def rank_work(group):
        def make(**options):
            return MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, **options)
        for options, words in [({"overlap": 9}, "overlap = 9; allowed: 1..8"),
                               ({"overlap": 0}, "1..8"), ({"weights": "none"}, "'at_expert'"),
                               ({"gate": "top"}, "'sigmoid', a module"),
                               ({"dtype": torch.float64}, "torch.float64")]:
            with pytest.raises(ValueError, match=words):
                make(**options)
        layer = make()
        with pytest.raises(ValueError, match=r"\[..., 16\]"):
            layer(torch.zeros(3, 15))
        with pytest.raises(ValueError, match="with 3 values"):
            layer(torch.zeros(3, HIDDEN), mask=torch.ones(2, dtype=torch.bool))
        with pytest.raises(ValueError, match="return that"):
            make(gate=nn.Linear(HIDDEN, EXPERTS))(torch.zeros(3, HIDDEN))
        with pytest.raises(ValueError, match="a divisor of 1"):
            split_world(group, 2)
    ferry.run(rank_work)


def test_sigmoid_gate_with_groups_and_capacity():
    def rank_work(group):
        gate = SigmoidGate(HIDDEN, EXPERTS, K, num_groups=4, topk_groups=2, capacity_factor=0.75)
        gate.reset_parameters(2)
        layer = MoELayer(HIDDEN, INNER, EXPERTS, K, group=group, gate=gate)
        x = batch(0, 20)[0].requires_grad_()
        out = layer(x)
        out.sum().backward()
        dropped = layer.statistics.dropped.sum()
        assert dropped > 0 and layer.statistics.counts.sum() == 20 * K
        assert torch.isfinite(out).all() and torch.isfinite(gate.weight.grad).all()
    ferry.run(rank_work, ranks_per_node=2)
