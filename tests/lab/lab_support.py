"""What the tests of the lab share: running its commands, labs that go with the test, skipping.

Each test has labs with names of their own, so that tests run side by side, beside a user's labs too.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77
COMMAND_SECONDS = 60
NOBODY = 65534

sys.path.insert(0, str(ROOT / "lab"))

from ferrylab import kernel, state  # noqa: E402

# What a kernel must have, tried in a network namespace that goes with the command.
TRIAL = ("ip link add trial-br type bridge && ip link add trial type veth peer name trial-peer && "
         "ip link set trial master trial-br && "
         "tc qdisc add dev trial root tbf rate 1gbit burst 256kb latency 50ms")


def fail(text):
    print(f"lab_test: {text}")
    sys.exit(1)


def skip(reason):
    print(f"lab_test: skipped: {reason}")
    sys.exit(SKIPPED)


def need_lab():
    """Ends the test as skipped where this machine cannot have a lab."""
    if os.geteuid() != 0:
        skip("not root; a lab is made of namespaces")
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    for tool in ("ip", "tc", "unshare"):
        if not shutil.which(tool):
            skip(f"no {tool}; apt-get install iproute2 util-linux")
    trial = subprocess.run(["unshare", "--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "sh",
                            "-c", TRIAL], capture_output=True, text=True, check=False)
    if trial.returncode != 0:
        skip(f"no namespaces, veth, bridge or tbf here: {trial.stderr.strip()}")


def need_mpi(mpi):
    for tool in (f"mpirun.{mpi}", f"mpicc.{mpi}"):
        if not shutil.which(tool):
            skip(f"no {tool}; apt-get install openmpi-bin libopenmpi-dev mpich libmpich-dev")


def words(command, *arguments):
    return [sys.executable, "-S", "-B", str(ROOT / "lab" / command), *map(str, arguments)]


def lab_as_nobody(command, *arguments):
    """Runs a copy of a command as a user without rights: (exit status, stderr).

    A copy, and perhaps another Python, since that user may not see what lies in root's home.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "lab", Path(folder) / "lab")
        os.chmod(folder, 0o755)
        line = [str(Path(folder) / "lab" / command), *map(str, arguments)]
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        for python in (sys.executable, "/usr/bin/python3"):
            try:
                result = subprocess.run([python, *line], text=True, capture_output=True, check=False,
                                        timeout=COMMAND_SECONDS, cwd="/", **user)
            except (PermissionError, FileNotFoundError):
                continue
            print("+ as nobody:", command, *arguments, flush=True)
            return result.returncode, result.stderr
    return skip(f"a user without rights cannot run {sys.executable} nor /usr/bin/python3")


def lab(command, *arguments, expect=0, **options):
    """Runs a command of the lab and returns (stdout, stderr); another exit status fails the test."""
    line = words(command, *arguments)
    print("+", command, *arguments, flush=True)
    result = subprocess.run(line, text=True, capture_output=True, check=False,
                            timeout=COMMAND_SECONDS, stdin=subprocess.DEVNULL, **options)
    if result.returncode != expect:
        fail(f"exit status {result.returncode}, expected {expect}:\n{result.stdout}{result.stderr}")
    return result.stdout, result.stderr


def lab_name(suffix=""):
    return f"test-{os.getpid()}{suffix}"


@contextlib.contextmanager
def lab_up(num_hosts=2, rate="1gbit", name=None):
    """A lab for the time of the block; yields its name. Nothing of it is left afterwards."""
    name = name or lab_name()
    try:
        lab("up", "--name", name, "--hosts", num_hosts, "--rate", rate)
        yield name
    finally:
        lab("down", "--name", name)
    expect_gone(name)


def expect_gone(name):
    left = [member.pid for found, member in state.keepers() if found == name]
    if left or state.folder_of(name).exists():
        fail(f"of lab {name} are left: processes {left}, folder {state.folder_of(name)}")


def namespaces_of(name):
    """Identities of all namespaces that a lab's processes are in, and this test is not."""
    own = set(kernel.namespace_ids(kernel.process(os.getpid())).values())
    found = set()
    for lab_of, member in state.keepers():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if lab_of == name:
                found |= set(kernel.namespace_ids(member).values())
    return found - own


def namespaces_in_use():
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found |= {os.readlink(f"/proc/{entry}/ns/{kind}") for kind in kernel.NAMESPACE_FILES}
    return found


def processes_in_hosts(name):
    """Command lines in the hosts of a lab, without the first process of each and the dead."""
    loaded = state.load(name)
    first = {host.pid for host in loaded.hosts}
    inside = {os.readlink(f"/proc/{pid}/ns/pid") for pid in first}
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, AttributeError):  # it ended meanwhile
            if (int(entry) not in first and kernel.is_alive(kernel.process(int(entry)))
                    and os.readlink(f"/proc/{entry}/ns/pid") in inside):
                found.append(Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" "))
    return found


def run_reported(*arguments, expect=0):
    """lab/run with its report: (stdout, report)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        stdout, _ = lab("run", "--report", path, *arguments, expect=expect)
        return stdout, json.loads(path.read_text())
