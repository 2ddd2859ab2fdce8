"""One face for the groups that gradients and loads are summed over.

A Ferry group, an mpi4py communicator and a torch.distributed process group all become a
`Communicator`, which sums CPU and CUDA tensors in place.
"""

from typing import Callable, Optional

import numpy
import torch
from torch import Tensor


class Communicator:
    """rank, size, and a sum over ranks in place.

    Ensures: every rank ends with the same bits; the order of adding is the group's own, the same on
             every run for the same number of ranks
    """

    def __init__(self, rank: int, size: int, sum_array: Optional[Callable] = None,
                 sum_tensor: Optional[Callable] = None) -> None:
        self.rank, self.size = rank, size
        self._sum_array, self._sum_tensor = sum_array, sum_tensor

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replaces a contiguous tensor by its sum over the ranks. All ranks call it alike."""
        if self.size == 1:
            return tensor
        if self._sum_tensor is not None:
            self._sum_tensor(tensor)
            return tensor
        host = tensor.detach().cpu().contiguous()
        total = torch.from_numpy(numpy.ascontiguousarray(self._sum_array(host.numpy())))
        return tensor.detach().copy_(total.view(tensor.shape))


def to_current_gpu(tensor: Tensor) -> Tensor:
    """A copy on this process's current CUDA device."""
    return tensor.detach().to(torch.device("cuda", torch.cuda.current_device()))


def _mpi(comm) -> Communicator:
    from mpi4py import MPI  # only for a caller who has it: it handed us one of its communicators

    def total(mine: numpy.ndarray) -> numpy.ndarray:
        result = numpy.empty_like(mine)
        comm.Allreduce(mine, result, op=MPI.SUM)
        return result
    return Communicator(comm.Get_rank(), comm.Get_size(), sum_array=total)


def _process_group(group) -> Communicator:
    import torch.distributed as dist

    def total(tensor: Tensor) -> None:
        # NCCL takes no CPU tensors, and loads and norms are ones.
        if tensor.device.type == "cpu" and dist.get_backend(group) == "nccl":
            moved = to_current_gpu(tensor)
            dist.all_reduce(moved, group=group)
            tensor.detach().copy_(moved)
        else:
            dist.all_reduce(tensor, group=group)
    return Communicator(dist.get_rank(group), dist.get_world_size(group), sum_tensor=total)


def as_communicator(group: object) -> Communicator:
    """A Ferry group, an mpi4py communicator, a torch.distributed process group, a Communicator, or
    None = this rank alone.

    Errors: TypeError that names what came and what is allowed
    """
    if group is None:
        return Communicator(0, 1)
    if isinstance(group, Communicator):
        return group
    if hasattr(group, "Allreduce") and hasattr(group, "Get_size"):
        return _mpi(group)
    if torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup):
        return _process_group(group)
    if hasattr(group, "all_reduce") and hasattr(group, "rank") and hasattr(group, "size"):
        return Communicator(group.rank, group.size, sum_array=group.all_reduce)
    raise TypeError(f"a group is needed, got {type(group).__name__}; allowed: a ferry Group, an "
                    "mpi4py communicator, a torch.distributed process group, or None for one rank")
