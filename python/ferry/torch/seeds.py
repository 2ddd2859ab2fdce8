"""First values of parameters that depend on what a parameter is, not on the rank that makes it.

PyTorch's own generator will not do: ranks that are threads of one process share it.
"""

import hashlib

import torch
from torch import Tensor


def seed_of(*parts: object) -> int:
    """63 bits that differ for different parts: a layer's seed, a role, an expert's global id."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform_(values: Tensor, bound: float, seed: int) -> Tensor:
    """Fills with uniform values in +-bound, from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        values.copy_((torch.rand(values.shape, generator=generator) * 2 - 1) * bound)
    return values
