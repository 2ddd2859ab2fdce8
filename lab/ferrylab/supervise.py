"""Runs one command to its end, to its time limit or to a signal, and leaves nothing of it behind.

The command runs with the login host's namespaces, in a session of its own. Two things end it with
`lab/run` even if that is killed: the kernel, which kills the command when its parent dies, and the
watcher, which kills what the command started.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from . import kernel
from .common import LAB_FAILED, TIMED_OUT, LabError, program

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WATCHED = ENDING + (signal.SIGCHLD,)
GRACE_SECONDS = 2     # between asking a launcher to end its job and SIGKILL
KEEPER_SECONDS = 0.5  # how often to look whether the lab still lives
WATCHER_SECONDS = 20
LOGIN_NAMESPACES = kernel.ALL_NAMESPACES & ~kernel.NEW_PID


@dataclass(frozen=True)
class Job:
    """A command, its environment, and the mark that its processes carry."""

    words: list
    environment: dict
    mark: str


def run_job(lab, job, timeout_s):
    """(exit status, seconds). Afterwards no process of the job is left, or it is a LabError."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # they are waited for, not handled
    reading, writing = os.pipe()
    words = program("watcher", lab.settings.name, job.mark)
    with subprocess.Popen(words, stdin=reading, start_new_session=True, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as watcher:
        os.close(reading)
        began = time.monotonic()
        try:
            with start(lab, job) as launcher:
                status = wait(lab, launcher, began + timeout_s)
        finally:
            seconds = time.monotonic() - began
            os.close(writing)
            left = end_watcher(watcher)
    if left:
        raise LabError("a process of the job is still there after SIGKILL; "
                       f"fix: lab/down --name {lab.settings.name}", LAB_FAILED)
    return status, seconds


def start(lab, job):
    parent, folder = os.getpid(), os.getcwd()

    def become_launcher():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        kernel.die_with_parent(parent)
        kernel.enter(lab.keeper, LOGIN_NAMESPACES)

    # A session of its own has no terminal to read from.
    keyboard = sys.stdin is None or sys.stdin.isatty()
    try:
        return subprocess.Popen(job.words, env=job.environment, preexec_fn=become_launcher,
                                cwd=folder, start_new_session=True,
                                stdin=subprocess.DEVNULL if keyboard else None)
    except (OSError, subprocess.SubprocessError) as error:
        raise LabError(f"{job.words[0]} did not start: {error}", LAB_FAILED) from error


def wait(lab, launcher, end):
    """Exit status of the job; what stops it early is said on stderr."""
    while launcher.poll() is None:
        left = end - time.monotonic()
        if left <= 0:
            return stop(launcher, "the time limit is over", TIMED_OUT)
        if not kernel.is_alive(lab.keeper):
            return stop(launcher, f"lab {lab.settings.name!r} was taken down", LAB_FAILED)
        received = signal.sigtimedwait(WATCHED, min(left, KEEPER_SECONDS))
        if received and received.si_signo in ENDING:
            name = signal.Signals(received.si_signo).name
            return stop(launcher, f"got {name}", 128 + received.si_signo)
    code = launcher.returncode
    return code if code >= 0 else 128 - code


def stop(launcher, why, status):
    """Asks the launcher to end its job, so that it can tidy up; kills it if it does not."""
    print(f"lab/run: {why}; ending the job", file=sys.stderr, flush=True)
    launcher.terminate()
    end = time.monotonic() + GRACE_SECONDS
    while launcher.poll() is None and time.monotonic() < end:
        signal.sigtimedwait([signal.SIGCHLD], 0.1)
    if launcher.poll() is None:
        launcher.kill()
    launcher.wait()
    return status


def end_watcher(watcher):
    """True if the watcher could not end all of the job."""
    try:
        return watcher.wait(WATCHER_SECONDS) != 0
    except subprocess.TimeoutExpired:
        watcher.kill()
        return True
