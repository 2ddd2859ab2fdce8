"""lab/up: makes a lab, proves that its hosts are isolated, and leaves it running."""

import argparse
import os
import shlex
import subprocess

from . import kernel, network, proof, state
from .common import LAB_FAILED, LabError, program, require_root, require_tools
from .settings import (LOGIN, hosts_file, host_name, link_address, make_settings,
                       management_address, rate_text, shape_of)

START_SECONDS = 20


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="lab/up", description="Makes hosts with rate-limited links on this machine; needs root.")
    parser.add_argument("--name", default="lab0", help="name of the lab (default: lab0)")
    parser.add_argument("--hosts", type=int, required=True, metavar="N", help="number of hosts")
    parser.add_argument("--rate", required=True,
                        help="rate of a link per direction, as 100mbit or 1gbit; none: no limit")
    parsed = parser.parse_args(arguments)
    return make_settings(parsed.name, parsed.hosts, parsed.rate)


def main(arguments):
    settings = parse(arguments)
    require_root("up")
    require_tools("ip", "tc")
    with state.lock():
        if already_up(settings):
            print(f"{describe(settings)} is up already")
            return 0
        state.remove(settings.name)  # what a crash left
        try:
            make(settings)
        except BaseException:
            state.remove(settings.name)
            raise
    print(f"{describe(settings)} is up: isolation proven; state in {state.folder_of(settings.name)}")
    return 0


def describe(settings):
    shape = shape_of(settings.bits_per_s)
    limit = "no limit" if shape is None else (f"{rate_text(shape.bits_per_s)} per direction, "
                                              f"burst {shape.burst_bytes} bytes")
    return f"lab {settings.name!r} ({settings.num_hosts} hosts, links: {limit})"


def already_up(settings):
    """True for a living lab of the same settings; one of others is a LabError."""
    lab = state.load(settings.name)
    if lab is None or state.dead_parts(lab):
        return False
    if lab.settings != settings:
        raise LabError(f"lab {settings.name!r} is up with {lab.settings}, not with {settings}; "
                       f"fix: lab/down --name {settings.name} first, or another --name")
    return True


def make(settings):
    """The keeper lives on only once all is made, proven and written down."""
    folder = write_files(settings)
    report_read, report_write = os.pipe()
    commit_read, commit_write = os.pipe()
    words = program("keeper", report_write, commit_read, folder, settings.num_hosts,
                    state.KEEPER_MARK, settings.name)
    with subprocess.Popen(words, pass_fds=(report_write, commit_read), start_new_session=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as starter:
        os.close(report_write)
        os.close(commit_read)
        try:
            reported = read_report(report_read)
            starter.wait(START_SECONDS)
            lab = to_lab(settings, folder, reported)
            network.make_links(lab.keeper, lab.hosts, settings.bits_per_s)
            proof.prove(lab)
            state.save(lab)
            os.write(commit_write, b"1")
        finally:
            os.close(commit_write)


def write_files(settings):
    """Files that hosts need from their first moment on."""
    folder = state.folder_of(settings.name)
    folder.mkdir(mode=0o755)
    (folder / "tmp").mkdir()
    (folder / "hosts").write_text(hosts_file(settings.num_hosts, link_address))
    (folder / "hosts.login").write_text(hosts_file(settings.num_hosts, management_address))
    agent = folder / "agent"
    # MPI splits the agent's command at spaces; this path has none.
    agent.write_text(f'#!/bin/sh\nexec {shlex.join(program("agent", settings.name))} "$@"\n')
    agent.chmod(0o755)
    return folder


def read_report(descriptor):
    """Name -> process id, from the keeper and the hosts; ends when the last of them closed it."""
    with os.fdopen(descriptor) as pipe:
        lines = [line.split(maxsplit=1) for line in pipe.read().splitlines()]
    errors = [text.strip() for name, text in lines if name == "error"]
    if errors:
        raise LabError(f"a host could not be made: {errors[0]}; it needs the right to make "
                       "namespaces and mounts; fix: see docs/lab.md, 'What the kernel must have'",
                       LAB_FAILED)
    return {name: int(text) for name, text in lines}


def to_lab(settings, folder, reported):
    names = [LOGIN] + [host_name(index) for index in range(settings.num_hosts)]
    found = {name: kernel.process(reported[name]) for name in names if name in reported}
    missing = [name for name in names if not found.get(name)]
    if missing:
        raise LabError(f"no process of {', '.join(missing)}: it ended while the lab was made; "
                       "fix: see what ended it (memory?), then lab/up again", LAB_FAILED)
    hosts = tuple(found[name] for name in names[1:])
    return state.Lab(settings, found[LOGIN], hosts, folder)


