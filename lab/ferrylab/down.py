"""lab/down: removes a lab, or all labs, as far as there is anything; also after a crash."""

import argparse

from . import state
from .common import require_root
from .settings import check_name


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="lab/down", description="Removes a lab with everything that runs in it; needs root.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--name", default="lab0", help="name of the lab (default: lab0)")
    which.add_argument("--all", action="store_true", help="all labs of this machine")
    parsed = parser.parse_args(arguments)
    check_name(parsed.name)
    require_root("down")
    with state.lock():
        for name in state.known_names() if parsed.all else [parsed.name]:
            removed = state.remove(name)
            print(f"lab {name!r} is removed" if removed else f"there is no lab {name!r}")
    return 0
