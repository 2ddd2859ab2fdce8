"""Ranks as threads of this process."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Mapping, Sequence, TypeVar

from . import _ferry
from ._errors import ResourceExhaustedError
from ._group import Group

_T = TypeVar("_T")
_INTERRUPTED_LIMIT_S = 0.8
_LOOK_S = 0.1


class _Job:
    """The ranks of one run and how they end. The first failure counts."""

    def __init__(self, world: _ferry.World, num_ranks: int) -> None:
        self.world = world
        self.num_ranks = num_ranks
        self.results: list[Any] = [None] * num_ranks
        self.ended = [threading.Event() for _ in range(num_ranks)]
        self.failure: tuple[int, BaseException] | None = None
        self.lock = threading.Lock()

    def fail(self, rank: int, error: BaseException) -> None:
        with self.lock:
            if self.failure is None:
                self.failure = (rank, error)
        self.world.abort(f"rank {rank} failed: {type(error).__name__}: {error}")

    def run_rank(self, rank: int, join: Callable[[int], _ferry.GroupCore],
                 body: Callable[[Group], Any]) -> None:
        try:
            core = join(rank)
            try:
                self.results[rank] = body(Group(core))
            except BaseException as error:
                self.fail(rank, error)
            finally:
                core.close(None)
        except BaseException as error:  # an interrupt may come between any two lines
            self.fail(rank, error)
        finally:
            self.ended[rank].set()


def _note(error: BaseException, rank: int, num_ranks: int) -> None:
    """Names the rank in what is raised again, where the exception lets us."""
    try:
        error.rank = rank  # type: ignore[attr-defined]
        note = f"raised on rank {rank} of {num_ranks} of ferry.run"
        if note not in getattr(error, "__notes__", []) and hasattr(error, "add_note"):
            error.add_note(note)
    except AttributeError:
        pass


def _interrupt(job: _Job, threads: Sequence[threading.Thread], error: BaseException) -> None:
    """Ends ranks that wait in Ferry at once, and others at their next step of Python."""
    job.world.abort(f"the caller of ferry.run was interrupted: {type(error).__name__}")
    end = time.monotonic() + _INTERRUPTED_LIMIT_S
    for thread in threads:
        if thread.is_alive() and thread.ident is not None:
            _ferry.raise_in_thread(thread.ident, KeyboardInterrupt)
    for rank, thread in enumerate(threads):
        if thread.ident is not None:
            job.ended[rank].wait(max(0.0, end - time.monotonic()))
            thread.join(max(0.0, end - time.monotonic()))


def run(fn: Callable[..., _T], nodes: int = 1, ranks_per_node: int = 1, *,
        topology: _ferry.Topology | None = None, link_bits_per_s: float = 0,
        deadline_s: float = 300, progress_thread: bool = False, args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None) -> list[_T]:
    """Runs fn(group, *args, **kwargs) once per rank, each on a thread of this process.

    Works in a script, a test or a notebook, with no launcher. Ferry gives the GIL away whenever it
    waits or computes, so ranks get on beside each other; their own Python code takes turns.

    Parameters
    ----------
    nodes, ranks_per_node: the shape of the group
    topology: any other shape; nodes and ranks_per_node are then ignored
    link_bits_per_s: rate of one full-duplex link per node; 0 = as fast as memory
    deadline_s: how long a rank may give no sign of life
    progress_thread: operations get on while a rank computes, without polling

    Returns
    -------
    What fn returned, by rank.

    Errors: the first exception of any rank, with `.rank` and a note that names it, after all ranks
    have ended; the others are freed from their waits with PeerFailedError. On Ctrl-C
    KeyboardInterrupt, at most a second later: ranks that wait in Ferry end at once, a rank in
    Python code at its next step, and one inside another library when that returns.
    """
    shape = topology or _ferry.Topology.uniform(nodes, ranks_per_node)
    job = _Job(_ferry.World(shape, link_bits_per_s), shape.num_ranks)
    words = dict(kwargs or {})

    def join(rank: int) -> _ferry.GroupCore:
        return job.world.join(rank, deadline_s, progress_thread)

    def body(group: Group) -> _T:
        return fn(group, *args, **words)

    threads = [threading.Thread(target=job.run_rank, args=(rank, join, body),
                                name=f"ferry rank {rank}") for rank in range(shape.num_ranks)]
    try:
        for rank, thread in enumerate(threads):
            try:
                thread.start()
            except RuntimeError as error:
                job.fail(rank, ResourceExhaustedError(
                    f"run: the system gave no thread for rank {rank} of {shape.num_ranks} "
                    f"({error}); fix: use fewer ranks"))
                break
        for rank, thread in enumerate(threads):
            # In steps: a rank that calls run() itself must hear of an interrupt, too. Not in join():
            # CPython 3.11 takes a thread for ended whose join() an exception leaves.
            while thread.ident is not None and not job.ended[rank].wait(_LOOK_S):
                if not thread.is_alive():
                    break
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    except BaseException as error:
        _interrupt(job, threads, error)
        raise
    if job.failure is not None:
        rank, first = job.failure
        _note(first, rank, shape.num_ranks)
        try:
            raise first
        finally:
            job.failure = None
            del first  # it holds this frame
    return list(job.results)
