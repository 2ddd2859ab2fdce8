"""FP32 arithmetic whose bits do not depend on the batch, also under autocast."""

import torch
from torch import Tensor

#: Rows are padded to a multiple of this, so that a BLAS handles every row with the same inner kernel:
#: remainders of a tile, and single rows, are often another kernel with another order of adding.
_ROW_TILE = 16


def no_autocast(tensor: Tensor):
    """A context in which operations on the tensor's device keep the dtypes they are given."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)


def pad_rows(x: Tensor) -> Tensor:
    """x [T, n] with zero rows up to a multiple of the tile."""
    missing = -x.shape[0] % _ROW_TILE
    return x if missing == 0 else torch.nn.functional.pad(x, (0, 0, 0, missing))


def fp32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in FP32 from FP32 copies; a row's result depends on that row alone.

    Shapes: x [T, n], weight [m, n], any float dtypes -> float32 [T, m]
    """
    with no_autocast(x):
        if x.shape[0] == 0:
            return x.float() @ weight.float().t()
        return (pad_rows(x.float()) @ weight.float().t())[:x.shape[0]]
