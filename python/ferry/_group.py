"""A rank's place in a group: who the others are, and what all of them do together."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any, Sequence, overload

import numpy as np
import numpy.typing as npt

from . import _ferry
from ._errors import InvalidArgumentError, MismatchError

_LIMITS = ("deadline_s", "pool_limit_bytes", "metadata_limit_bytes", "gather_staging_bytes")


def _bf16_to_f32(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _f32_to_bf16(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rounds to nearest even; a NaN stays one."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _as_numpy(value: Any) -> tuple[npt.NDArray[Any], str, bool]:
    return _ferry.as_numpy(np.asarray(value) if isinstance(value, np.generic) else value)


class Group:
    """One rank of a group of ranks that exchange with each other.

    Made by `ferry.run`, `ferry.init` and `Group.subgroup`. One thread at a time may call it, its
    exchanges and their pendings; all ranks make their collective calls in the same order.
    """

    def __init__(self, core: _ferry.GroupCore) -> None:
        self._core = core

    @property
    def rank(self) -> int:
        """Number of this rank in the group, from 0."""
        return self._core.rank

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return self._core.topology.num_ranks

    @property
    def topology(self) -> _ferry.Topology:
        """Which ranks share memory."""
        return self._core.topology

    @property
    def nodes(self) -> int:
        """Number of nodes of the group."""
        return self._core.topology.num_nodes

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self._core.topology.node_of(self._core.rank)

    @property
    def local_rank(self) -> int:
        """Place of this rank among the ranks of its node."""
        return self._core.topology.local_index(self._core.rank)

    @property
    def transport(self) -> str:
        """How the ranks reach each other: "threads" or "mpi"."""
        return self._core.transport

    @property
    def closed(self) -> bool:
        """True once this rank has left the group."""
        return self._core.closed

    def barrier(self) -> None:
        """Returns when every rank has called it.

        Errors: PeerTimeoutError, PeerFailedError
        """
        self._core.start_all_gather(b"").wait()

    @overload
    def all_gather(self, value: bytes | bytearray | memoryview) -> list[bytes]: ...

    @overload
    def all_gather(self, value: Any) -> list[Any]: ...

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's bytes or array, by rank. Sizes may differ.

        Shapes: any; each array keeps its own
        Returns: bytes for bytes; NumPy arrays for an array of NumPy, else `ferry.Array`s
        Errors: InvalidArgumentError, MismatchError, PeerTimeoutError, PeerFailedError
        """
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._core.start_all_gather(value).wait()
        array, dtype, is_numpy = _as_numpy(value)
        head = f"{dtype} {' '.join(map(str, array.shape))}".encode().ljust(128)
        if len(head) > 128 or array.dtype.hasobject:
            raise InvalidArgumentError(
                f"all_gather: an array of {array.ndim} dimensions and type {dtype}; allowed: "
                "numbers in a few dimensions; fix: reshape or convert it")
        message = head + np.ascontiguousarray(array).tobytes()
        gathered = self._core.start_all_gather(message).wait()
        return [self._unpack(message, is_numpy) for message in gathered]

    @staticmethod
    def _unpack(message: bytes, as_numpy: bool) -> Any:
        dtype, *shape = message[:128].decode().split()
        array = np.frombuffer(message, "uint16" if dtype == "bf16" else dtype, offset=128)
        array = array.reshape([int(size) for size in shape]).copy()
        return array if as_numpy else _ferry.Array(array, dtype)

    def all_reduce(self, array: Any, op: str = "sum", *, dtype: str | None = None) -> Any:
        """The sum or the maximum of every rank's array: the same bits on every rank, every time.

        Sums go in rank order in FP64 (whole numbers in their own type) and are rounded once.
        Shapes: any, the same on every rank
        Dtypes: those of NumPy; bf16 by DLPack, or as uint16 with dtype="bf16"
        Returns: a new array, NumPy's for NumPy's, else a `ferry.Array`
        Cost: R times the bytes of the array into each rank; made for small arrays
        Errors: InvalidArgumentError (op), MismatchError (shapes), PeerTimeoutError,
                PeerFailedError
        """
        if op not in ("sum", "max"):
            raise InvalidArgumentError(f"all_reduce: op = {op!r}; allowed: 'sum', 'max'")
        own, found, is_numpy = _as_numpy(array)
        as_bf16 = found == "bf16" or dtype == "bf16"
        parts = self.all_gather(own)
        for rank, part in enumerate(parts):
            if part.shape != own.shape or part.dtype != own.dtype:
                raise MismatchError(
                    f"all_reduce: rank {rank} gave {list(part.shape)} {part.dtype}, rank "
                    f"{self.rank} {list(own.shape)} {own.dtype}; fix: make them equal")
        if as_bf16:
            parts = [_bf16_to_f32(part) for part in parts]
        wide = np.float64 if np.issubdtype(parts[0].dtype, np.floating) else own.dtype
        total = parts[0].astype(wide)
        for part in parts[1:]:
            if op == "sum":
                total += part.astype(wide)
            else:
                np.maximum(total, part.astype(wide), out=total)
        result = _f32_to_bf16(total.astype(np.float32)) if as_bf16 else total.astype(own.dtype)
        return result if is_numpy else _ferry.Array(result, "bf16" if as_bf16 else found)

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """This rank's place in a group of some of the ranks: ranks[i] is its rank i.

        Collective over `ranks` alone, which make the same groups in the same order; a rank may be
        in several. The nodes are those of this group. It ends with this group, or earlier by
        close() or a `with`.

        Errors: InvalidArgumentError (no rank of this group, twice the same, or this rank is not
                among them), PeerTimeoutError, PeerFailedError
        """
        return Group(self._core.subgroup(list(ranks)))

    def set_limits(self, **limits: float) -> None:
        """Sets limits of this group and all its exchanges on this rank.

        deadline_s: seconds since a rank's last sign of life; 300
        pool_limit_bytes: window memory of this rank; 64 GiB
        metadata_limit_bytes: one metadata message; 1 GiB
        gather_staging_bytes: rows that start_gather stages here before their plan; 64 MiB

        Errors: InvalidArgumentError
        """
        for name, value in limits.items():
            if name not in _LIMITS:
                raise InvalidArgumentError(
                    f"set_limits: {name} is no limit; allowed: {', '.join(_LIMITS)}")
            if not math.isfinite(value) or value < 0 or (name == "deadline_s" and value == 0):
                raise InvalidArgumentError(f"set_limits: {name} = {value}; allowed: above 0")
        self._core.set_limits({name: float(value) if name == "deadline_s" else int(value)
                               for name, value in limits.items()})

    def counters(self) -> dict[str, int]:
        """Bytes and messages that this rank has sent to other nodes so far, by kind.

        Keys: payload_bytes, metadata_bytes, control_bytes, messages
        """
        return self._core.counters()

    def pool_bytes(self) -> int:
        """Bytes of window memory that this rank has reserved."""
        return self._core.pool_bytes()

    def staging_bytes(self) -> int:
        """The most memory that fragments to and from other nodes have taken here so far."""
        return self._core.staging_bytes()

    def close(self) -> None:
        """Leaves the group, with its sub-groups: what runs is cancelled, later calls are refused.

        Views of rows stay as they are. Closing twice does nothing.
        """
        self._core.close(None)

    def abort(self, text: str) -> None:
        """Ends the group on every rank: their waits fail with PeerFailedError and this text."""
        self._core.abort(text)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._core.close(f"rank {self.rank} failed: {kind.__name__}: {error}")

    def __repr__(self) -> str:
        return f"ferry.Group(rank={self.rank}, size={self.size}, nodes={self.nodes})"
