"""This process as one rank: under mpirun or srun, or over a communicator of mpi4py.

MPI can begin and end only once in a process. What init() started therefore ends when Python does,
after all groups; a program that initialised MPI itself, such as one with mpi4py, ends it itself.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any

from . import _ferry
from ._errors import InvalidArgumentError, UnsupportedError
from ._group import Group


class _Process:
    """What this process has open. A forked child has none of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: _ferry.Session | None = None
        self.process = os.getpid()
        self.groups: list[Group] = []
        self.failed = False

    def keep(self, core: _ferry.GroupCore) -> Group:
        self.groups = [one for one in self.groups if not one.closed]
        self.groups.append(Group(core))
        return self.groups[-1]

    def end(self) -> None:
        """At exit: groups first, last made first; then MPI, with all other ranks."""
        if os.getpid() != self.process:
            return
        error = getattr(sys, "last_value", None)  # what ended the program
        for group in reversed(self.groups):
            if group.closed:
                continue
            group._core.close(None if error is None else
                       f"rank {group.rank} failed: {type(error).__name__}: {error}")
        self.groups.clear()
        session, self.session = self.session, None
        if session is not None and error is None:
            session.end()
        del session  # leaves like a rank that failed, unless it has ended


def only_group(call: str) -> Group:
    """The one group that init() has made and that is still open.

    Errors: InvalidArgumentError, where there is none or more than one
    """
    with _process.lock:
        groups = [one for one in _process.groups if not one.closed]
    if len(groups) != 1:
        raise InvalidArgumentError(
            f"{call}: group = None with {len(groups)} open groups of ferry.init(); allowed: one; "
            "fix: pass the group; inside ferry.run, the one that the function is given")
    return groups[0]


_process = _Process()
atexit.register(_process.end)


def _module_of(mpi: Any) -> str:
    """The module that belongs to the library mpi4py is built with."""
    version = mpi.Get_library_version()
    if "Open MPI" in version:
        return "openmpi"
    if "MPICH" in version:
        return "mpich"
    raise UnsupportedError(
        f"init: mpi4py is built with '{version.splitlines()[0]}'; allowed: Open MPI, MPICH; fix: "
        "use an mpi4py of one of them")


def _attach(comm: Any, options: tuple[Any, ...]) -> _ferry.GroupCore:
    MPI: Any = sys.modules.get("mpi4py.MPI")  # whoever has a communicator has imported it
    if MPI is None or not isinstance(comm, MPI.Comm):
        raise InvalidArgumentError(
            f"init: comm is a {type(comm).__name__}; allowed: a communicator of mpi4py, or None; "
            "fix: pass MPI.COMM_WORLD")
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise InvalidArgumentError(
            "init: MPI is not running; fix: call it between MPI.Init() and MPI.Finalize()")
    return _ferry.attach(MPI._addressof(comm), _module_of(MPI), *options)


def init(comm: Any = None, *, topology: _ferry.Topology | None = None, deadline_s: float = 300,
         progress_thread: bool = False, mpi: str = "auto") -> Group:
    """This process as one rank of a group. Collective over all ranks.

    Under mpirun or srun the group is all processes of the job, and Ferry starts MPI unless the
    program has. Without a launcher it is this process alone. `with ferry.init() as group:` leaves
    the group at the end of the block, and ends it on every rank when the block raises; what is open
    when Python ends is left then, before MPI ends.

    Parameters
    ----------
    comm: a communicator of mpi4py: the group is its ranks
    topology: splits machines into virtual nodes; None = the machines as they are found
    deadline_s: how long a rank may give no sign of life, also while it starts
    progress_thread: operations get on while a rank computes, without polling; MPI must be
        initialised with MPI_THREAD_MULTIPLE, as the first init() asks where it starts MPI
    mpi: "auto", "openmpi", "mpich", or "off" for one rank in any case

    Errors: UnsupportedError under torchrun, with the mpirun line to use; under srun without PMI;
            where Ferry has no module for that MPI. InvalidArgumentError (comm, topology),
            PeerTimeoutError, PeerFailedError
    """
    # Only the main thread of Python gets signals.
    on_main = threading.current_thread() is threading.main_thread()
    options = (topology, deadline_s, progress_thread, on_main)
    with _process.lock:
        if os.getpid() != _process.process:
            raise UnsupportedError(
                "init: this process was forked from one that imported ferry; fix: start it anew, "
                "for example with multiprocessing's spawn")
        if comm is not None:
            return _process.keep(_attach(comm, options))
        if mpi == "off":
            alone = _ferry.Session(mpi, deadline_s, progress_thread)
            return _process.keep(alone.attach(*options))
        if _process.session is None:
            _process.session = _ferry.Session(mpi, deadline_s, progress_thread)
        return _process.keep(_process.session.attach(*options))
