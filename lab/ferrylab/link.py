"""lab/link: takes the link of one host up or down, as if its cable were plugged or pulled."""

import argparse

from . import network, state
from .common import require_root, require_tools
from .settings import host_name, parse_host


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="lab/link", description="Takes the link of a host up or down; needs root.")
    parser.add_argument("--name", default="lab0", help="name of the lab (default: lab0)")
    parser.add_argument("host", help="number or name of the host: 2 or host2")
    parser.add_argument("state", choices=("up", "down"))
    parsed = parser.parse_args(arguments)
    require_root("link")
    require_tools("ip")
    lab = state.load_living(parsed.name)
    index = parse_host(parsed.host, lab.settings.num_hosts)
    network.set_links(lab, [index], parsed.state)
    print(f"link of {host_name(index)} in lab {parsed.name!r} is {parsed.state}")
    return 0
