#!/usr/bin/env python3
"""Runs every wrong start of docs/troubleshooting.md and looks for the message that the page promises.

Run: python3 tests/docs/start_test.py BUILD_DIR
Commands run in a folder of their own with the program but without modules, and with a module that is
no library. Those that need an MPI that is not there are left out, and named.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
MPIRUN = "mpirun.openmpi --oversubscribe --bind-to none"
LIMIT_S = 60
LEAST = 10  # commands on the page


def starts():
    """Command and message of every console block."""
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    for block in blocks:
        command, message = block.split("\n", 1)
        yield command.removeprefix("$ "), message.strip()


def prepare(folder, build):
    shutil.copy(build / "bin" / "ferry", folder / "ferry")
    (folder / "broken").mkdir()
    (folder / "broken" / "ferry_mpi_openmpi.so").touch()


def run(command, folder, build):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FERRY_")}
    environment |= {"PATH": f"{build / 'bin'}:{os.environ['PATH']}",
                    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = re.sub(r"(^| )mpirun ", rf"\1{MPIRUN} ", command)
    return subprocess.run(["timeout", str(LIMIT_S), "sh", "-c", command], cwd=folder,
                          env=environment, text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)


def find_fault(command, message, folder, build):
    """What is wrong with a start, or nothing."""
    ended = run(command, folder, build)
    if ended.returncode in (0, 124):
        return f"exit code {ended.returncode}"
    pattern = ".*".join(re.escape(part) for part in message.split("..."))
    told = [line for line in ended.stderr.splitlines() if line.startswith("ferry: ")]
    if len(told) != 1 or not re.fullmatch(pattern, told[0]):
        return f"promised: {message}\nit said: {told or ended.stderr}"
    return None


def main():
    build = Path(sys.argv[1]).resolve()
    has_mpi = shutil.which("mpirun.openmpi") and (build / "lib" / "ferry_mpi_openmpi.so").exists()
    found, faults = 0, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, build)
        for command, message in starts():
            found += 1
            if "mpirun" in command and not has_mpi:
                print(f"left out, there is no Open MPI: {command}")
                continue
            fault = find_fault(command, message, folder, build)
            print(f"{'FAILED' if fault else 'ok'}: {command}")
            if fault:
                faults.append(f"{command}\n{fault}")
    if found < LEAST:
        faults.append(f"{PAGE.name} has {found} commands; fix: it promises at least {LEAST}")
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
