"""A layer written for DeepEP, with only its import changed, against one model over all tokens."""

import types
from pathlib import Path

import pytest
import torch

import ferry
from ferry.compat import deep_ep
from moe_oracle import close, moe

HIDDEN, INNER, EXPERTS, K = 16, 6, 8, 3
TOKENS = [6, 0, 9, 4]


def the_layer():
    """deep_ep_layer.py with its import changed and nothing else."""
    path = Path(__file__).with_name("deep_ep_layer.py")
    source = path.read_text()
    assert source.count("from deep_ep import") == 1
    module = types.ModuleType("deep_ep_layer")
    exec(compile(source.replace("from deep_ep import", "from ferry.compat.deep_ep import"),
                 str(path), "exec"), module.__dict__)
    return module


def inputs(rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS[rank], HIDDEN, generator=generator).to(dtype)
    idx = torch.rand(TOKENS[rank], EXPERTS, generator=generator).argsort(1)[:, :K]
    idx[torch.rand(TOKENS[rank], K, generator=generator) < 0.2] = -1
    weights = torch.rand(TOKENS[rank], K, generator=generator)
    grad = torch.randn(TOKENS[rank], HIDDEN, generator=generator).to(dtype)
    return x, idx, weights, grad


def expert_weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(99)
    return [(torch.randn(EXPERTS, *shape, generator=generator) / 4).to(dtype)
            for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_forward_and_backward(nodes, dtype, tolerance):
    layer = the_layer()

    def work(group):
        w = [weight.clone().requires_grad_() for weight in expert_weights(dtype)]

        def expert_of(e):
            def run(rows):
                gate = rows.float() @ w[0][e].float().t()
                hidden = gate * torch.sigmoid(gate) * (rows.float() @ w[1][e].float().t())
                return (hidden @ w[2][e].float().t()).to(dtype)
            return run
        per_rank = EXPERTS // group.size
        local = [expert_of(group.rank * per_rank + place) for place in range(per_rank)]
        x, idx, weights, grad = inputs(group.rank, dtype)
        x.requires_grad_()
        weights.requires_grad_()
        out = layer.moe(deep_ep.ProcessGroup(group), x, idx, weights, EXPERTS, local)
        out.backward(grad)
        return out.detach(), x.grad, weights.grad, [weight.grad for weight in w]
    results = ferry.run(work, nodes=nodes, ranks_per_node=4 // nodes)
    exact = [weight.double().requires_grad_() for weight in expert_weights(dtype)]
    for rank, (out, grad_x, grad_weights, _) in enumerate(results):
        x, idx, weights, grad = inputs(rank, dtype)
        x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
        wanted = moe(x, idx, weights, *exact)
        wanted.backward(grad.double())
        assert close(out, wanted.detach(), tolerance) and close(grad_x, x.grad, tolerance)
        assert close(grad_weights, weights.grad.masked_fill(idx < 0, 0), tolerance)
    for place, weight in enumerate(exact):
        total = sum(grads[place].double() for _, _, _, grads in results if grads[place] is not None)
        assert close(total, weight.grad, tolerance)


def test_layout_and_return_values():
    def work(group):
        x, idx, weights, _ = inputs(group.rank)
        buffer = deep_ep.Buffer(group)
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, EXPERTS)
        size = EXPERTS // group.size
        for token, row in enumerate(idx.tolist()):
            ranks = {e // size for e in row if e >= 0}
            assert in_rank[token].nonzero().flatten().tolist() == sorted(ranks)
        assert per_rank.tolist() == in_rank.sum(0).tolist() and per_rank.dtype == torch.int32
        assert per_expert.tolist() == [sum(row.count(e) for row in idx.tolist())
                                       for e in range(EXPERTS)]
        nodes = [{e // size // 2 for e in row if e >= 0} for row in idx.tolist()]
        assert per_node.tolist() == [sum(n in token for token in nodes) for n in range(2)]
        event.current_stream_wait()
        result = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank,
                                 is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
                                 expert_alignment=4)
        recv_x, recv_idx, recv_weights, counts, handle, _ = result
        # By source rank, then token, from every rank's inputs.
        wanted = [(r, t) for r in range(group.size) for t, row in enumerate(inputs(r)[1].tolist())
                  if any(e // size == group.rank for e in row if e >= 0)]
        assert recv_x.is_contiguous() and recv_idx.dtype == torch.int64
        for place, (r, t) in enumerate(wanted):
            their_x, their_idx, their_weights, _ = inputs(r)
            assert torch.equal(recv_x[place], their_x[t])
            mine = their_idx[t] // size == group.rank
            mine &= their_idx[t] >= 0
            local = torch.where(mine, their_idx[t] - group.rank * size, torch.tensor(-1))
            assert torch.equal(recv_idx[place], local)
            assert torch.equal(recv_weights[place], their_weights[t] * mine)
        assert len(recv_x) == len(wanted)
        own = [(recv_idx == e).sum().item() for e in range(size)]
        assert counts == [-(-count // 4) * 4 for count in own]
        again = buffer.dispatch(x * 2, handle=handle)
        assert torch.equal(again[0], recv_x * 2) and again[1:5] == (None, None, None, None)
        bias = torch.randn(x.shape)
        plain, none, _ = buffer.combine(recv_x, handle)
        assert none is None
        biased, home, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights, bias=bias)
        assert torch.equal(home, weights.masked_fill(idx < 0, 0))
        assert torch.equal(biased, plain + bias)
        assert torch.allclose(plain, x * in_rank.sum(1, keepdim=True))
        assert handle.exchange.metadata_rounds == 1
    ferry.run(work, nodes=2, ranks_per_node=2)


def test_refusals():
    def work(group):
        buffer = deep_ep.Buffer(group)
        x, idx, weights, _ = inputs(0)
        counts = buffer.get_dispatch_layout(idx, EXPERTS)[2]
        for call, words in [
                (lambda: deep_ep.Buffer(group, low_latency_mode=True), "low_latency_mode"),
                (lambda: deep_ep.Buffer("world"), "ferry.init"),
                (lambda: buffer.dispatch((x, x), topk_idx=idx), "before it is quantised"),
                (lambda: buffer.dispatch(x, topk_idx=idx, num_worst_tokens=9), "num_worst_tokens = 9"),
                (lambda: buffer.dispatch(x), "topk_idx or num_tokens_per_expert"),
                (lambda: buffer.dispatch(x, handle=object(), topk_idx=idx), "one of them"),
                (lambda: buffer.dispatch(x.double(), topk_idx=idx, num_tokens_per_expert=counts),
                 "torch.float64")]:
            with pytest.raises(ValueError, match=words):
                call()
    ferry.run(work)

    def odd(group):
        with pytest.raises(ValueError, match="a multiple of 3"):
            deep_ep.Buffer(group).get_dispatch_layout(inputs(0)[1], EXPERTS)
    ferry.run(odd, ranks_per_node=3)


def test_an_expert_in_two_slots_counts_twice():
    def work(group):
        idx = torch.tensor([[5, 5, -1], [5, 0, 2]])
        layout = deep_ep.Buffer(group).get_dispatch_layout(idx, EXPERTS)
        assert layout[2].tolist() == [1, 0, 1, 0, 0, 3, 0, 0] and layout[2].dtype == torch.int32
        assert layout[0].tolist() == [1, 2]
    ferry.run(work, ranks_per_node=2)


def test_the_events_stand_in_utils_as_well():
    from ferry.compat.deep_ep.utils import EventHandle, EventOverlap
    assert EventOverlap is deep_ep.EventOverlap and EventHandle is deep_ep.EventHandle
