"""ferry.init under both MPIs, with and without mpi4py, and how it ends."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "layer.py"
LAUNCHERS = {
    "openmpi": ["mpirun.openmpi", "--oversubscribe", "--bind-to", "none", "--mca",
                "mpi_yield_when_idle", "1", "-n", "4"],
    "mpich": ["mpiexec.mpich", "-n", "4"],
}


def run(mpi, *words):
    launcher = LAUNCHERS[mpi]
    if shutil.which(launcher[0]) is None or mpi not in os.environ.get("FERRY_TEST_MPIS", ""):
        pytest.skip(f"no {launcher[0]}, or no module for it")
    return subprocess.run(
        [*launcher, sys.executable, "-B", str(PROGRAM), *words], capture_output=True, text=True,
        timeout=110, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})


def mpi4py_mpi():
    """Which MPI mpi4py is built with, asked in another process: asking starts MPI."""
    said = subprocess.run(
        [sys.executable, "-c", "import mpi4py; mpi4py.rc.initialize = False\n"
         "from mpi4py import MPI; print(MPI.Get_library_version())"],
        capture_output=True, text=True, timeout=30, check=False)
    return next((mpi for word, mpi in (("Open MPI", "openmpi"), ("MPICH", "mpich"))
                 if word in said.stdout), None)


@pytest.mark.parametrize("words", ((), ("split",)))
@pytest.mark.parametrize("mpi", LAUNCHERS)
def test_ranks_are_processes(mpi, words):
    said = run(mpi, *words)
    assert said.returncode == 0, said.stderr
    assert sorted(said.stdout.splitlines()) == [f"rank {rank} is right" for rank in range(4)]


@pytest.mark.parametrize("words", (("mpi4py",), ("mpi4py", "split")))
def test_a_communicator_of_mpi4py(words):
    mpi = mpi4py_mpi()
    if mpi is None:
        pytest.skip("no mpi4py")
    said = run(mpi, *words)
    assert said.returncode == 0, said.stderr
    assert sorted(said.stdout.splitlines()) == [f"rank {rank} is right" for rank in range(4)]


@pytest.mark.parametrize("mpi", LAUNCHERS)
def test_an_exception_ends_all_ranks(mpi):
    said = run(mpi, "split", "boom")
    assert said.returncode != 0 and "is right" not in said.stdout
    assert "ValueError: rank 1 has had enough" in said.stderr
