"""Checkpoints on disk of a model with MoELayers and its optimiser, for any split of the world.

    save_checkpoint("run7", model, optimizer, group=world, step=200, extra={"tokens": 819200})
    extra = load_checkpoint("run7", model, optimizer, group=world)     # the newest

Experts are named by layer and global id (saving_state.py), so what was saved by four expert-parallel
ranks is loaded by two, by copies, or with another placement, to the same bits. saving_files.py has
the files, and what makes them safe: a save that ends anywhere leaves the checkpoints before it.

Invariant. Whatever a rank alone can fail at is done between two gatherings, in which it tells the
others: every rank raises the same error, none waits for one that gave up.
"""

import contextlib
import itertools
import json
import operator
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple, Union

import numpy
import torch
from torch import nn

from ferry._errors import MismatchError
from ferry._group import Group
from ferry.torch import saving_files as files
from ferry.torch.compression import GradientCompressor
from ferry.torch.saving_residuals import LoadingResiduals, add_residuals
from ferry.torch.saving_state import Loading, Snapshot, collect, described, unwrapped

_SAVE, _LOAD = "save_checkpoint", "load_checkpoint"


def _as_error(call: str, rank: int, report: Dict[str, Any]) -> Exception:
    text = f"{call}: on rank {rank}: {report['text']}"
    if report["kind"] == "OSError":
        return OSError(text) if report["errno"] is None else OSError(report["errno"], text)
    if report["kind"] == "ValueError":
        return ValueError(text)
    return RuntimeError(f"{text} ({report['kind']})")


def _together(group: Group, call: str, action: Callable[[], Any]) -> List[Any]:
    """What `action` gave on every rank, by rank; where it failed, the error of the first such rank."""
    own: Optional[Exception] = None
    try:
        report = {"result": action()}
    except Exception as error:  # of any kind: the others wait for this rank
        own = error
        kinds = [kind.__name__ for kind in (OSError, ValueError) if isinstance(error, kind)]
        report = {"kind": (kinds or [type(error).__name__])[0], "text": str(error),
                  "errno": getattr(error, "errno", None)}
        if isinstance(error, OSError) and error.strerror:
            report["text"] = error.strerror + (f": {error.filename}" if error.filename else "")
    reports = [json.loads(part) for part in group.all_gather(json.dumps(report).encode())]
    for rank, report in enumerate(reports):
        if "result" not in report:
            raise _as_error(call, rank, report) from own
    return [report["result"] for report in reports]


def _in_turns(group: Group, call: str, work: Iterator[None]) -> None:
    """Runs `work` to its end on every rank; at each of its stops the ranks hear of each other."""
    try:
        while not all(_together(group, call, lambda: next(work, "done") == "done")):
            pass
    finally:
        with contextlib.suppress(Exception):  # of a half written file, after the error that counts
            work.close()


def _check_group(call: str, group: Any) -> None:
    if not isinstance(group, Group):
        raise TypeError(f"{call}: group is a {type(group).__name__}; allowed: a ferry Group, of all "
                        "ranks that train; fix: give the world of ferry.run or ferry.init")


def _check_compressors(call: str, described_by: List[Dict[str, Any]]) -> None:
    for rank, one in enumerate(described_by):
        if one["compressor"] != described_by[0]["compressor"]:
            raise MismatchError(f"{call}: rank {rank} gives {'a' if one['compressor'] else 'no'} "
                                "compressor, rank 0 does otherwise; fix: give one on every rank, or "
                                "on none")


def _checked_extra(extra: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    extra = {} if extra is None else extra
    try:
        same = isinstance(extra, dict) and json.loads(json.dumps(extra)) == extra
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra is no JSON ({error}); allowed: a dict of what JSON has") from error
    if not same or "step" in extra:
        raise ValueError("extra would not come back as it is; allowed: a dict of str, with numbers "
                         "that are not NaN, strings, None, lists and dicts of these, and without "
                         "'step', which is an argument; fix: lists for tuples, str for other keys")
    return extra


def _description(snapshot: Snapshot, step: int) -> Dict[str, Any]:
    return {"step": step, "experts": snapshot.experts, "values": snapshot.values,
            "optimizer": snapshot.optimizer,
            "tensors": {name: [str(tensor.dtype), list(tensor.shape)]
                        for name, tensor in snapshot.tensors.items()}}


def _owners(described_by: List[Dict[str, Any]]) -> Dict[str, int]:
    """The lowest rank that holds each tensor: it writes it, the copies do not."""
    owners: Dict[str, int] = {}
    for rank, one in enumerate(described_by):
        for name, kind in one["tensors"].items():
            owner = owners.setdefault(name, rank)
            other = described_by[owner]["tensors"][name]
            if kind != other:
                raise MismatchError(f"{_SAVE}: {described(name)} is {kind} on rank {rank}, {other} "
                                    f"on rank {owner}; fix: make the same model on every rank")
    return owners


def _merged_optimizer(described_by: List[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """One description of the ranks' optimisers; a parameter need not be on every rank."""
    first = described_by[0]["optimizer"]
    for rank, one in enumerate(described_by):
        mine = one["optimizer"]
        if (mine is None) != (first is None) or mine is not None and (
                mine["type"] != first["type"]
                or [group["options"] for group in mine["groups"]]
                != [group["options"] for group in first["groups"]]):
            raise MismatchError(f"{_SAVE}: the optimiser of rank {rank} has another type, groups or "
                                f"options than that of rank 0; fix: make them equal")
    if first is None:
        return None
    groups = []
    for number, group in enumerate(first["groups"]):
        keys = [key for one in described_by
                for key in one["optimizer"]["groups"][number]["parameters"]]
        groups.append({"parameters": list(dict.fromkeys(keys)), "options": group["options"]})
    return {"type": first["type"], "groups": groups}


def _merged_experts(described_by: List[Dict[str, Any]], names: Dict[str, int]) -> Dict[str, int]:
    """Experts of each module; every one of them is there."""
    totals: Dict[str, int] = {}
    for one in described_by:
        for module, number in one["experts"].items():
            totals[module] = max(totals.get(module, 0), number)
    found: Dict[str, set] = {module: set() for module in totals}
    for name in names:
        parts = name[len("model/"):].rsplit("/", 2)
        if name.startswith("model/") and len(parts) == 3 and parts[0] in found:
            found[parts[0]].add(int(parts[1]))
    for module, experts in found.items():
        missing = sorted(set(range(totals[module])) - experts)
        if experts and missing:
            raise ValueError(f"{_SAVE}: no rank of the group has expert {missing[0]} of {module!r}, "
                             f"which has {totals[module]}; allowed: a group that has each expert at "
                             "least once; fix: give the group of all ranks that train")
    return totals


def save_checkpoint(directory: Union[str, Path], model: nn.Module,
                    optimizer: Optional[torch.optim.Optimizer] = None, *, group: Group, step: int,
                    extra: Optional[Dict[str, Any]] = None, keep: Optional[int] = 2,
                    compressor: Optional[GradientCompressor] = None) -> Path:
    """Writes directory/step-<step>: parameters, persistent buffers, the optimiser's state and options.

    directory  on a disk that all ranks share; rank 0's counts, as do its extra and keep
    group      all ranks that train; layers may be on sub-groups of it, with copies of experts
    step       of training; saved again, it takes the place of the older one
    extra      what else to come back with: JSON, the same kinds of values
    keep       how many older steps stay; None = all. Higher steps stay, too
    compressor of this rank's gradients: what it has not sent yet is saved, each rank's own
    Requires:  the same call on all ranks, one job at a time in a directory; copies of a tensor are
               equal. After `update_selection_bias`, if that is used: loads since then are not kept,
               nor are random number generators and buffers that are not persistent
    Ensures:   each tensor is written once, by the lowest rank that has it. A save that ends anywhere,
               also by a kill, leaves the older checkpoints; the next one clears up behind it
    Returns:   the directory of the checkpoint, on every rank
    Cost:      every byte written once; three gatherings of names, and one for each GiB of a rank
    Errors, the same on every rank: OSError (of a disk), ValueError (what cannot be saved, an expert
               that nobody has), MismatchError (ranks disagree), PeerTimeoutError, PeerFailedError
    """
    _check_group(_SAVE, group)
    snapshot: List[Snapshot] = []

    def describe() -> Dict[str, Any]:
        if operator.index(step) < 0 or keep is not None and operator.index(keep) < 0:
            raise ValueError(f"step = {step}, keep = {keep}; allowed: at least 0")
        _checked_extra(extra)
        snapshot.append(collect(unwrapped(model), optimizer))
        if compressor is not None:
            add_residuals(snapshot[0], unwrapped(model), compressor, group.rank)
        return {**_description(snapshot[0], operator.index(step)),
                "compressor": compressor is not None}

    ranks = _together(group, _SAVE, describe)
    for rank, one in enumerate(ranks):
        if one["step"] != ranks[0]["step"]:
            raise MismatchError(f"{_SAVE}: rank {rank} saves step {one['step']}, rank 0 step "
                                f"{ranks[0]['step']}; fix: call it at the same step on every rank")
    _check_compressors(_SAVE, ranks)
    owners = _owners(ranks)
    index = {"step": ranks[0]["step"], "extra": extra or {}, "optimizer": _merged_optimizer(ranks),
             "experts": _merged_experts(ranks, owners), "values": {}}
    for one in reversed(ranks):  # so that the lowest rank's stay
        index["values"].update(one["values"])
    mine = {name: tensor for name, tensor in snapshot[0].tensors.items()
            if owners[name] == group.rank}
    return _written(Path(directory), index, mine, group, keep)


def _written(directory: Path, index: Dict[str, Any], mine: Dict[str, torch.Tensor], group: Group,
             keep: Optional[int]) -> Path:
    """Writes this rank's tensors, and as rank 0 the rest."""
    def on_first(action: Callable[[], Any]) -> Any:
        return _together(group, _SAVE, lambda: action() if group.rank == 0 else None)[0]

    draft = Path(on_first(lambda: str(files.begin(directory.absolute(), index["step"]))))
    try:
        listed: Dict[str, Any] = {}
        work = files.write_tensors(draft / f"rank-{group.rank:05d}.npz", mine.items(), listed)
        _in_turns(group, _SAVE, work if mine else iter(()))
        by_rank = _together(group, _SAVE, lambda: listed)

        def commit() -> str:
            tensors = {name: one for part in by_rank for name, one in part.items()}
            saved = files.commit(draft, {**index, "tensors": tensors})
            files.remove_older(saved, keep)
            return str(saved.path)
        return Path(on_first(commit))
    except BaseException:
        if group.rank == 0:
            files.discard(draft)
        raise


def latest_checkpoint(directory: Union[str, Path]) -> Optional[Path]:
    """The checkpoint of the highest step in a directory; None where there is none.

    Not collective, and ranks may see a disk differently: to resume, let `load_checkpoint` choose.
    """
    saved = files.saved_in(Path(directory))
    return saved[-1].path if saved else None


def _chosen(directory: Path, step: Optional[int]) -> str:
    saved = [one for one in files.saved_in(directory) if step in (None, one.step)]
    if not saved:
        there = ", ".join(str(one.step) for one in files.saved_in(directory))
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(2, f"{what} in {directory}; steps there: {there or 'none'}; fix: "
                                "give the directory that save_checkpoint was given")
    return str(saved[-1].path)


def checkpoint_extra(directory: Union[str, Path], step: Optional[int] = None) -> Dict[str, Any]:
    """What a checkpoint was given as `extra`, with "step": to make the model that it is then loaded into.

    Not collective, and reads no tensor.
    Errors: FileNotFoundError (no checkpoint), ValueError (damage, another schema)
    """
    index = files.read_index(Path(_chosen(Path(directory).absolute(), step)))
    return {**index["extra"], "step": index["step"]}


def _check_all_used(index: Dict[str, Any], used: Set[str], group: Group,
                    prefixes: Tuple[str, ...]) -> None:
    """Every tensor of the checkpoint that is asked for is some rank's."""
    names = sorted(name for name in (*index["tensors"], *index["values"])
                   if name.startswith(prefixes))
    mine = numpy.fromiter((name in used for name in names), numpy.uint8, len(names))
    left = [name for name, taken in zip(names, group.all_reduce(mine, "max")) if not taken]
    if left:
        raise ValueError(f"{_LOAD}: the checkpoint has {described(left[0])}, and {len(left) - 1} "
                         "more, that no rank of the group has; allowed: the model that was saved, "
                         "on a group that has all of it")


def load_checkpoint(directory: Union[str, Path], model: nn.Module,
                    optimizer: Optional[torch.optim.Optimizer] = None, *, group: Group,
                    step: Optional[int] = None,
                    compressor: Optional[GradientCompressor] = None) -> Dict[str, Any]:
    """Loads what `save_checkpoint` wrote, into any split of the world and any placement.

    directory  as given to save_checkpoint; rank 0 chooses the checkpoint
    optimizer  of the type that was saved, with the same groups; None = the model alone
    group      ranks that together have the whole model
    step       which checkpoint; None = the one of the highest step
    compressor for what was not sent yet; it begins with nothing where none was saved. None = that is
               left out
    Requires:  the same call on all ranks
    Ensures:   parameters, buffers and the optimiser's state have the bits that were saved. Each rank
               gets back what it had not sent of a parameter that it still has; the lowest rank that has
               it, what was other ranks'. Where it fails, nothing has changed
    Returns:   `extra`, with "step"
    Cost:      each rank reads what it holds, and holds it twice until all have read
    Errors, the same on every rank: FileNotFoundError (no checkpoint), ValueError that names the
               tensor or file (damage, another schema; a tensor, expert or option that is missing, of
               another shape or dtype, or nobody's), OSError, PeerTimeoutError, PeerFailedError
    """
    _check_group(_LOAD, group)
    found = _together(group, _LOAD, lambda: _chosen(Path(directory).absolute(), step)
                      if group.rank == 0 else None)[0]
    parts: List[Any] = []

    def prepare() -> Dict[str, Any]:
        index = files.read_index(Path(found))
        try:
            parts.extend((index, Loading(index, unwrapped(model), optimizer),
                          LoadingResiduals(index, unwrapped(model), compressor)))
        except ValueError as error:
            raise ValueError(f"{found}: {error}") from error
        return {"compressor": compressor is not None, "residuals": parts[2].names()}

    ranks = _together(group, _LOAD, prepare)
    _check_compressors(_LOAD, ranks)
    index, loading, residuals = parts
    residuals.share_out([one["residuals"] for one in ranks], group.rank)
    wanted = {"model/": True, "optimizer/": optimizer is not None,
              "residual/": compressor is not None}
    _check_all_used(index, loading.used | residuals.used, group,
                    tuple(prefix for prefix, asked in wanted.items() if asked))
    _in_turns(group, _LOAD, itertools.chain(
        files.read_tensors(Path(found), index, loading.targets), residuals.read(Path(found))))
    loading.apply()
    residuals.apply()
    return {**index["extra"], "step": index["step"]}
