"""Proves that the hosts of a lab are as separate as machines. `lab/up` ends with it.

Without this, ranks may meet where no cluster lets them: an MPI that finds the other "host" through
shared memory never touches the link, and every figure of the lab is wrong.
"""

import contextlib
import json
import os
import select
import socket
import time

from . import kernel, network
from .common import LAB_FAILED, LabError
from .settings import (LINK, LOGIN, LOGIN_ADDRESS, MANAGEMENT, host_name, link_address,
                       management_address)

PORT = 7777
PROBE_BYTES = 4096
ANSWER_SECONDS = 2.0
SILENCE_SECONDS = 0.2
MARK = "ferry-lab-proof"


def prove(lab):
    """Every claim in turn; the first that does not hold is a LabError."""
    prove_namespaces(lab)
    prove_views(lab)
    prove_network(lab)


def failed(lab, text):
    raise LabError(f"lab {lab.settings.name!r} does not isolate its hosts: {text}; it was taken "
                   "down again; fix: see docs/lab.md, 'What the kernel must have'", LAB_FAILED)


def members(lab):
    """(name, process) of the login host and of each host."""
    return [(LOGIN, lab.keeper)] + [(host_name(index), host)
                                    for index, host in enumerate(lab.hosts)]


def prove_namespaces(lab):
    owner = {identity: "this machine" for identity in
             kernel.namespace_ids(kernel.process(os.getpid())).values()}
    for name, member in members(lab):
        for kind, identity in kernel.namespace_ids(member).items():
            if identity in owner:
                failed(lab, f"{name} and {owner[identity]} share the {kind} namespace {identity}")
            owner[identity] = name


def answer_inside(member, question):
    """What a function returns, through JSON, when it is called inside a host."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kernel.enter(member, kernel.ALL_NAMESPACES & ~kernel.NEW_PID)
            os.write(writing, json.dumps(question()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def interfaces_up():
    """Some kernels give every network namespace tunnels that are down: those lead nowhere."""
    for name in sorted(os.listdir("/sys/class/net")):
        with open(f"/sys/class/net/{name}/flags", encoding="ascii") as flags:
            if int(flags.read(), 16) & 1:
                yield name


def view(folders):
    """What a process sees that looks around in a host."""
    return {
        "name": os.uname().nodename,
        "processes": sorted(word for word in os.listdir("/proc") if word.isdigit()),
        "interfaces": list(interfaces_up()),
        "files": {folder: sorted(file for file in os.listdir(folder) if file.startswith(MARK))
                  for folder in folders},
    }


def prove_views(lab):
    """Each host sees its own name, first process, interfaces and files, and nothing of the others:
    a file of its name is put into the memory of each of them."""
    folders = ["/dev/shm", str(lab.tmp)]
    for name, member in members(lab):
        answer_inside(member, lambda: [make_file(f"{folder}/{MARK}-{name}") for folder in folders])
    views = {name: answer_inside(member, lambda: view(folders)) for name, member in members(lab)}
    for name, member in members(lab):
        answer_inside(member, lambda: [os.unlink(f"{folder}/{MARK}-{name}") for folder in folders])
    for name, seen in views.items():
        if seen is None:
            failed(lab, f"{name} could not be entered")
        if seen["name"] != name:
            failed(lab, f"{name} has the host name {seen['name']!r}")
        for folder, files in seen["files"].items():
            if files != [f"{MARK}-{name}"]:
                failed(lab, f"in {folder} of {name} stand {' '.join(files) or 'no files'}")
        if name != LOGIN and seen["processes"] != ["1"]:
            failed(lab, f"{name} sees the processes {' '.join(seen['processes'])}")
        if name != LOGIN and seen["interfaces"] != sorted(["lo", LINK, MANAGEMENT]):
            failed(lab, f"{name} has the interfaces {' '.join(seen['interfaces'])}")


def make_file(path):
    with open(path, "w", encoding="utf-8") as file:
        file.write(MARK)


def socket_at(member):
    """A datagram socket of the network namespace of a process; it stays there.

    The calling process has one thread, so entering and coming back is nobody else's concern.
    """
    with open("/proc/self/ns/net", encoding="utf-8") as own:
        kernel.enter(member, kernel.NEW_NET)
        try:
            made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            made.bind(("0.0.0.0", PORT))
            made.setblocking(False)
            return made
        finally:
            kernel.enter_file(own.fileno(), kernel.NEW_NET)


def arrivals(sockets, sends, seconds):
    """Sends a datagram for each (socket, address) and returns who got something from which address:
    {(index of the receiving socket, address of the sender)}. Waits for as many as were sent."""
    num_sent = 0
    for index, address in sends:
        try:
            sockets[index].sendto(bytes(PROBE_BYTES), (address, PORT))
            num_sent += 1
        except OSError:
            pass  # there is no way: that is an answer, too
    got, end = set(), time.monotonic() + seconds
    while len(got) < num_sent and time.monotonic() < end:
        readable, _, _ = select.select(sockets, [], [], max(0.0, end - time.monotonic()))
        for ready in readable:
            try:
                _, (sender, _) = ready.recvfrom(2 * PROBE_BYTES)
                got.add((sockets.index(ready), sender))
            except OSError:
                pass  # a report that an earlier datagram did not arrive
    return got


def drain(sockets):
    """Datagrams of the proof that waited for a link would else be counted in the first job."""
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end:
        readable, _, _ = select.select(sockets, [], [], SILENCE_SECONDS)
        if not readable:
            break
        for ready in readable:
            with contextlib.suppress(OSError):
                ready.recvfrom(2 * PROBE_BYTES)


def neighbours(lab):
    """Every host with the next one, both ways."""
    count = len(lab.hosts)
    pairs = {(index, (index + 1) % count) for index in range(count) if count > 1}
    return sorted(pairs | {(second, first) for first, second in pairs})


def prove_network(lab):
    sockets = [socket_at(host) for host in lab.hosts] + [socket_at(lab.keeper)]
    try:
        prove_management(lab, sockets)
        prove_links(lab, sockets)
    finally:
        for each in sockets:
            each.close()


def prove_management(lab, sockets):
    """The login host reaches every host; no host reaches another one that way."""
    count = len(lab.hosts)
    sends = [(count, management_address(index)) for index in range(count)]
    got = arrivals(sockets, sends, ANSWER_SECONDS)
    for index in range(count):
        if (index, LOGIN_ADDRESS) not in got:
            failed(lab, f"the login host does not reach {host_name(index)}")
    sends = [(source, management_address(target)) for source, target in neighbours(lab)]
    for target, sender in arrivals(sockets, sends, SILENCE_SECONDS):
        failed(lab, f"{host_name(target)} is reached from {sender} around its link")


def prove_links(lab, sockets):
    """Hosts reach each other, both queues on the way count it, and not while links are down."""
    pairs = neighbours(lab)
    sends = [(source, link_address(target)) for source, target in pairs]
    before = network.read_links(lab)
    got = arrivals(sockets, sends, ANSWER_SECONDS)
    after = network.read_links(lab)
    for source, target in pairs:
        if (target, link_address(source)) not in got:
            failed(lab, f"{host_name(source)} does not reach {host_name(target)} over the link")
        for index, counter in ((source, "sent_bytes"), (target, "received_bytes")):
            if after[index][counter] - before[index][counter] < PROBE_BYTES:
                failed(lab, f"{counter} of {host_name(index)} did not count what crossed its link")
    every_host = range(len(lab.hosts))
    network.set_links(lab, every_host, "down")
    got = arrivals(sockets, sends, SILENCE_SECONDS)
    network.set_links(lab, every_host, "up")
    for target, sender in got:
        failed(lab, f"{host_name(target)} is reached from {sender} while their links are down")
    if len(arrivals(sockets, sends, ANSWER_SECONDS)) < len(pairs):
        failed(lab, "links that were down did not come up again")
    drain(sockets)
