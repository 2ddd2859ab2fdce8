"""Finds again, when an activation checkpoint computes a layer a second time, what the layer decided the
first time: its routing and its plan. So a step makes one plan, and both passes route alike even where
recomputed scores tie.

PyTorch tells a module neither that it is being computed again nor which earlier call it repeats. What
it does keep, from the first forward until backward is done, is one object per checkpointed region:
the `ctx` of an autograd function for reentrant checkpoints (PyTorch's are tested, those of other
libraries are not), and for `use_reentrant=False` the storage or frame of its saved tensors. These
objects are looked up on the stack, and notes are left on them: so two micro-batches in flight are
told apart, in whatever order their backwards come, and notes go when the region does. No note is left
outside of a checkpoint.
"""

import sys
from typing import Any, Dict, List, Optional

import torch
from torch.autograd import Variable
from torch.utils import checkpoint

_NOTES = "_ferry_notes"
#: Names of the object of a region in torch/utils/checkpoint.py: PyTorch 1.11 to 2.0; from 2.1, when it
#: computes again; the generator that holds it, in the first forward.
_REGION_NAMES = ("storage", "frame", "new_frame")


def in_backward() -> bool:
    """True while autograd runs a backward on this thread."""
    try:
        Variable._execution_engine.queue_callback(_nothing)
    except RuntimeError:  # "can only be installed during backward pass"
        return False
    return True


def _nothing() -> None:
    pass


def _region_of(frame: Any) -> Optional[Any]:
    """The object of the checkpointed region that this frame of the stack computes, if it does."""
    code = frame.f_code
    if code.co_name in ("forward", "backward") and "ctx" in code.co_varnames:
        ctx = frame.f_locals.get("ctx")
        if isinstance(ctx, torch.autograd.function.BackwardCFunction):
            return ctx
    if code.co_filename != checkpoint.__file__:
        return None
    names = frame.f_locals
    generator = names.get("gen")
    if getattr(generator, "gi_frame", None) is not None:
        names = generator.gi_frame.f_locals
    for name in _REGION_NAMES:
        if names.get(name) is not None:
            return names[name]
    return None


def _regions() -> List[Any]:
    """The regions that are being computed on this thread, the innermost first."""
    regions, frame = [], sys._getframe(2)
    while frame is not None:
        region = _region_of(frame)
        if region is not None and not any(region is other for other in regions):
            regions.append(region)
        frame = frame.f_back
    return regions


class _Notes:
    """The notes of one layer in one region, in the order of its calls there."""

    def __init__(self) -> None:
        self.entries: List[Any] = []
        self.next = 0

    def take(self) -> Any:
        entry = self.entries[self.next]
        self.next = (self.next + 1) % len(self.entries)
        return entry


def _leave(region: Any, layer: object, entry: object) -> None:
    notes: Dict[int, _Notes] = region.__dict__.setdefault(_NOTES, {})
    notes.setdefault(id(layer), _Notes()).entries.append(entry)


def remember(layer: object, entry: object) -> None:
    """Leaves `entry` for the time when the region around this call is computed again."""
    for region in _regions():
        _leave(region, layer, entry)


def recall(layer: object) -> Optional[Any]:
    """What `remember` was given by the call that is now repeated; None in a first forward.

    Ensures: notes that were read are gone when this backward has ended
    """
    if not in_backward():
        return None
    inner: List[Any] = []
    for region in _regions():
        notes = getattr(region, _NOTES, {}).get(id(layer))
        if notes is None or not notes.entries:
            inner.append(region)
            continue
        entry = notes.take()
        Variable._execution_engine.queue_callback(lambda: getattr(region, _NOTES).clear())
        for fresh in inner:  # checkpoints inside of this one, which are new and will be repeated, too
            _leave(fresh, layer, entry)
        return entry
    return None
