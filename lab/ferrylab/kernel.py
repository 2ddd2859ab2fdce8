"""Calls of the kernel that Python 3.11 has no name for: namespaces, mounts, the end of a parent.

A process is named by a Process: its id and its start time, so that an id that the kernel has given
to another process since is never taken for it.
"""

import ctypes
import os
import select
import signal
import time
from dataclasses import dataclass

NEW_MOUNT = 0x00020000
NEW_HOST_NAME = 0x04000000
NEW_IPC = 0x08000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000
ALL_NAMESPACES = NEW_MOUNT | NEW_HOST_NAME | NEW_IPC | NEW_PID | NEW_NET
NAMESPACE_FILES = ("mnt", "uts", "ipc", "pid", "net")

_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_PARENT_DEATH_SIGNAL = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result, what):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(namespaces):
    """Gives the caller new namespaces; a new PID namespace begins with its next child."""
    _checked(_libc.unshare(namespaces), "unshare")


def set_host_name(name):
    _checked(_libc.sethostname(name.encode(), len(name.encode())), "sethostname")


def make_mounts_private():
    """No mount made from here on is seen in any other mount namespace."""
    _checked(_libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None), "mount --make-rprivate")


def mount(kind, folder, options=""):
    _checked(_libc.mount(kind.encode(), folder.encode(), kind.encode(), 0, options.encode()),
             f"mount -t {kind} {folder}")


def bind(source, target):
    _checked(_libc.mount(source.encode(), target.encode(), None, _BIND, None),
             f"mount --bind {source} {target}")


def die_with_parent(parent):
    """The caller gets SIGKILL when `parent`, the process that forked it, ends."""
    _checked(_libc.prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


@dataclass(frozen=True)
class Process:
    """A process, for as long as it lives: its id in the machine's PID namespace, its start time."""

    pid: int
    start: int


def stat_fields(pid):
    """Fields of /proc/PID/stat from the state on, or None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def process(pid):
    """The process that has this id now, or None."""
    fields = stat_fields(pid)
    return Process(pid, int(fields[19])) if fields else None


def is_alive(member):
    fields = stat_fields(member.pid)
    return bool(fields) and int(fields[19]) == member.start and fields[0] not in "ZX"


def open_process(member):
    """A file descriptor for the process, or None where it has ended."""
    try:
        descriptor = os.pidfd_open(member.pid)
    except OSError:
        return None
    if is_alive(member):
        return descriptor
    os.close(descriptor)
    return None


def kill_and_wait(member, seconds):
    """Ends a process; True once it is gone, with all that its PID namespace held."""
    descriptor = open_process(member)
    if descriptor is None:
        return True
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    except ProcessLookupError:
        return True
    finally:
        os.close(descriptor)


def enter(member, namespaces):
    """Moves the caller into namespaces of a process; NEW_PID holds for its next child.

    The working directory stays where the same path exists there.
    """
    folder = os.getcwd()
    descriptor = open_process(member)
    if descriptor is None:
        raise OSError(f"process {member.pid} of the lab has ended")
    try:
        _checked(_libc.setns(descriptor, namespaces), "setns")
    finally:
        os.close(descriptor)
    if namespaces & NEW_MOUNT:
        os.chdir(folder)


def enter_file(descriptor, namespace):
    """Moves the caller into the namespace that an open file of /proc/PID/ns stands for."""
    _checked(_libc.setns(descriptor, namespace), "setns")


def namespace_ids(member):
    """Kind of namespace -> its identity, for example "net:[4026531840]"."""
    return {kind: os.readlink(f"/proc/{member.pid}/ns/{kind}") for kind in NAMESPACE_FILES}


def wait_until(is_true, seconds):
    """Asks again and again, up to a limit; the last answer."""
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
