"""What a layer must give, from all ranks' inputs, in plain loops. Shares no code with Ferry.

Every expert e multiplies its rows by (e + 1): powers of two of small whole numbers keep every sum
exact in all three dtypes, so results are compared bit by bit.
"""

import numpy as np

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def to_rows(values, dtype):
    """Float values as rows of that dtype; bf16 as NumPy has it."""
    values = np.asarray(values, np.float32)
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(DTYPES[dtype])


def from_rows(rows, dtype):
    if dtype == "bf16":
        return (np.asarray(rows).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(rows).astype(np.float32)


class Inputs:
    """Tokens and routing of one rank, from a seed."""

    def __init__(self, rank, num_tokens, hidden, num_topk, num_experts, ids=np.int64, empty=0.2):
        draw = np.random.default_rng(1000 + rank)
        self.x = draw.integers(-4, 5, (num_tokens, hidden)).astype(np.float32)
        self.topk_idx = draw.integers(0, num_experts, (num_tokens, num_topk)).astype(ids)
        self.topk_idx[draw.random((num_tokens, num_topk)) < empty] = -1
        self.topk_weights = draw.choice([0.5, 1.0, 2.0], (num_tokens, num_topk)).astype(np.float32)


def distinct(topk_idx_row):
    """Experts of a token with their slots, by first slot."""
    found = {}
    for slot, expert in enumerate(topk_idx_row):
        if expert >= 0:
            found.setdefault(int(expert), []).append(slot)
    return found


def combined(inputs, weighted=True):
    """out[t] of one rank when expert e gives (e + 1) * x."""
    out = np.zeros_like(inputs.x)
    for token in range(inputs.x.shape[0]):
        for expert, slots in distinct(inputs.topk_idx[token]).items():
            weight = sum(inputs.topk_weights[token, slot] for slot in slots) if weighted else 1
            out[token] += weight * (expert + 1) * inputs.x[token]
    return out


def expert_rows(all_inputs, experts):
    """Rows of expert_major for these local experts: (expert, source rank, token, row), in order."""
    rows = []
    for expert in experts:
        for rank, inputs in enumerate(all_inputs):
            for token in range(inputs.x.shape[0]):
                if expert in distinct(inputs.topk_idx[token]):
                    rows.append((expert, rank, token, inputs.x[token]))
    return rows


def token_rows(all_inputs, experts):
    """Rows of token_major: (source rank, token, row) of tokens with an expert here."""
    rows = []
    for rank, inputs in enumerate(all_inputs):
        for token in range(inputs.x.shape[0]):
            if set(distinct(inputs.topk_idx[token])) & set(experts):
                rows.append((rank, token, inputs.x[token]))
    return rows
