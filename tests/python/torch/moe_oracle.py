"""A Mixture-of-Experts layer over all ranks' tokens at once, in float64, token by token."""

import torch


def expert(x, w1, w3, w2):
    gate = w1 @ x
    return w2 @ (gate * torch.sigmoid(gate) * (w3 @ x))


def moe(x, topk_idx, topk_weights, w1, w3, w2):
    """x [T, H], topk [T, k], weights of all experts [E, ..]; differentiable."""
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros_like(x[token])
        for slot, chosen in enumerate(topk_idx[token].tolist()):
            if chosen >= 0:
                total = total + topk_weights[token, slot] * expert(x[token], w1[chosen], w3[chosen],
                                                                   w2[chosen])
        rows.append(total)
    return torch.stack(rows) if rows else x + 0 * topk_weights.sum()


def close(mine, exact, tolerance):
    """Whether the largest difference is within `tolerance` of the largest value."""
    scale = max(float(exact.abs().max()), 1e-30) if exact.numel() else 1.0
    return mine.numel() == 0 or float((mine.double() - exact).abs().max()) <= tolerance * scale


def rows_are_independent():
    """Whether this BLAS gives a row the same bits whatever rows stand beside it (docs/pytorch.md)."""
    generator = torch.Generator().manual_seed(0)
    for inner, outer in ((16, 12), (12, 16), (300, 24)):
        x = torch.randn(40, inner, generator=generator)
        w = torch.randn(outer, inner, generator=generator)
        whole = x @ w.t()
        for begin, end in ((0, 1), (3, 9), (5, 38)):
            if not torch.equal(x[begin:end] @ w.t(), whole[begin:end]):
                return False
    return True


def same(one, other):
    """Equal bits where the BLAS allows it, else equal up to rounding."""
    return torch.equal(one, other) if rows_are_independent() else close(one, other.double(), 1e-5)
