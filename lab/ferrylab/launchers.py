"""How a job is started: the words and the environment for Open MPI's and MPICH's mpirun.

Pure but for looking programs up. docs/lab.md gives the reason for each flag.
"""

import os
import shlex
import shutil

from .common import PACKAGES, LabError
from .settings import LINK, MANAGEMENT, host_name, shape_of
from .watcher import JOB_VARIABLE

EAGER_BYTES = 32 << 20
SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def ranks_of(text, num_hosts):
    """Ranks on each host, from "2" (on every host) or "3,5" (one number per host)."""
    words = text.split(",")
    counts = [int(word) if word.isdigit() else -1 for word in words]
    if len(counts) == 1:
        counts = counts * num_hosts
    if min(counts) < 0 or len(counts) != num_hosts or not 1 <= sum(counts) <= 4096:
        raise LabError(f"--ranks-per-host {text!r} does not fit this lab of {num_hosts} hosts; "
                       f"allowed: one number for all, or {num_hosts} numbers with commas, 0 for a "
                       "host without ranks; fix: for example --ranks-per-host 2")
    return counts


def write_hostfile(lab, counts, mpi):
    """Text of the file that says how many ranks go where; ranks are numbered host by host."""
    slots = "{} slots={}" if mpi == "openmpi" else "{}:{}"
    lines = [slots.format(host_name(index), count) for index, count in enumerate(counts) if count]
    path = lab.folder / f"hostfile.{mpi}"
    path.write_text("\n".join(lines) + "\n")
    return path


def openmpi_words(lab, counts, mca_defaults, own_cores):
    words = [
        "mpirun.openmpi", "--np", str(sum(counts)),
        "--hostfile", str(write_hostfile(lab, counts, "openmpi")),
        "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", str(lab.agent),
        "--leave-session-attached",
        "--mca", "pml", "ob1", "--mca", "btl", "self,tcp,vader",
        "--mca", "btl_tcp_if_include", LINK, "--mca", "oob_tcp_if_include", MANAGEMENT,
        "--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "0" if own_cores else "1",
    ]
    if not mca_defaults:
        for name in ("eager_limit", "rndv_eager_limit", "max_send_size"):
            words += ["--mca", f"btl_tcp_{name}", str(EAGER_BYTES)]
    return words


def mpich_words(lab, counts):
    return [
        "mpirun.mpich", "-n", str(sum(counts)), "-f", str(write_hostfile(lab, counts, "mpich")),
        "-launcher", "ssh", "-launcher-exec", str(lab.agent), "-bind-to", "none",
    ]


def launcher_words(lab, options, command):
    """The whole command line of a job that runs `command` as an MPI program."""
    counts = ranks_of(options.ranks_per_host, lab.settings.num_hosts)
    if options.mpi == "openmpi":
        words = openmpi_words(lab, counts, options.mca_defaults, options.own_cores)
    else:
        words = mpich_words(lab, counts)
    if not shutil.which(words[0]):
        raise LabError(f"{words[0]} is missing here; nothing was started; "
                       f"fix: apt-get install {PACKAGES[words[0]]}, or the other --mpi")
    return words + options.launcher_flag + command


def host_words(lab, index, command):
    """The command line that runs `command` on one host, without an MPI."""
    return [str(lab.agent), host_name(index), shlex.join(command)]


def environment(lab, mark):
    """What every process of a job gets, besides the caller's environment."""
    result = dict(os.environ, TMPDIR=str(lab.tmp), **{JOB_VARIABLE: mark})
    result.setdefault("PATH", SAFE_PATH)
    for name in ("FERRY_LAB_LINK_RATE", "FERRY_LAB_LINK_BURST"):
        result.pop(name, None)
    shape = shape_of(lab.settings.bits_per_s)
    if shape is not None:
        result["FERRY_LAB_LINK_RATE"] = str(shape.bits_per_s)
        result["FERRY_LAB_LINK_BURST"] = str(shape.burst_bytes)
    # A lab needs root; Open MPI wants to hear twice that this is meant.
    result.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    # MPICH's transport would otherwise choose among all interfaces.
    result.update(UCX_NET_DEVICES=LINK)
    return result
