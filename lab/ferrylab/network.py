"""The links of a lab: making them, taking one down, and reading their counters.

Inside the keeper's network namespace stand two bridges. `links` joins one port per host, limited at
both ends; it has no address. `mgmt0` joins the hosts with the login host, where launchers run, but not
with each other (its ports are isolated), so that launching costs no bytes on the links and a host
whose link is down can still be told to end.
"""

import json

from . import kernel
from .common import LAB_FAILED, LabError, run
from .settings import (LINK, LOGIN_ADDRESS, MANAGEMENT, MTU_BYTES, link_address,
                       management_address, shape_of)


def run_at(member, words, text=""):
    """Runs a program of the machine in the network namespace of a process."""
    return run(words, text, enter=lambda: kernel.enter(member, kernel.NEW_NET))


def link_port(index):
    return f"port{index}"


def make_links(keeper, hosts, bits_per_s):
    """All links of a lab, up and limited."""
    run_at(keeper, ["ip", "-batch", "-"], login_batch(hosts))
    for index, host in enumerate(hosts):
        run_at(host, ["ip", "-batch", "-"], host_batch(index))
        run_at(host, ["tc", "-batch", "-"], queue_line(LINK, bits_per_s))
    lines = [queue_line(link_port(index), bits_per_s) for index in range(len(hosts))]
    run_at(keeper, ["tc", "-batch", "-"], "".join(lines))


def login_batch(hosts):
    lines = ["link set lo up", "link add links type bridge", f"link add {MANAGEMENT} type bridge",
             f"addr add {LOGIN_ADDRESS}/24 dev {MANAGEMENT}"]
    for index, host in enumerate(hosts):
        port, management = link_port(index), f"mgmt-port{index}"
        lines += [
            f"link add {port} mtu {MTU_BYTES} type veth "
            f"peer name {LINK} mtu {MTU_BYTES} netns {host.pid}",
            f"link set {port} master links up",
            f"link add {management} type veth peer name {MANAGEMENT} netns {host.pid}",
            f"link set {management} master {MANAGEMENT} up",
            f"link set {management} type bridge_slave isolated on",
        ]
    lines += [f"link set links mtu {MTU_BYTES} up", f"link set {MANAGEMENT} up"]
    return "\n".join(lines) + "\n"


def host_batch(index):
    lines = ["link set lo up",
             f"addr add {link_address(index)}/24 dev {LINK}", f"link set {LINK} up",
             f"addr add {management_address(index)}/24 dev {MANAGEMENT}",
             f"link set {MANAGEMENT} up"]
    return "\n".join(lines) + "\n"


def queue_line(device, bits_per_s):
    """A link without a limit gets a plain queue, since only a queue counts its bytes."""
    shape = shape_of(bits_per_s)
    if shape is None:
        return f"qdisc replace dev {device} root pfifo limit 10000\n"
    return (f"qdisc replace dev {device} root tbf rate {shape.bits_per_s}bit "
            f"burst {shape.burst_bytes}b latency {shape.latency_ms}ms\n")


def set_links(lab, indices, state):
    """Takes links of hosts up or down, as if their cables were plugged or pulled."""
    lines = [f"link set {link_port(index)} {state}\n" for index in indices]
    run_at(lab.keeper, ["ip", "-batch", "-"], "".join(lines))


def queues_at(member):
    """Device -> counters of its root queue, as tc prints them."""
    listed = json.loads(run_at(member, ["tc", "-s", "-j", "qdisc", "show"]))
    return {queue["dev"]: queue for queue in listed if queue.get("root")}


def read_links(lab):
    """Per host what has crossed its link since `lab/up`, headers of Ethernet, IP and TCP included.

    `sent` is counted at the host's end, `received` where the bridge sends to the host. Both queues
    count packets as they leave, that is after the limit.
    """
    towards_hosts = queues_at(lab.keeper)
    return [link_counters(queues_at(host), towards_hosts, index)
            for index, host in enumerate(lab.hosts)]


def link_counters(at_host, towards_hosts, index):
    try:
        sent, received = at_host[LINK], towards_hosts[link_port(index)]
    except KeyError as error:
        raise LabError(f"no queue at {error} of host{index}, so nothing counts its bytes; "
                       "fix: lab/down, then lab/up", LAB_FAILED) from error
    counters = {}
    for name, queue in (("sent", sent), ("received", received)):
        counters.update({f"{name}_bytes": queue["bytes"], f"{name}_packets": queue["packets"],
                         f"{name}_drops": queue["drops"]})
    counters["burst_bytes"] = sent.get("options", {}).get("burst", 0)
    return counters
