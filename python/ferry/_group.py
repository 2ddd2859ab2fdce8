"""A rank's place in a group: who the others are, and what all of them do together."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any, Sequence, overload

import numpy as np
import numpy.typing as npt

from . import _ferry
from ._errors import InvalidArgumentError, MismatchError

_LIMITS = ("deadline_s", "pool_limit_bytes", "metadata_limit_bytes", "num_tokens_limit",
           "gather_staging_bytes")
# What ranks gather: operation, element type and shape before the bytes of an array, or a refusal.
_HEAD_BYTES = 256  # NumPy's 64 dimensions fit
_REFUSED = b"!"
_KINDS = "biufc"  # NumPy's letters for numbers


def _bf16_to_f32(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _f32_to_bf16(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rounds to nearest even; a NaN stays one."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


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
        Errors, on every rank: InvalidArgumentError (one rank's array cannot be read),
                PeerTimeoutError, PeerFailedError
        """
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._core.start_all_gather(bytes(value)).wait()
        parts, is_numpy = self._gather("all_gather", value)
        return [array if is_numpy else _ferry.Array(array, dtype) for array, dtype in parts]

    def _gather(self, call: str, value: Any, op: str | None = None
                ) -> tuple[list[tuple[npt.NDArray[Any], str]], bool]:
        """Every rank's array and element type, and whether this rank's array was NumPy's.

        What a rank cannot give is told to the others, so that all of them refuse it.
        """
        is_numpy = False
        try:
            if op not in (None, "sum", "max"):
                raise InvalidArgumentError(
                    f"{call}: op = {op!r} on rank {self.rank}; allowed: 'sum', 'max'")
            array, dtype, is_numpy = _ferry.as_numpy(
                np.asarray(value) if isinstance(value, np.generic) else value, call, self.rank)
            if array.dtype.kind not in _KINDS and dtype != "bf16":
                raise InvalidArgumentError(
                    f"{call}: the array on rank {self.rank} has elements of {dtype}; allowed: "
                    "numbers; fix: convert it")
            head = f"{op} {dtype} {' '.join(map(str, array.shape))}".encode()
            message = head.ljust(_HEAD_BYTES) + np.ascontiguousarray(array).tobytes()
        except InvalidArgumentError as error:
            message = _REFUSED + str(error).encode()
        messages = self._core.start_all_gather(message).wait()
        for message in messages:
            if message.startswith(_REFUSED):
                raise InvalidArgumentError(message[len(_REFUSED):].decode())
        # Another call's bytes can be any.
        ops = [message.split(b" ", 1)[0].decode(errors="replace")[:32] for message in messages]
        for rank, other in enumerate(ops):
            if other != ops[0]:
                raise MismatchError(f"{call}: rank {rank} asked for {other}, rank 0 for {ops[0]}; "
                                    "fix: make the same call on every rank")
        return [self._unpack(message) for message in messages], is_numpy

    @staticmethod
    def _unpack(message: bytes) -> tuple[npt.NDArray[Any], str]:
        _, dtype, *shape = message[:_HEAD_BYTES].decode().split()
        array = np.frombuffer(message, "uint16" if dtype == "bf16" else dtype, offset=_HEAD_BYTES)
        return array.reshape([int(size) for size in shape]).copy(), dtype

    def all_reduce(self, array: Any, op: str = "sum", *, dtype: str | None = None) -> Any:
        """The sum or the maximum of every rank's array: the same bits on every rank, every time.

        Sums go in rank order in FP64 (whole numbers in their own type) and are rounded once.
        Shapes: any, the same on every rank
        Dtypes: those of NumPy; bf16 by DLPack, or as uint16 with dtype="bf16"
        Returns: a new array, NumPy's for NumPy's, else a `ferry.Array`
        Cost: R times the bytes of the array into each rank; made for small arrays
        Errors, on every rank: InvalidArgumentError (op, array), MismatchError (op, shapes, types),
                PeerTimeoutError, PeerFailedError
        """
        parts, is_numpy = self._gather("all_reduce", array, op)
        own, found = parts[self.rank]
        as_bf16 = found == "bf16" or dtype == "bf16"
        arrays = [part for part, _ in parts]
        first, first_type = parts[0]
        for rank, (part, its_type) in enumerate(parts):
            if part.shape != first.shape or its_type != first_type:
                raise MismatchError(
                    f"all_reduce: rank {rank} gave {list(part.shape)} {its_type}, rank 0 "
                    f"{list(first.shape)} {first_type}; fix: make them equal")
        if dtype not in (None, "bf16") or (as_bf16 and found not in ("bf16", "uint16")):
            raise InvalidArgumentError(
                f"all_reduce: dtype = {dtype!r} for an array of {found}; allowed: None, or 'bf16' "
                "for bits in uint16; fix: leave it out")
        if as_bf16:
            arrays = [_bf16_to_f32(part) for part in arrays]
        is_real = np.issubdtype(arrays[0].dtype, np.floating)
        wide: npt.DTypeLike = np.float64 if is_real else own.dtype
        total = arrays[0].astype(wide)
        with np.errstate(invalid="ignore"):  # inf - inf is NaN: the caller's, and no news
            for part in arrays[1:]:
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
        num_tokens_limit: tokens of one rank in one plan; 16,777,216
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
