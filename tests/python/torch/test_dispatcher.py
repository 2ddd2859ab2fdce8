"""The dispatcher's forward and gradients against one model over all tokens, in float64."""

import gc
import weakref

import pytest
import torch

import ferry
from ferry.torch import Dispatcher, GroupedExperts
from moe_oracle import close, moe

HIDDEN, INNER, EXPERTS, K = 12, 7, 6, 3
TOKENS = [5, 0, 9, 4]


def inputs(rank, dtype=torch.float32, num_tokens=TOKENS):
    """Routing with empty slots and an expert that stands twice in a token."""
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = num_tokens[rank]
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    idx = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :K]
    idx[torch.rand(tokens, K, generator=generator) < 0.15] = -1
    if tokens > 2:
        idx[0] = torch.tensor([2, 5, 2])
        idx[1] = -1
    weights = torch.rand(tokens, K, generator=generator)
    grad = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    return x, idx, weights, grad


def reference(dtype=torch.float32):
    """out and all gradients over all ranks."""
    whole = GroupedExperts(HIDDEN, INNER, range(EXPERTS), dtype=dtype, seed=1)
    w = [getattr(whole, name).detach().double().requires_grad_() for name in ("w1", "w3", "w2")]
    parts, leaves = [], []
    for rank in range(len(TOKENS)):
        x, idx, weights, grad = inputs(rank, dtype)
        x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
        out = moe(x, idx, weights, *w)
        out.backward(grad.double())
        parts.append((out.detach(), x.grad, weights.grad))
        leaves.append(weights)
    return parts, [weight.grad for weight in w]


def run(dtype=torch.float32, nodes=2, freeze=(), **options):
    def rank_work(group):
        placement = ferry.Placement.contiguous(EXPERTS, group.size)
        dispatcher = Dispatcher(group, placement, HIDDEN, dtype, **options)
        x, idx, weights, grad = inputs(group.rank, dtype)
        x.requires_grad_("x" not in freeze)
        weights.requires_grad_("weights" not in freeze)
        tokens = dispatcher.dispatch(x, idx, weights)
        experts = GroupedExperts(HIDDEN, INNER, tokens.plan.local_experts, dtype=dtype, seed=1)
        if "experts" in freeze:
            experts.requires_grad_(False)
        if tokens.row_weights is None:
            y = experts(tokens.rows, tokens.expert_counts, out=tokens.output())
        else:
            y = experts(tokens.rows, tokens.expert_counts)
            y = (y.float() * tokens.row_weights.unsqueeze(1)).to(dtype)
        out = dispatcher.combine(tokens, y)
        if out.requires_grad:
            out.backward(grad)
        return (out.detach(), x.grad, weights.grad,
                [experts.w1.grad, experts.w3.grad, experts.w2.grad],
                list(experts.local_experts), dispatcher.metadata_rounds)
    return ferry.run(rank_work, nodes=nodes, ranks_per_node=4 // nodes)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("weights", ["at_combine", "at_expert"])
@pytest.mark.parametrize("strategy", ["flat", "node_dedup"])
def test_forward_and_gradients(nodes, weights, strategy):
    parts, expert_grads = reference()
    for rank, (out, grad_x, grad_weights, grads, local, rounds) in enumerate(
            run(nodes=nodes, weights=weights, strategy=strategy)):
        idx = inputs(rank)[1]
        wanted = parts[rank][2].masked_fill(idx < 0, 0)
        if len(idx) > 2:  # experts in two slots: each has the gradient of their summed weight
            assert close(grad_weights[0], wanted[0], 1e-5)
        assert rounds == 1
        assert close(out, parts[rank][0], 1e-5)
        assert close(grad_x, parts[rank][1], 1e-5)
        assert close(grad_weights, wanted, 1e-5)
        for mine, whole in zip(grads, expert_grads):
            assert close(mine, whole[local], 1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(dtype, tolerance):
    parts, expert_grads = reference(dtype)
    for rank, (out, grad_x, grad_weights, grads, local, _) in enumerate(run(dtype)):
        assert out.dtype == grad_x.dtype == dtype and grad_weights.dtype == torch.float32
        assert close(out, parts[rank][0], tolerance) and close(grad_x, parts[rank][1], tolerance)
        assert close(grad_weights, parts[rank][2].masked_fill(inputs(rank)[1] < 0, 0), tolerance)
        for mine, whole in zip(grads, expert_grads):
            assert close(mine, whole[local], tolerance)


@pytest.mark.parametrize("freeze", [("x",), ("weights",), ("experts",), ("x", "weights"),
                                    ("x", "experts"), ("x", "weights", "experts")])
def test_what_is_frozen_gets_no_gradient(freeze):
    parts, expert_grads = reference()
    for rank, (out, grad_x, grad_weights, grads, local, _) in enumerate(run(freeze=freeze)):
        assert close(out, parts[rank][0], 1e-5)
        assert (grad_x is None) == ("x" in freeze)
        assert (grad_weights is None) == ("weights" in freeze)
        assert (grads[0] is None) == ("experts" in freeze)
        if grad_x is not None:
            assert close(grad_x, parts[rank][1], 1e-5)
        if grads[0] is not None:
            assert close(grads[2], expert_grads[2][local], 1e-5)


def test_a_plan_is_used_again_and_backward_runs_twice():
    def rank_work(group):
        dispatcher = Dispatcher(group, ferry.Placement.contiguous(EXPERTS, group.size), HIDDEN)
        x, idx, weights, grad = inputs(group.rank)
        x.requires_grad_()
        weights.requires_grad_()
        first = dispatcher.dispatch(x, idx, weights)
        out = dispatcher.combine(first, first.rows * 2)
        out.backward(grad, retain_graph=True)
        once = x.grad.clone(), weights.grad.clone()
        out.backward(grad)
        assert torch.equal(x.grad, 2 * once[0]) and torch.equal(weights.grad, 2 * once[1])
        again = dispatcher.dispatch(x, idx, weights, plan=first.plan)
        assert torch.equal(dispatcher.combine(again, again.rows * 2), out)
        assert dispatcher.metadata_rounds == 1
    ferry.run(rank_work, nodes=2, ranks_per_node=2)


def test_a_plan_of_other_routing_is_refused():
    def rank_work(group):
        dispatcher = Dispatcher(group, ferry.Placement.contiguous(EXPERTS, group.size), HIDDEN)
        other = Dispatcher(group, ferry.Placement.contiguous(EXPERTS, group.size), HIDDEN)
        x, idx, weights, _ = inputs(0)
        given = idx.clone()
        tokens = dispatcher.dispatch(x, given, weights)
        given[3, 0] = (given[3, 0] + 1) % EXPERTS  # the plan keeps what it was made for
        for maker, ids, values, words in [
                (dispatcher, given, weights, "topk_idx .*is not what the plan was made for"),
                (dispatcher, idx, weights * 2, "topk_weights .*the same values"),
                (dispatcher, idx[:2], weights[:2], "topk_idx"),
                (other, idx, weights, "not one of this Dispatcher")]:
            with pytest.raises(ValueError, match=words):
                maker.dispatch(x[:len(ids)], ids, values, plan=tokens.plan)
        again = dispatcher.dispatch(x, idx.int(), weights, plan=tokens.plan)
        assert torch.equal(again.rows, tokens.rows)
        plan = weakref.ref(tokens.plan)
        del tokens, again
        gc.collect()
        assert plan() is None  # nor is a plan kept alive by it
    ferry.run(rank_work, ranks_per_node=2)


def test_outputs_are_written_in_place():
    def rank_work(group):
        dispatcher = Dispatcher(group, ferry.Placement.contiguous(EXPERTS, group.size), HIDDEN)
        x, idx, weights, _ = inputs(group.rank)
        tokens = dispatcher.dispatch(x, idx, weights)
        experts = GroupedExperts(HIDDEN, INNER, tokens.plan.local_experts)
        memory = tokens.output()
        y = experts(tokens.rows, tokens.expert_counts, out=memory)
        assert y.data_ptr() == memory.data_ptr() and memory.stride(0) * 4 % 64 == 0
    ferry.run(rank_work, nodes=1, ranks_per_node=4)


def test_refusals():
    def rank_work(group):
        placement = ferry.Placement.contiguous(EXPERTS, group.size)
        with pytest.raises(ValueError, match="torch.float64; allowed: torch.float32"):
            Dispatcher(group, placement, HIDDEN, torch.float64)
        with pytest.raises(ValueError, match="'expert_major'"):
            Dispatcher(group, placement, HIDDEN, layout="token_major")
        dispatcher = Dispatcher(group, placement, HIDDEN)
        _, idx, weights, _ = inputs(group.rank)
        with pytest.raises(ValueError, match=r"\[num_tokens, 12\]"):
            dispatcher.dispatch(torch.zeros(3, 5), idx, weights)
        with pytest.raises(ValueError, match="torch.bfloat16"):
            dispatcher.dispatch(torch.zeros(3, 12).bfloat16(), idx, weights)
    ferry.run(rank_work)
