"""Grouped experts against one expert at a time in float64, and their bits over layouts."""

import pytest
import torch

from ferry.torch import GroupedExperts, SharedExperts, grouped_swiglu
from ferry.torch.experts import scale_rows
from ferry.torch.precision import sigmoid


def oracle(rows, spans, w1, w3, w2):
    """Row by row, float64."""
    y = torch.zeros_like(rows)
    for expert, (begin, end) in enumerate(spans):
        for row in range(begin, end):
            gate, up = w1[expert] @ rows[row], w3[expert] @ rows[row]
            y[row] = w2[expert] @ (gate / (1 + torch.exp(-gate)) * up)
    return y


def weights(num_experts, inner, hidden, dtype=torch.float32):
    make = lambda *shape: (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype).requires_grad_()
    return (make(num_experts, inner, hidden), make(num_experts, inner, hidden),
            make(num_experts, hidden, inner))


def windowed(rows, stride):
    """The same rows as a view of memory whose rows stand further apart; NaN in between."""
    memory = torch.full((rows.shape[0] + 3, stride), float("nan")).to(rows.dtype)
    view = memory[2:2 + rows.shape[0], :rows.shape[1]]
    view.copy_(rows)
    return view


COUNTS = [3, 0, 7, 1]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 8e-3),
                                              (torch.float16, 1e-3)])
def test_forward_and_gradients(dtype, tolerance):
    rows = torch.randn(11, 10).to(dtype).requires_grad_()
    own = weights(4, 6, 10, dtype)
    y = grouped_swiglu(rows, COUNTS, *own)
    direction = torch.randn(11, 10).to(dtype)
    y.backward(direction)
    exact = [t.detach().double().requires_grad_() for t in (rows, *own)]
    spans = [(0, 3), (3, 3), (3, 10), (10, 11)]
    wanted = torch.cat([oracle_of(exact, expert, span) for expert, span in enumerate(spans)])
    wanted.backward(direction.double())
    assert (y - wanted).abs().max() <= tolerance * wanted.abs().max()
    for mine, theirs in zip((rows, *own), exact):
        assert mine.grad.dtype == dtype
        assert (mine.grad - theirs.grad).abs().max() <= tolerance * theirs.grad.abs().max()
    assert own[0].grad[1].abs().sum() == 0  # an expert without rows: zeros, not None


def oracle_of(tensors, expert, span):
    rows, w1, w3, w2 = tensors
    x = rows[span[0]:span[1]]
    gate = x @ w1[expert].t()
    return (gate * torch.sigmoid(gate) * (x @ w3[expert].t())) @ w2[expert].t()


def test_forward_row_by_row():
    rows, own = torch.randn(11, 10), weights(4, 6, 10)
    wanted = oracle(rows.double(), [(0, 3), (3, 3), (3, 10), (10, 11)],
                    *(w.detach().double() for w in own))
    assert torch.allclose(grouped_swiglu(rows, COUNTS, *own).double(), wanted, atol=1e-6)


def test_gradcheck():
    rows = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    own = tuple(w.detach().double().requires_grad_() for w in weights(3, 3, 4))
    assert torch.autograd.gradcheck(lambda *t: grouped_swiglu(t[0], [2, 0, 3], *t[1:]),
                                    (rows, *own))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden, inner, stride", [(7, 5, 16), (48, 80, 64), (100, 36, 112),
                                                   (256, 96, 257), (1000, 40, 1016)])
def test_bits_do_not_depend_on_the_stride(dtype, hidden, inner, stride):
    counts = [1, 2, 17, 33]
    rows, own = torch.randn(53, hidden).to(dtype), weights(4, inner, hidden, dtype)
    grad = torch.randn(53, hidden).to(dtype)
    results = []
    for make in (lambda t: t.clone(), lambda t: windowed(t, stride), lambda t: windowed(t, 2 * stride)):
        for weight in own:
            weight.grad = None
        x = make(rows).requires_grad_()
        out = windowed(torch.zeros(53, hidden, dtype=dtype), stride + 5)
        y = grouped_swiglu(x, counts, *own, out=out)
        assert y.data_ptr() == out.data_ptr()
        y.backward(make(grad))
        results.append([y.detach().clone(), x.grad] + [weight.grad for weight in own])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_bits_do_not_depend_on_the_other_experts():
    counts = [5, 0, 9, 2, 31, 4]
    rows, own = torch.randn(51, 40), weights(6, 24, 40)
    whole = grouped_swiglu(rows, counts, *own)
    first = 0
    for begin in (0, 2, 4):
        num_rows = sum(counts[begin:begin + 2])
        part = grouped_swiglu(rows[first:first + num_rows], counts[begin:begin + 2],
                              *(w[begin:begin + 2] for w in own))
        assert torch.equal(part, whole[first:first + num_rows])
        first += num_rows


@pytest.mark.parametrize("shape", [(1, 5), (3, 21), (64,), (129, 130), (7, 6000)])
def test_sigmoid_of_an_element_does_not_depend_on_its_place(shape):
    x = torch.randn(shape) * 4
    whole = sigmoid(x)
    assert (whole.double() - torch.sigmoid(x.double())).abs().max() < 1e-6
    flat, result = x.flatten(), whole.flatten()
    for begin in range(0, min(200, flat.numel()), 13):
        assert torch.equal(sigmoid(flat[begin:begin + 17]), result[begin:begin + 17])


def test_aligned_rows_in_between_belong_to_nobody():
    rows, own = torch.randn(12, 10), weights(2, 6, 10)
    rows[3:8] = float("nan")
    rows.requires_grad_()
    y = grouped_swiglu(rows, [3, 4], *own, expert_offsets=[0, 8, 12])
    packed = grouped_swiglu(torch.cat([rows[:3], rows[8:]]), [3, 4], *own)
    assert torch.equal(torch.cat([y[:3], y[8:]]), packed) and y[3:8].abs().sum() == 0
    y.sum().backward()
    assert rows.grad[3:8].abs().sum() == 0 and torch.isfinite(own[0].grad).all()


def test_frozen_experts_and_rows():
    rows, own = torch.randn(4, 10), weights(1, 6, 10)
    own[0].requires_grad_(False)
    grouped_swiglu(rows, [4], *own).sum().backward()
    assert own[0].grad is None and own[1].grad.abs().sum() > 0


def test_autocast_changes_nothing():
    rows, own = torch.randn(11, 10), weights(4, 6, 10)
    plain = grouped_swiglu(rows, COUNTS, *own)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = grouped_swiglu(rows, COUNTS, *own)
    assert cast.dtype == torch.float32 and torch.equal(plain, cast)


def test_no_rows():
    own = weights(3, 6, 10)
    rows = torch.zeros(0, 10, requires_grad=True)
    grouped_swiglu(rows, [0, 0, 0], *own).sum().backward()
    assert all(w.grad.abs().sum() == 0 for w in own)
    none = weights(0, 6, 10)
    assert grouped_swiglu(torch.zeros(0, 10), [], *none).shape == (0, 10)


def test_first_weights_depend_on_the_expert_not_on_its_place():
    whole = GroupedExperts(8, 4, range(6), seed=3)
    part = GroupedExperts(8, 4, [1, 4], seed=3)
    assert torch.equal(part.w1[1], whole.w1[4]) and torch.equal(part.w2[0], whole.w2[1])
    assert not torch.equal(whole.w1[0], whole.w1[1]) and not torch.equal(whole.w1[0], whole.w3[0])
    assert not torch.equal(GroupedExperts(8, 4, [0], seed=4).w1[0], whole.w1[0])
    rows = torch.randn(5, 8)
    assert part(rows, [2, 3]).shape == (5, 8)


def test_shared_experts():
    shared = SharedExperts(8, 6, seed=1)
    x = torch.randn(2, 3, 8)
    wanted = oracle(x.view(6, 8).double(), [(0, 6)], shared.w1.detach().double()[None],
                    shared.w3.detach().double()[None], shared.w2.detach().double()[None])
    assert torch.allclose(shared(x).double(), wanted.view(2, 3, 8), atol=1e-6)


@pytest.mark.parametrize("counts, offsets", [([3, 9], None), ([-1, 4], None), ([2, 2], [0, 7, 9])])
def test_counts_that_do_not_fit(counts, offsets):
    with pytest.raises(ValueError, match="do not fit in 8 rows"):
        grouped_swiglu(torch.zeros(8, 10), counts, *weights(2, 6, 10), expert_offsets=offsets)


def test_refused_shapes():
    w1, w3, w2 = weights(2, 6, 10)
    with pytest.raises(ValueError, match="w1 is torch.bfloat16 .*allowed: torch.float32"):
        grouped_swiglu(torch.zeros(8, 10), [4, 4], w1.bfloat16(), w3, w2)
    with pytest.raises(ValueError, match="w3 is torch.float64 .*allowed: torch.float16 or torch.float"):
        grouped_swiglu(torch.zeros(8, 10).half(), [4, 4], w1, w3.double(), w2)
    with pytest.raises(ValueError, match="w2 is"):
        grouped_swiglu(torch.zeros(8, 10), [4, 4], w1, w3, w2.transpose(1, 2))
    with pytest.raises(ValueError, match="out is"):
        grouped_swiglu(torch.zeros(8, 10), [4, 4], w1, w3, w2, out=torch.zeros(7, 10))


def test_autograd_sees_a_later_write_to_the_outputs():
    experts = GroupedExperts(8, 4, [0], seed=1)
    rows, memory = torch.randn(3, 8), torch.empty(3, 8)
    weights = torch.ones(3, requires_grad=True)
    for y in (experts(rows, [3], out=memory), scale_rows(rows.clone(), weights, memory)):
        loss = y.square().sum()
        memory.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
