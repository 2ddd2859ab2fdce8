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
