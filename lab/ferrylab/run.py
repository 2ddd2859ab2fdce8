"""lab/run: runs a command as one MPI job over the hosts of a lab, or on one host without an MPI."""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sys

from . import launchers, network, state, supervise
from .common import LAB_FAILED, LabError, require_root, require_tools
from .settings import host_name, parse_host

MAX_SECONDS = 7 * 24 * 3600


def seconds(text):
    value = float(text)
    if not 0 < value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is not in 0 (excluded) .. {MAX_SECONDS}")
    return value


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="lab/run", usage="lab/run [OPTION...] -- COMMAND [ARGUMENT...]",
        description="Runs a command on the hosts of a lab; needs root. Its exit status is the "
        "command's; 124: time limit; 125: the lab failed; 2: refused.")
    add = parser.add_argument
    add("--name", default="lab0", help="name of the lab (default: lab0)")
    add("--ranks-per-host", default="1", metavar="N[,N...]",
        help="ranks on every host, or a number for each host (default: 1)")
    add("--mpi", choices=("openmpi", "mpich"), default="openmpi", help="default: openmpi")
    add("--mca-defaults", action="store_true", help="Open MPI's own limits for eager messages")
    add("--own-cores", action="store_true",
        help="Open MPI keeps the core while it waits, as where each rank has one of its own")
    add("--launcher-flag", action="append", default=[], metavar="FLAG",
        help="one more word for mpirun, for example --launcher-flag=--enable-recovery; repeatable")
    add("--timeout", type=seconds, default=3600.0, metavar="S",
        help="end the job after S seconds (default: 3600)")
    add("--report", metavar="FILE", help="where the line of JSON with link_bytes goes, instead of "
        "stderr")
    add("--expect-bytes", type=int, default=0, metavar="N",
        help="fail if the hosts have sent fewer bytes over their links, all together")
    add("--no-mpi", action="store_true", help="run the command on one host, without an MPI")
    add("--host", help="that host: 2 or host2")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("no command; fix: lab/run [OPTION...] -- COMMAND")
    if options.no_mpi != (options.host is not None):
        parser.error("--no-mpi and --host go together; fix: give both, or neither")
    return options


def main(arguments):
    options = parse(arguments)
    require_root("run")
    require_tools("tc")
    lab = state.load_living(options.name)
    require_command(options.command[0])
    if options.no_mpi:
        words = launchers.host_words(lab, parse_host(options.host, len(lab.hosts)), options.command)
        return run_words(lab, words, options.timeout)[0]
    with one_job(lab):
        return run_measured(lab, options)


def require_command(command):
    """Hosts see the same files as this machine, so it can be refused here, in one line."""
    if not shutil.which(command):
        raise LabError(f"{command}: no such program; nothing was started; "
                       "fix: give a path that begins with / or ./, or a name on PATH")


@contextlib.contextmanager
def one_job(lab):
    """Two jobs at once would count each other's bytes."""
    with open(lab.folder / "job.lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LabError(f"lab {lab.settings.name!r} runs another MPI job; nothing was started; "
                           "fix: wait for its end, or make another lab", LAB_FAILED) from error
        yield


def run_words(lab, words, timeout_s):
    mark = f"{lab.settings.name}.{os.getpid()}"
    environment = launchers.environment(lab, mark)
    return supervise.run_job(lab, supervise.Job(words, environment, mark), timeout_s)


def run_measured(lab, options):
    words = launchers.launcher_words(lab, options, options.command)
    before = network.read_links(lab)
    status, took_s = run_words(lab, words, options.timeout)
    after = network.read_links(lab)
    links = [difference(index, *pair) for index, pair in enumerate(zip(before, after))]
    report = {
        "schema": "ferry.lab.run/1", "lab": lab.settings.name, "status": status,
        "seconds": round(took_s, 6), "mpi": options.mpi,
        "link_bits_per_s": lab.settings.bits_per_s or None, "link_bytes": links,
        "launcher": words[:len(words) - len(options.command)], "command": options.command,
    }
    write_report(json.dumps(report), options.report)
    sent = sum(link["sent_bytes"] for link in links)
    if status == 0 and sent < options.expect_bytes:
        raise LabError(f"{sent} bytes crossed the links, fewer than --expect-bytes "
                       f"{options.expect_bytes}: ranks met without using them, or the number is "
                       "wrong; fix: see docs/lab.md, 'Reading link_bytes'", LAB_FAILED)
    return status


def difference(index, before, after):
    """Counters of one link for the time of the job; the burst allowance is no counter."""
    result = {"host": host_name(index)}
    for name, value in after.items():
        result[name] = value if name == "burst_bytes" else value - before[name]
    return result


def write_report(line, path):
    if path is None:
        print(line, file=sys.stderr)
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise LabError(f"--report {path}: {error.strerror}; fix: give a file that can be written",
                       LAB_FAILED) from error
