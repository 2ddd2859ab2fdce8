"""The remote shell of a lab: runs a command line on a host, as rsh and ssh do on a cluster.

Called as  agent.py NAME [OPTION...] HOST WORD...  by Open MPI's and MPICH's launchers (MPICH gives
options, such as -x, before the host) and by `lab/run --no-mpi`. Environment and working directory
go along; the exit status comes back.
"""

import os
import signal
import sys

from . import kernel, state
from .common import LAB_FAILED, LabError
from .settings import parse_host

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main():
    try:
        lab, index, command = parse(sys.argv[1:])
        return run_on(lab.hosts[index], command)
    except (LabError, OSError) as error:
        print(f"lab/run: agent: {error}", file=sys.stderr)
        return LAB_FAILED


def parse(words):
    """(lab, index of the host, line for the shell)"""
    name, rest = words[0], words[1:]
    while rest and rest[0].startswith("-"):
        rest = rest[1:]
    if len(rest) < 2:
        raise LabError(f"no host or no command in {words}; the launcher of an MPI calls it as: "
                       "agent NAME [OPTION...] HOST COMMAND")
    lab = state.load_living(name)
    return lab, parse_host(rest[0], lab.settings.num_hosts), " ".join(rest[1:])


def run_on(host, command):
    """Waits for the command and hands signals on to it."""
    kernel.enter(host, kernel.ALL_NAMESPACES)
    child = os.fork()  # only a child is in the host's PID namespace
    if child == 0:
        os.execv("/bin/sh", ["sh", "-c", command])
    for number in FORWARDED:
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
