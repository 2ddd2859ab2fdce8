"""One face for the groups that gradients and loads are summed over.

A Ferry group, an mpi4py communicator and a torch.distributed process group all become a
`Communicator`, which sums CPU and CUDA tensors in place, and gathers them.
"""

from typing import Any, Callable, Optional

import numpy
import torch
from torch import Tensor

from ferry._errors import MismatchError


class Communicator:
    """rank, size, a sum over ranks in place, and every rank's tensor.

    sum_array, sum_tensor        the sum of all ranks' NumPy arrays; of tensors, in place
    gather_array, gather_tensor  the ranks' arrays or tensors of one shape, stacked by rank

    Ensures: every rank ends with the same bits; the order of adding is the group's own, the same on
             every run for the same number of ranks
    """

    def __init__(self, rank: int, size: int, sum_array: Optional[Callable] = None,
                 sum_tensor: Optional[Callable] = None, *, gather_array: Optional[Callable] = None,
                 gather_tensor: Optional[Callable] = None) -> None:
        self.rank, self.size = rank, size
        self._sum_array, self._sum_tensor = sum_array, sum_tensor
        self._gather_array, self._gather_tensor = gather_array, gather_tensor

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

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's contiguous tensor, [size, *shape] by rank. All ranks call it alike.

        Requires: the same shape and dtype on all ranks
        Errors:   TypeError (a group that only sums), MismatchError (another shape; from a Ferry group)
        """
        if self.size == 1:
            return tensor.detach().clone().unsqueeze(0)
        if self._gather_tensor is not None:
            return self._gather_tensor(tensor.detach())
        if self._gather_array is None:
            raise TypeError("this group can sum and not gather; fix: give a ferry Group, an mpi4py "
                            "communicator or a torch.distributed process group")
        parts = self._gather_array(tensor.detach().cpu().contiguous().numpy())
        return torch.from_numpy(parts).to(tensor.device)


def to_current_gpu(tensor: Tensor) -> Tensor:
    """A copy on this process's current CUDA device."""
    return tensor.detach().to(torch.device("cuda", torch.cuda.current_device()))


def _mpi(comm) -> Communicator:
    from mpi4py import MPI  # only for a caller who has it: it handed us one of its communicators

    def total(mine: numpy.ndarray) -> numpy.ndarray:
        result = numpy.empty_like(mine)
        comm.Allreduce(mine, result, op=MPI.SUM)
        return result

    def everyone(mine: numpy.ndarray) -> numpy.ndarray:
        result = numpy.empty((comm.Get_size(), *mine.shape), mine.dtype)
        comm.Allgather(mine, result)
        return result
    return Communicator(comm.Get_rank(), comm.Get_size(), total, gather_array=everyone)


def _process_group(group) -> Communicator:
    import torch.distributed as dist

    def must_move(tensor: Tensor) -> bool:
        # NCCL takes no CPU tensors, and loads and norms are ones.
        return tensor.device.type == "cpu" and dist.get_backend(group) == "nccl"

    def total(tensor: Tensor) -> None:
        if must_move(tensor):
            moved = to_current_gpu(tensor)
            dist.all_reduce(moved, group=group)
            tensor.detach().copy_(moved)
        else:
            dist.all_reduce(tensor, group=group)

    def everyone(tensor: Tensor) -> Tensor:
        mine = to_current_gpu(tensor) if must_move(tensor) else tensor
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        return torch.stack(parts).to(tensor.device)
    return Communicator(dist.get_rank(group), dist.get_world_size(group), sum_tensor=total,
                        gather_tensor=everyone)


def _ferry(group: Any) -> Communicator:
    def everyone(mine: numpy.ndarray) -> numpy.ndarray:
        parts = group.all_gather(mine)
        for rank, part in enumerate(parts):
            if part.shape != parts[0].shape:
                raise MismatchError(f"rank {rank} gives {list(part.shape)} to a gathering, rank 0 "
                                    f"{list(parts[0].shape)}; fix: make the same call on every rank, "
                                    "for the same model")
        return numpy.stack(parts)
    return Communicator(group.rank, group.size, group.all_reduce,
                        gather_array=everyone if hasattr(group, "all_gather") else None)


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
        return _ferry(group)
    raise TypeError(f"a group is needed, got {type(group).__name__}; allowed: a ferry Group, an "
                    "mpi4py communicator, a torch.distributed process group, or None for one rank")
