"""The files of a checkpoint: a directory with one .npz per rank that writes, and index.json.

    step-00000200/rank-00000.npz   NumPy arrays, no pickle; bf16 as its bits in uint16
                  rank-00001.npz
                  index.json       schema, step, extra, experts, optimizer; file, dtype, shape and
                                   CRC of every tensor; numbers of the optimiser's state

Invariants.
1. A directory named `step-...` is complete. It is written under a hidden name, which the next save
   removes, and renamed when all that is in it is on the disk: that rename is the one moment at which
   a checkpoint begins to exist.
2. No file of a checkpoint is written twice. A step that is saved again gets the name
   `step-00000200.1`, and the older directory goes after that: at no moment is there neither. One goes
   by being renamed to a hidden name first.
3. What was not written this way is noticed when it is read: the zip has a CRC of every array, the
   index has it once more, so that no file of another checkpoint fits, and the index has its own.
"""

import json
import os
import re
import secrets
import shutil
import zipfile
import zlib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

import numpy
import torch
from torch import Tensor

SCHEMA = "ferry.checkpoint/1"
INDEX = "index.json"
#: Bytes that a rank writes or reads before it tells the others that it is well: so that no rank waits
#: for another one until its deadline, and all stop soon where one cannot go on.
TURN_BYTES = 1 << 30

#: What the index calls a dtype.
DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
    "u8": torch.uint8, "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_LEFTOVER = re.compile(r"\.step-.*\.(saving|removing)")


class Saved(NamedTuple):
    """A complete checkpoint. They sort by step, then by how often the step was saved."""

    step: int
    generation: int
    path: Path


def saved_in(directory: Path) -> List[Saved]:
    """The checkpoints in a directory, oldest first; none where there is no directory."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            found.append(Saved(int(match[1]), int(match[2] or 0), path))
    return sorted(found)


@contextmanager
def _about(path: Path, verb: str, fix: str) -> Iterator[None]:
    """Errors in the block name the file. Damaged bytes make zipfile raise almost anything."""
    try:
        yield
    except Exception as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        text = f"{path} cannot be {verb} ({said}); fix: {fix}"
        # A file that is gone is damage. FileNotFoundError says that there is no checkpoint: whoever
        # catches it begins anew, and must not where one is spoilt.
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise OSError(error.errno, text) from error
        raise ValueError(text) from error


def _sync_directory(path: Path) -> None:
    """A new or renamed entry of a directory is on the disk only after this."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def begin(directory: Path, step: int) -> Path:
    """A hidden directory for a new checkpoint; removes what killed saves left. Only rank 0 calls it.

    Errors: OSError
    """
    # A name of its own: a rank of an earlier job that still runs cannot write to it.
    draft = directory / f".step-{step:08d}.{secrets.token_hex(4)}.saving"
    with _about(draft, "made", "give a directory that every rank can write to"):
        if not directory.is_dir():
            directory.mkdir(parents=True)
            _sync_directory(directory.parent)
        for path in directory.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        draft.mkdir()
    return draft


def discard(draft: Path) -> None:
    """Removes an unfinished checkpoint; the next save does where that fails."""
    shutil.rmtree(draft, ignore_errors=True)


def bits(tensor: Tensor) -> numpy.ndarray:
    """The memory of a CPU tensor; bfloat16, which NumPy lacks, as uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(numpy.uint16)
    return tensor.numpy()


def write_tensors(path: Path, tensors: Iterable[Tuple[str, Tensor]],
                  listed: Dict[str, Any]) -> Iterator[None]:
    """Writes one .npz, a tensor at a time; stops (yields) after each turn.

    listed   gets what the index says of each tensor
    Ensures: what was written is on the disk at each stop; the same tensors give the same bytes
    Errors:  OSError
    """
    with _about(path, "written", "see that the disk has room and that all ranks share and may write "
                "this directory; checkpoints that were there before still are"):
        with open(path, "xb") as stream:
            begun = 0
            with zipfile.ZipFile(stream, "w") as archive:
                for name, tensor in tensors:
                    member = zipfile.ZipInfo(name + ".npy")
                    array = bits(tensor.detach().cpu().contiguous())
                    with archive.open(member, "w", force_zip64=True) as target:
                        numpy.lib.format.write_array(target, array, allow_pickle=False)
                    listed[name] = {"file": path.name, "dtype": NAMES[tensor.dtype],
                                    "shape": list(tensor.shape), "crc32": member.CRC}
                    if stream.tell() - begun >= TURN_BYTES:
                        begun = stream.tell()
                        _sync(stream)
                        yield
            _sync(stream)


def _crc_of(index: Mapping[str, Any]) -> int:
    rest = {key: value for key, value in index.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def commit(draft: Path, index: Dict[str, Any]) -> Saved:
    """Makes the draft a checkpoint. Only rank 0 calls it, when every rank has written its file.

    Errors: OSError (also where rank 0 does not see the file of another rank)
    """
    index = {"schema": SCHEMA, **index}
    index["crc32"] = _crc_of(index)
    with _about(draft / INDEX, "written", "see that the disk has room and that all ranks share "
                "this directory; checkpoints that were there before still are"):
        for file in sorted({tensor["file"] for tensor in index["tensors"].values()}):
            os.stat(draft / file)
        with open(draft / INDEX, "x", encoding="utf-8") as stream:
            json.dump(index, stream)
            _sync(stream)
        _sync_directory(draft)
        directory, step = draft.parent, index["step"]
        same = [one.generation for one in saved_in(directory) if one.step == step]
        generation = max(same) + 1 if same else 0
        final = directory / (f"step-{step:08d}" + (f".{generation}" if generation else ""))
        os.rename(draft, final)
        _sync_directory(directory)
    return Saved(step, generation, final)


def remove_older(saved: Saved, keep: Optional[int]) -> None:
    """Removes what is older than `saved`, but for the newest of the `keep` steps before it.

    Errors: OSError
    """
    older = [one for one in saved_in(saved.path.parent) if one < saved]
    newest = {one.step: one for one in older if one.step < saved.step}
    kept = list(newest.values())[0 if keep is None else max(0, len(newest) - keep):]
    for one in older:
        if one in kept:
            continue
        hidden = one.path.with_name(f".{one.path.name}.removing")
        with _about(one.path, "removed", f"remove it by hand; {saved.path.name} is complete"):
            os.rename(one.path, hidden)
        # What another process holds open on a network disk stays until the next save.
        shutil.rmtree(hidden, ignore_errors=True)


def _no_doubles(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return result


def read_index(checkpoint: Path) -> Dict[str, Any]:
    """The index of a checkpoint, checked.

    Errors: ValueError (schema, damage, files that the index does not know), OSError
    """
    path = checkpoint / INDEX
    with _about(path, "read", "load another checkpoint, with step="):
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_doubles)
        schema = index.get("schema") if isinstance(index, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"its schema is {schema!r}; allowed: {SCHEMA!r}")
        if index.get("crc32") != _crc_of(index):
            raise ValueError("its CRC is not that of its content: it is damaged or was edited")
        files = {tensor["file"] for tensor in index["tensors"].values()}
        unknown = sorted({found.name for found in checkpoint.glob("*.npz")} - files)
        if unknown:
            raise ValueError(f"{unknown[0]} is in the directory and not in the index")
    return index


def _check_members(archive: zipfile.ZipFile, wanted: Set[str], index: Mapping[str, Any]) -> None:
    """The file holds what the index says, each once."""
    counts = Counter(name[:-len(".npy")] for name in archive.namelist())
    for name, count in sorted(counts.items()):
        if count > 1:
            raise ValueError(f"{name!r} is in it twice")
        if name not in wanted:
            other = index["tensors"].get(name)
            place = f"{other['file']} has it, too" if other else "the index does not name it"
            raise ValueError(f"{name!r} is in it, but {place}")
    for name in sorted(wanted - set(counts)):
        raise ValueError(f"{name!r} is not in it, but the index says so")


def _read_member(archive: zipfile.ZipFile, name: str, listed: Mapping[str, Any],
                 target: Tensor) -> None:
    member = archive.getinfo(name + ".npy")
    if member.CRC != listed["crc32"]:
        raise ValueError(f"{name!r} has another CRC than in the index: of another checkpoint?")
    try:
        with archive.open(member) as source:
            array = numpy.lib.format.read_array(source, allow_pickle=False)
            if source.read(1):
                raise ValueError("it is longer than it says")
        memory = bits(target)
        if array.dtype != memory.dtype or array.shape != memory.shape:
            raise ValueError(f"it is {array.dtype} {list(array.shape)}")
    except Exception as error:
        raise ValueError(f"{name!r}: {error}") from error
    memory[...] = array


def read_tensors(checkpoint: Path, index: Mapping[str, Any],
                 targets: Mapping[str, Tensor]) -> Iterator[None]:
    """Fills contiguous CPU tensors, of the dtypes and shapes in the index; stops after each turn.

    Errors: ValueError that names the file and the tensor (damage, a tensor that is missing or there
            twice), OSError
    """
    members: Dict[str, Set[str]] = {}
    for name, listed in index["tensors"].items():
        members.setdefault(listed["file"], set()).add(name)
    read_bytes = 0
    for file, names in sorted(members.items()):
        if targets.keys().isdisjoint(names):
            continue
        path = checkpoint / Path(file).name
        with _about(path, "read", "load another checkpoint, with step="):
            with zipfile.ZipFile(path) as archive:
                _check_members(archive, names, index)
                for name in sorted(targets.keys() & names):
                    target = targets[name]
                    _read_member(archive, name, index["tensors"][name], target)
                    read_bytes += target.numel() * target.element_size()
                    if read_bytes >= TURN_BYTES:
                        read_bytes = 0
                        yield
