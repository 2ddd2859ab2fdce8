"""Ends what is left of a job when `lab/run` has ended, whichever way it ended.

Called as  watcher.py NAME JOB  with the reading end of a pipe as its input; `lab/run` holds the other
end, and the kernel closes that even after SIGKILL. Every process of a job carries JOB in its
environment. It exits with 0 once none is left. It stands outside of the hosts, so that nothing that
is done to a host's processes ends it.
"""

import os
import signal
import sys

from . import kernel, state

JOB_VARIABLE = "FERRY_LAB_JOB"
END_SECONDS = 8


def main():
    name, job = sys.argv[1:3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    lab = state.load(name)
    hosts = [host.pid for host in lab.hosts if kernel.is_alive(host)] if lab else []
    ended = kernel.wait_until(lambda: not kill_all(processes_of(job, hosts)), END_SECONDS)
    return 0 if ended else 1


def kill_all(pids):
    """Number of processes that were there to kill; a stopped process ends by SIGKILL, too."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return len(pids)


def processes_of(job, hosts):
    """Processes that carry the mark of the job, all below them, and orphans on hosts that carry no
    mark: a daemon may have cleared its environment. What `lab/up` started is not among them."""
    parents, marks = {}, {}
    for entry in os.listdir("/proc"):
        fields = kernel.stat_fields(int(entry)) if entry.isdigit() else None
        if fields and fields[0] not in "ZX":
            parents[int(entry)] = int(fields[1])
            marks[int(entry)] = mark_of(entry)
    found = {pid for pid, mark in marks.items() if mark == job}
    found |= {pid for pid, parent in parents.items()
              if parent in hosts and pid not in hosts and not marks[pid]}
    grown = True
    while grown:
        below = {pid for pid, parent in parents.items() if parent in found} - found
        found |= below
        grown = bool(below)
    return found - {os.getpid()}


def mark_of(pid):
    """The job that a process belongs to, or None."""
    start = f"{JOB_VARIABLE}=".encode()
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            for entry in file.read().split(b"\0"):
                if entry.startswith(start):
                    return entry[len(start):].decode()
    except OSError:
        pass
    return None
