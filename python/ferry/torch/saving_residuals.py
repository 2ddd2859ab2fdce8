"""What ranks have not sent yet of their gradients, in a checkpoint (compression.py).

    residual/2/layers.0.moe.gate.weight      residual/2/layers.0.moe.experts/17/w1      of rank 2

Invariant. The sum over the ranks of a parameter's residuals is the one that was saved, in every split
of the world and for every placement: gradients are summed, so no more than that matters. What a rank
had not sent stays with it where it still has the parameter: the same split goes on to the same bits.
The rest goes to the lowest rank that has it.
"""

from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set

import torch
from torch import Tensor, nn

from ferry.torch.compression import GradientCompressor
from ferry.torch.saving_files import read_tensors
from ferry.torch.saving_state import Entry, Snapshot, model_entries

_PREFIX = "residual/"


def _full(rank: int, name: str) -> str:
    return f"{_PREFIX}{rank}/{name}"


def _parameters(model: nn.Module) -> List[Entry]:
    return [entry for entry in model_entries(model) if isinstance(entry.tensor, nn.Parameter)]


def add_residuals(snapshot: Snapshot, model: nn.Module, compressor: GradientCompressor,
                  rank: int) -> None:
    """Adds what this rank has not sent yet."""
    compressor.check_model("save_checkpoint", model)
    for entry in _parameters(model):
        residual = compressor.residual(entry.tensor)
        if residual is not None:
            snapshot.add(f"{_PREFIX}{rank}", entry, residual)


class LoadingResiduals:
    """Memory for what this rank takes over; the compressor changes in `apply` alone.

    compressor  None = nothing is taken
    used        all names that this rank takes
    Errors:     ValueError (a compressor of another model)
    """

    def __init__(self, index: Mapping[str, Any], model: nn.Module,
                 compressor: Optional[GradientCompressor]) -> None:
        self.used: Set[str] = set()
        self._index, self._compressor = index, compressor
        self._entries = _parameters(model)
        self._totals: Dict[Tensor, Tensor] = {}
        self._takes: Dict[str, List[int]] = {}  # by parameter: the ranks whose residuals it takes
        self._saved: Dict[str, List[int]] = {}  # and the ranks that have one in the checkpoint
        if compressor is None:
            return
        compressor.check_model("load_checkpoint", model)
        for full in index["tensors"]:
            if full.startswith(_PREFIX):
                _, rank, name = full.split("/", 2)
                self._saved.setdefault(name, []).append(int(rank))

    def names(self) -> List[str]:
        """The saved parameters that this rank has."""
        return [name for entry in self._entries for name in entry.names() if name in self._saved]

    def share_out(self, names: List[List[str]], rank: int) -> None:
        """Decides what this rank takes, from the `names` of all ranks."""
        holders: Dict[str, List[int]] = {}
        for other, held in enumerate(names):
            for name in held:
                holders.setdefault(name, []).append(other)
        for name in names[rank]:
            is_lowest = holders[name][0] == rank
            taken = [one for one in sorted(self._saved[name])
                     if one == rank or is_lowest and one not in holders[name]]
            if taken:
                self._takes[name] = taken
                self.used.update(_full(one, name) for one in taken)

    def read(self, checkpoint: Path) -> Iterator[None]:
        """Reads and adds, in the order of the ranks that saved; stops (yields) as `read_tensors` does.

        Errors: as `read_tensors`
        """
        pieces: Dict[str, Tensor] = {}
        for entry in self._entries:
            if any(name in self._takes for name in entry.names()):
                total = self._totals[entry.tensor] = torch.zeros(entry.tensor.shape)
                pieces.update(zip(entry.names(), entry.pieces(total)))
        for rank in sorted({rank for ranks in self._takes.values() for rank in ranks}):
            targets = {name: pieces[name] if rank == ranks[0] else torch.empty_like(pieces[name])
                       for name, ranks in self._takes.items() if rank in ranks}
            yield from read_tensors(checkpoint, self._index,
                                    {_full(rank, name): one for name, one in targets.items()})
            for name, one in targets.items():
                if one is not pieces[name]:
                    pieces[name] += one

    def apply(self) -> None:
        """Cannot fail for what the checkpoint holds."""
        if self._compressor is not None:
            self._compressor.replace(self._totals)
