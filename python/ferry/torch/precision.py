"""FP32 arithmetic in which a row's bits do not depend on the rows beside it, also under autocast.

Two things of PyTorch on a CPU do depend on them. A BLAS chooses its kernel, and with it the order of
adding, by the shape of a product and by the place in it (seen with OpenBLAS on Haswell and Zen; not
with the reference BLAS). And functions such as sigmoid are computed by vector code, except the last
elements of a tensor (and of each thread's part), which go through the C library: other last bits.
"""

from contextlib import contextmanager

import torch
from torch import Tensor

#: Elements of one call of a vectorised function: fewer than PyTorch splits over threads.
_CHUNK = 16384
#: A multiple of every vector loop's step, so that no element is left to the C library.
_STEP = 64


def no_autocast(tensor: Tensor):
    """A context in which operations on the tensor's device keep the dtypes they are given."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)


@contextmanager
def no_tf32(tensor: Tensor):
    """A context in which FP32 products on a GPU keep all 24 bits; TF32 has 11."""
    if tensor.device.type == "cpu":
        yield
        return
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def sigmoid(x: Tensor) -> Tensor:
    """torch.sigmoid without a gradient, an element's bits a function of that element alone."""
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    flat = x.reshape(-1)
    result = torch.empty_like(flat)
    num_whole = flat.numel() - flat.numel() % _STEP
    for begin in range(0, num_whole, _CHUNK):
        end = min(begin + _CHUNK, num_whole)
        torch.sigmoid(flat[begin:end], out=result[begin:end])
    if num_whole < flat.numel():
        last = x.new_zeros(_STEP)
        last[:flat.numel() - num_whole] = flat[num_whole:]
        result[num_whole:] = torch.sigmoid(last)[:flat.numel() - num_whole]
    return result.view(x.shape)


class _RowSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


class _RowLinear(torch.autograd.Function):
    """x @ weight.T; on a CPU every row is a product of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        transposed = weight.t()
        if x.device.type != "cpu":
            with no_tf32(x):
                return x @ transposed
        result = x.new_empty(x.shape[0], weight.shape[0])
        for row in range(x.shape[0]):
            torch.mm(x[row:row + 1], transposed, out=result[row:row + 1])
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        with no_autocast(grad), no_tf32(grad):
            grad_x = grad @ weight if ctx.needs_input_grad[0] else None
            grad_weight = grad.t() @ x if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def fp32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in FP32 from FP32 copies.

    Shapes: x [T, n], weight [m, n], any float dtypes -> float32 [T, m]
    Cost:   reads `weight` once per row: for a router a small part of what the experts cost
    """
    with no_autocast(x):
        return _RowLinear.apply(x.float().contiguous(), weight.float().contiguous())


def fp32_sigmoid(x: Tensor) -> Tensor:
    """Differentiable sigmoid of float32 x."""
    return _RowSigmoid.apply(x)
