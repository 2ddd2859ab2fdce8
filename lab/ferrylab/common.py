"""What all commands of the lab share: errors, the demands on the machine, and running programs.

Every refusal is a LabError; a command prints it as one line and ends with its status. Every program
that the lab runs has a time limit.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

REFUSED = 2       # wrong arguments, not root, a lab that is not there
LAB_FAILED = 125  # the lab could not do what it was asked to; as in `timeout` and `env`
TIMED_OUT = 124
COMMAND_SECONDS = 20
PACKAGES = {
    "ip": "iproute2", "tc": "iproute2",
    "mpirun.openmpi": "openmpi-bin", "mpirun.mpich": "mpich",
}


def program(module, *arguments):
    """Words of a command that runs main() of a module of this folder as a process of its own.

    It needs nothing of its environment, which may be that of a rank, and leaves no byte code.
    """
    folder = str(Path(__file__).resolve().parents[1])
    code = (f"import sys; sys.path.insert(0, {folder!r}); "
            f"from ferrylab import {module}; sys.exit({module}.main())")
    return [sys.executable or "/usr/bin/python3", "-S", "-B", "-c", code, *map(str, arguments)]


class LabError(Exception):
    """A refusal or a failure: `text` says what, what is allowed and the fix."""

    def __init__(self, text, status=REFUSED):
        super().__init__(text)
        self.status = status


def command_line(main):
    """Runs `main(arguments)` as a program: a LabError becomes one line and an exit status."""
    name = "lab/" + os.path.basename(sys.argv[0])
    try:
        return main(sys.argv[1:])
    except LabError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130


def require_root(command):
    if os.geteuid() != 0:
        raise LabError(f"needs root, because a lab is made of network, process and mount "
                       f"namespaces; nothing was changed; fix: sudo lab/{command} ...")


def require_tools(*names):
    """Debian keeps ip and tc where the path of some users does not lead."""
    folders = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    os.environ["PATH"] = folders
    missing = [name for name in names if not shutil.which(name)]
    if missing:
        packages = " ".join(sorted({PACKAGES.get(name, name) for name in missing}))
        raise LabError(f"missing here: {', '.join(missing)}; nothing was changed; "
                       f"fix: apt-get install {packages}")


def run(words, text="", enter=None):
    """Runs a program with `text` as its input and returns its output; its failure is a LabError.

    `enter` is called in the new process before the program starts, to change its namespaces.
    """
    try:
        result = subprocess.run(words, input=text, text=True, capture_output=True, check=False,
                                preexec_fn=enter, timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise LabError(f"'{' '.join(words)}' did not end within {COMMAND_SECONDS} s",
                       LAB_FAILED) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise LabError(f"'{' '.join(words)}' did not start: {error}", LAB_FAILED) from error
    if result.returncode != 0:
        said = " ".join((result.stderr or result.stdout).split())
        raise LabError(f"'{' '.join(words)}' failed with status {result.returncode}: {said}"
                       + (f"; its input: {text.strip()!r}" if text else ""), LAB_FAILED)
    return result.stdout
