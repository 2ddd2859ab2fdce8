"""Tensors of a device on their way through host memory, where Ferry exchanges them.

A CPU tensor goes as it is. A CUDA tensor is copied to pinned host memory on the caller's current
stream, which is then waited for, because Ferry reads with the CPU; results go back on that stream,
and it is waited for again, because their host memory is used anew.
"""

from typing import Any, Sequence

import torch
from torch import Tensor


def is_host(device: torch.device) -> bool:
    """True where Ferry reads and writes a tensor's memory itself."""
    return device.type == "cpu"


def check_device(tensor: Tensor, name: str, group: Any) -> None:
    """Errors: ValueError for a device that is neither the CPU nor CUDA, and for CUDA where the ranks
    of the group are threads: autograd runs backward on one thread per device, for all of them, and
    there a rank would wait for one that can only come after it."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {tensor.device}; allowed: cpu, or cuda, which is staged "
                         "through pinned host memory; fix: move it with .cpu()")
    if tensor.device.type == "cuda" and group.transport == "threads" and group.size > 1:
        raise ValueError(f"{name} is on {tensor.device} and the {group.size} ranks are threads of a "
                         "process, whose backward would wait for itself; allowed: cpu, or ranks that "
                         "are processes; fix: move it with .cpu(), or run under MPI with ferry.init()")


def wait_for_stream(device: torch.device) -> None:
    """Returns when the caller's current stream of a CUDA device has done what it was given."""
    torch.cuda.current_stream(device).synchronize()


def host_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory for what comes from or goes to `device`: pinned, unless that is the host."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=not is_host(device))


def to_host(tensor: Tensor) -> Tensor:
    """The values in host memory without a gradient, elements of a row side by side; a CPU tensor that
    is so already is not copied."""
    tensor = tensor.detach()
    if is_host(tensor.device):
        return tensor if _rows_are_contiguous(tensor) else tensor.contiguous()
    host = host_empty(tensor.shape, tensor.dtype, tensor.device)
    host.copy_(tensor, non_blocking=True)
    wait_for_stream(tensor.device)
    return host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """`host` on the device; the same tensor where that is the host."""
    if is_host(device):
        return host
    moved = host.to(device, non_blocking=True)
    wait_for_stream(device)
    return moved


def _rows_are_contiguous(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    return (tensor.dim() == 2 and tensor.stride(1) == 1
            and tensor.stride(0) >= tensor.shape[1] > 0)
