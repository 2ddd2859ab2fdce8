"""Where a lab's state is kept, the lock of `up` and `down`, and the processes that hold a lab.

A lab lives as long as its keeper, the first process of a PID namespace in which all hosts live.
Killing that one is the clean-up, and nothing else in the machine needs any: no interface, mount or
named namespace of a lab is outside of it. The state only says where things are.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from . import kernel
from .common import LAB_FAILED, LabError
from .settings import Settings, check_name, host_name

KEEPER_MARK = "ferry-lab-keeper"
LOCK_SECONDS = 60
KILL_SECONDS = 10


@dataclass(frozen=True)
class Lab:
    """A lab that is up: its settings, the keeper (also the login host), the first process of
    each host, and the folder with its state."""

    settings: Settings
    keeper: kernel.Process
    hosts: tuple
    folder: Path

    @property
    def tmp(self):
        """A path that leads to a small file system of its own on each host."""
        return self.folder / "tmp"

    @property
    def agent(self):
        return self.folder / "agent"


def base_folder():
    """/run/ferry-lab, or below TMPDIR where /run is not there."""
    base = Path("/run")
    if not os.access(base, os.W_OK):
        base = Path(os.environ.get("TMPDIR", "/tmp"))
    return base / "ferry-lab"


def folder_of(name):
    return base_folder() / name


@contextlib.contextmanager
def lock():
    """Held by one `up` or `down` at a time. Its file goes when nobody holds or awaits it."""
    path = base_folder() / "lock"
    end = time.monotonic() + LOCK_SECONDS
    while True:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it before may have removed the file: then this lock is nobody's.
            if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
                break
        os.close(descriptor)
        if time.monotonic() > end:
            raise LabError(f"another lab/up or lab/down held {path} for {LOCK_SECONDS} s; "
                           "fix: see what it waits for, or end it", LAB_FAILED)
        time.sleep(0.05)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        with contextlib.suppress(OSError):  # some lab is still in it
            path.parent.rmdir()


def save(lab):
    """Complete or not there: readers take no lock."""
    content = {"schema": "ferry.lab/1", "settings": lab.settings.as_dict(),
               "keeper": vars(lab.keeper), "hosts": [vars(host) for host in lab.hosts]}
    part = lab.folder / "lab.json.part"
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.rename(lab.folder / "lab.json")


def load(name):
    """The lab of this name if its state is complete, whether it lives or not; otherwise None."""
    check_name(name)
    folder = folder_of(name)
    try:
        content = json.loads((folder / "lab.json").read_text())
        return Lab(Settings(**content["settings"]), kernel.Process(**content["keeper"]),
                   tuple(kernel.Process(**host) for host in content["hosts"]), folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def dead_parts(lab):
    """Names of those processes of a lab that have ended."""
    members = [("the keeper", lab.keeper)]
    members += [(host_name(index), host) for index, host in enumerate(lab.hosts)]
    return [name for name, member in members if not kernel.is_alive(member)]


def load_living(name):
    """The lab of this name; a LabError where it is not up."""
    lab = load(name)
    if lab is None:
        raise LabError(f"there is no lab {name!r}; up now: {', '.join(known_names()) or 'none'}; "
                       f"fix: lab/up --name {name} --hosts N --rate RATE")
    dead = dead_parts(lab)
    if dead:
        raise LabError(f"lab {name!r} is broken: {', '.join(dead)} ended; "
                       f"fix: lab/down --name {name}, then lab/up", LAB_FAILED)
    return lab


def keepers():
    """(name of the lab, process) for each process that holds a lab: keepers and first processes
    of hosts, found by their command lines, so that it needs no state."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")[:-1]
        except OSError:
            continue
        member = kernel.process(int(entry))
        if member and len(words) > 2 and words[-2] == KEEPER_MARK.encode():
            yield words[-1].decode(errors="replace"), member


def known_names():
    """Labs of which a process or a folder is left."""
    names = {name for name, _ in keepers()}
    with contextlib.suppress(OSError):
        names |= {path.name for path in base_folder().iterdir() if path.is_dir()}
    return sorted(names)


def remove(name):
    """Ends and removes all of a lab, as far as there is any; True if there was something."""
    members = [member for found, member in keepers() if found == name]
    left = [member.pid for member in members if not kernel.kill_and_wait(member, KILL_SECONDS)]
    if left:
        raise LabError(f"process {left[0]} of lab {name!r} is still there {KILL_SECONDS} s after "
                       "SIGKILL; fix: see what the kernel waits for in it", LAB_FAILED)
    folder = folder_of(name)
    existed = folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise LabError(f"{folder} could not be removed; fix: see what is in it", LAB_FAILED)
    return bool(members) or existed
