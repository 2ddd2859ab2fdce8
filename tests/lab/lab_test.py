#!/usr/bin/env python3
"""Tests of the multi-host lab; ctest runs one part of it per test.

Run: python3 tests/lab/lab_test.py PART [PROGRAM]
Exit codes: 0 passed, 1 failed, 77 skipped because this machine cannot have a lab.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab_support import (expect_gone, fail, lab, lab_as_nobody, lab_name, lab_up,
                         namespaces_in_use, namespaces_of, need_lab, need_mpi, processes_in_hosts,
                         run_reported, words)
from ferrylab import kernel, launchers, settings, state
from ferrylab.common import LabError

PAYLOAD_BYTES, REPEATS, ATTEMPTS = 32_000_000, 6, 3
CONFORMANCE_CASES = "*threads_flat_bf16*:*threads_node_dedup*"
OVERLAP_TOKENS, OVERLAP_REPEATS = 610, 10  # rows of 4 KiB: 20 ms at 1 Gbit/s
MIN_UTILISATION = 0.90   # of the rate, by payload, with Open MPI
MAX_OVERHEAD = 1.03      # link bytes against payload: headers at an MTU of 9000
RATE = 1_000_000_000
FAILING_RANKS, FAILING_DEADLINE_S = 4, 4
FAILING_GRACE_S = 4      # other ranks' own deadlines, and the way of what they say
FAILING_LIMIT_S = FAILING_DEADLINE_S + 20  # with the start


def expect(condition, text):
    if not condition:
        fail(text)


def expect_refusal(text, action):
    try:
        action()
    except LabError as error:
        expect(text in str(error) and "fix:" in str(error), f"'{error}' lacks '{text}' or a fix")
    else:
        fail(f"nothing refused what should end with '{text}'")


def test_settings():
    """Rates, bursts, names, hosts and ranks: pure, so it runs everywhere."""
    for text, bits in (("100mbit", 10**8), ("1gbit", 10**9), ("2.5gbit", 25 * 10**8), ("none", 0)):
        expect(settings.parse_rate(text) == bits, f"rate {text}")
        expect(settings.rate_text(bits) == text, f"text of rate {text}")
    bursts = [settings.shape_of(settings.parse_rate(rate)).burst_bytes
              for rate in ("100mbit", "200mbit", "1gbit", "5gbit")]
    expect(bursts == [65536, 131072, 262144, 524288], f"bursts {bursts}")
    for rate in ("1", "fast", "0mbit", "1tbit", "-1gbit", "5mbit", "101gbit"):
        expect_refusal("rate of a link", lambda: settings.parse_rate(rate))
    for name in ("", "a/b", "..", "-x", "a b", "x" * 33):
        expect_refusal("name of a lab", lambda: settings.make_settings(name, 2, "1gbit"))
    for count in (0, -1, 65):
        expect_refusal("size of a lab", lambda: settings.make_settings("lab0", count, "1gbit"))
    expect(settings.parse_host("2", 3) == settings.parse_host("host2", 3) == 2, "host 2")
    for host in ("3", "host3", "-1", "localhost", "host"):
        expect_refusal("not in this lab", lambda: settings.parse_host(host, 3))
    expect(launchers.ranks_of("2", 3) == [2, 2, 2], "2 ranks on each host")
    expect(launchers.ranks_of("3,0,5", 3) == [3, 0, 5], "3,0,5 ranks")
    for ranks in ("3,5", "0", "x", "1,,2", "-1", "0,0,0", ""):
        expect_refusal("does not fit", lambda: launchers.ranks_of(ranks, 3))


def test_refusals():
    """Without root each command refuses in one line and changes nothing."""
    name = lab_name()
    for command, arguments in (("up", ("--hosts", 2, "--rate", "1gbit")), ("down", ()),
                               ("run", ("--", "true")), ("link", ("1", "down"))):
        status, stderr = lab_as_nobody(command, "--name", name, *arguments)
        expect(status == 2 and "needs root" in stderr and stderr.count("\n") == 1,
               f"{command} ended with {status} and said: {stderr}")
    # Other labs may come and go meanwhile, and with them the folder of all.
    expect(not (state.base_folder() / name).exists(), "a refused command left a folder")
    if os.geteuid() != 0:
        return
    _, stderr = lab("run", "--name", name, "--", "true", expect=2)
    expect("there is no lab" in stderr and "fix: lab/up" in stderr, f"run said: {stderr}")
    lab("up", "--name", name, "--hosts", 2, "--rate", "quick", expect=2)
    lab("run", "--name", name, expect=2)
    lab("run", "--name", name, "--no-mpi", "--", "true", expect=2)
    expect_gone(name)


def test_up_down():
    need_lab()
    name = lab_name()
    own = namespaces_in_use()
    with lab_up(name=name):
        first = namespaces_of(name)
        expect(len(first) == 15 and not first & own, f"namespaces {first}")
        stdout, _ = lab("up", "--name", name, "--hosts", 2, "--rate", "1000mbit")
        expect("is up already" in stdout and namespaces_of(name) == first, f"up said: {stdout}")
        _, stderr = lab("up", "--name", name, "--hosts", 3, "--rate", "1gbit", expect=2)
        expect("--hosts 2 --rate 1gbit" in stderr and "--hosts 3" in stderr, f"up said: {stderr}")
        expect(namespaces_of(name) == first, "a refused up changed the lab")
        os.kill(state.load(name).hosts[1].pid, signal.SIGKILL)
        expect(kernel.wait_until(lambda: state.dead_parts(state.load(name)), 5), "host1 lives")
        _, stderr = lab("run", "--name", name, "--", "true", expect=125)
        expect("host1 ended" in stderr, f"run said: {stderr}")
        lab("up", "--name", name, "--hosts", 2, "--rate", "1gbit")  # a broken lab is made anew
    expect(not first & namespaces_in_use(), "a namespace of the lab is still in use")
    stdout, _ = lab("down", "--name", name)
    expect("there is no lab" in stdout, f"down said: {stdout}")


def on_host(name, host, *command, expect_status=0):
    return lab("run", "--name", name, "--no-mpi", "--host", host, "--", *command,
               expect=expect_status)[0]


def test_isolation():
    """From outside, by other means than lab/up uses for its own proof."""
    need_lab()
    with lab_up() as name:
        on_host(name, 0, "sh", "-c", "echo secret > /dev/shm/mine; echo secret > $TMPDIR/mine")
        on_host(name, 0, "sh", "-c", "test -e /dev/shm/mine && test -e $TMPDIR/mine")
        on_host(name, 1, "sh", "-c", "test ! -e /dev/shm/mine && test ! -e $TMPDIR/mine")
        expect(not Path("/dev/shm/mine").exists(), "memory of host0 is seen by the machine")
        names = [on_host(name, host, "uname", "-n").strip() for host in ("0", "host1")]
        expect(names == ["host0", "host1"], f"host names {names}")
        size = on_host(name, 0, "df", "--output=size", "-k", "/dev/shm").split()[-1]
        expect(size == str(64 << 10), f"/dev/shm of {size} KiB")
        expect(on_host(name, 1, "sh", "-c", "exit 7", expect_status=7) == "", "exit status")
        check_link(name)


def check_link(name):
    """A connection, refused by the peer's kernel where there is a way to it at all."""
    attempt = ("import socket, sys\ntry: socket.create_connection(('host1', 9), 1)\n"
               "except ConnectionRefusedError: sys.exit(10)\nexcept OSError: sys.exit(11)\n")
    on_host(name, 0, sys.executable, "-c", attempt, expect_status=10)
    lab("link", "--name", name, 1, "down")
    on_host(name, 0, sys.executable, "-c", attempt, expect_status=11)
    lab("link", "--name", name, "host1", "up")
    on_host(name, 0, sys.executable, "-c", attempt, expect_status=10)
    around = attempt.replace("host1", settings.management_address(1))
    on_host(name, 0, sys.executable, "-c", around, expect_status=11)


def test_side_by_side():
    """Two labs with the same addresses; the end of one leaves the other alone."""
    need_lab()
    with lab_up(name=lab_name("-a"), rate="100mbit") as first:
        with lab_up(name=lab_name("-b"), num_hosts=3) as second:
            expect(not namespaces_of(first) & namespaces_of(second), "shared namespaces")
            on_host(first, 0, "touch", "/dev/shm/first")
            on_host(second, 0, "test", "!", "-e", "/dev/shm/first")
        on_host(first, 1, "true")


def test_jobs():
    """Both launchers: ranks where they were asked for, variables, exit status, standard input."""
    need_lab()
    show = 'echo "$(uname -n) $FERRY_LAB_LINK_RATE $FERRY_LAB_LINK_BURST $PWD"'
    with lab_up() as name, tempfile.TemporaryDirectory() as folder:
        for mpi in ("openmpi", "mpich"):
            need_mpi(mpi)
            stdout, _ = lab("run", "--name", name, "--mpi", mpi, "--ranks-per-host", "3,5", "--",
                            "sh", "-c", show, cwd=folder)
            end = f" {RATE} 262144 {folder}"
            expected = ["host0" + end] * 3 + ["host1" + end] * 5
            expect(sorted(stdout.splitlines()) == expected, f"{mpi} printed {stdout}")
            _, report = run_reported("--name", name, "--mpi", mpi, "--", "sh", "-c", "exit 5",
                                     expect=5)
            expect(report["status"] == 5 and len(report["link_bytes"]) == 2, f"report {report}")
        _, stderr = lab("run", "--name", name, "--expect-bytes", 1000, "--", "true", expect=125)
        expect("fewer than --expect-bytes" in stderr, f"run said: {stderr}")
        _, stderr = lab("run", "--name", name, "--ranks-per-host", "1,2,3", "--", "true", expect=2)
        expect("lab of 2 hosts" in stderr, f"run said: {stderr}")
        expect(not processes_in_hosts(name), f"left: {processes_in_hosts(name)}")


def test_payload(mpi):
    """What ranks of different hosts send crosses the link, and no faster than its rate; what ranks
    of one host send stays in memory."""
    need_lab()
    need_mpi(mpi)
    with lab_up() as name, tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "swap"
        subprocess.run([f"mpicc.{mpi}", "-O2", "-o", program,
                        Path(__file__).parent / "swap_mpi.c"], check=True)
        run = ("--name", name, "--mpi", mpi, "--timeout", 40)
        command = ("--", program, PAYLOAD_BYTES, REPEATS)
        # Others may need the cores: it is enough that the rate is reached once.
        for _ in range(ATTEMPTS):
            utilisation = cross_link(mpi, run + ("--expect-bytes", 2 * REPEATS * PAYLOAD_BYTES),
                                     command)
            if mpi != "openmpi" or utilisation >= MIN_UTILISATION:
                break
        else:
            fail(f"only {utilisation} of the rate was reached, the last of {ATTEMPTS} times")
        _, report = run_reported(*run, "--ranks-per-host", "2,0", *command)
        crossed = sum(link["sent_bytes"] for link in report["link_bytes"])
        looped = int(on_host(name, 0, "grep", "lo:", "/proc/net/dev").split()[1])
        expect(crossed + looped < PAYLOAD_BYTES / 10,
               f"ranks of one host sent {crossed} bytes over links, {looped} over loopback")


def cross_link(mpi, run, command):
    """Checks the bytes of a job whose ranks are on two hosts; the part of the rate it reached."""
    stdout, report = run_reported(*run, *command)
    for link in report["link_bytes"]:
        for counter in ("sent_bytes", "received_bytes"):
            ratio = link[counter] / (REPEATS * PAYLOAD_BYTES)
            print(f"{mpi}: {counter} of {link['host']}: {ratio:.4f} of the payload")
            expect(1 <= ratio <= MAX_OVERHEAD, f"{counter} is {ratio} of the payload")
    utilisation = 8 * PAYLOAD_BYTES / float(stdout.split()[1]) / RATE
    print(f"{mpi}: {utilisation:.3f} of the rate, by payload, in the fastest of {REPEATS} repeats")
    # Two queues stand on the way, and each may have saved up a burst.
    credit_bytes = 2 * report["link_bytes"][0]["burst_bytes"]
    most = PAYLOAD_BYTES / (PAYLOAD_BYTES - credit_bytes)
    expect(utilisation <= most, f"faster than the link: {utilisation} of its rate")
    return utilisation


def test_timeout():
    """A job that hangs ends with 124, also where its ranks are stopped or daemons are left."""
    need_lab()
    hang = "setsid env -i sleep 1000 & kill -STOP $$"
    with lab_up() as name:
        for mpi in ("openmpi", "mpich"):
            need_mpi(mpi)
            _, stderr = lab("run", "--name", name, "--mpi", mpi, "--ranks-per-host", 2, "--timeout",
                            2, "--", "sh", "-c", hang, expect=124)
            expect("time limit" in stderr, f"run said: {stderr}")
            expect(not processes_in_hosts(name), f"left: {processes_in_hosts(name)}")
        lab("run", "--name", name, "--no-mpi", "--host", 1, "--timeout", 1, "--", "sh", "-c", hang,
            expect=124)
        expect(not processes_in_hosts(name), f"left: {processes_in_hosts(name)}")


def begin(*arguments):
    return subprocess.Popen(words(*arguments), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL)


def started_job(name, mpi):
    """A lab/run whose 2 ranks run, each with a daemon that no launcher knows of."""
    job = begin("run", "--name", name, "--mpi", mpi, "--", "sh", "-c",
                "setsid env -i sleep 1000 & exec sleep 1000")
    there = kernel.wait_until(lambda: processes_in_hosts(name).count(b"sleep 1000 ") == 4, 20)
    expect(there, f"the ranks of {mpi} did not start")
    return job


def test_crash():
    """SIGKILL of lab/run, lab/down under a job, Ctrl-C, and SIGKILL at many moments of lab/up."""
    need_lab()
    need_mpi("openmpi")
    need_mpi("mpich")
    with lab_up() as name:
        for mpi in ("openmpi", "mpich"):
            job = started_job(name, mpi)
            job.kill()
            job.wait()
            expect(kernel.wait_until(lambda: not processes_in_hosts(name), 8),
                   f"{mpi}: left after SIGKILL of lab/run: {processes_in_hosts(name)}")
        job = started_job(name, "openmpi")
        job.send_signal(signal.SIGINT)
        expect(job.wait(20) == 130, f"after Ctrl-C: {job.returncode}")
        expect(not processes_in_hosts(name), f"left: {processes_in_hosts(name)}")
        job = started_job(name, "openmpi")
        lab("down", "--name", name)
        expect(job.wait(20) == 125, f"after lab/down: {job.returncode}")
    for num_ms in (150, 350, 600, 900):
        cut_up(lab_name("-cut"), num_ms / 1000)


def cut_up(name, seconds):
    """SIGKILL of lab/up: what is not finished goes by itself, the rest with lab/down."""
    up = begin("up", "--name", name, "--hosts", 3, "--rate", "1gbit")
    time.sleep(seconds)
    during = namespaces_of(name)
    up.kill()
    up.wait()
    if state.load(name) is None:
        expect(kernel.wait_until(lambda: not list_keepers(name), 5), "an unfinished lab lives on")
    lab("down", "--name", name)
    expect_gone(name)
    expect(not during & namespaces_in_use(), "a namespace of the lab is still in use")


def told_ranks(folder, victim, job):
    """What each rank but the victim was told: seconds since its last step, code and text. Then the
    job is ended: mpirun would go on without the ranks that it lost, until its time is over."""
    files = {rank: Path(folder) / f"rank{rank}" for rank in range(FAILING_RANKS) if rank != victim}
    kernel.wait_until(lambda: job.poll() is not None or
                      all(file.exists() for file in files.values()), FAILING_LIMIT_S)
    job.send_signal(signal.SIGINT)
    expect(job.wait(20) != 0, "a job that failed ended well")
    told = {}
    for rank, file in files.items():
        expect(file.exists(), f"rank {rank} was told nothing; told: {told}")
        seconds, code, text = file.read_text(encoding="utf-8").splitlines()
        told[rank] = (float(seconds), code, text)
    return told


def failing_job(name, program, folder, victim, signal_number):
    return begin("run", "--name", name, "--ranks-per-host", FAILING_RANKS // 2,
                 "--launcher-flag=--enable-recovery", "--timeout", FAILING_LIMIT_S, "--",
                 program, folder, FAILING_DEADLINE_S, victim, signal_number)


def check_survivors(told, named):
    """Every survivor names one of the ranks at the end of the chain of waits, with its host."""
    for rank, (seconds, code, text) in told.items():
        print(f"rank {rank} after {seconds:.1f} s: {code}: {text}", flush=True)
        expect(seconds <= FAILING_DEADLINE_S + FAILING_GRACE_S, f"rank {rank} was told too late")
        expect(any(words in text for words in named(rank)), f"rank {rank}: nothing of {named(rank)}")


def test_failure(program):
    """A rank that is killed or stopped, and a link that goes down: survivors say who is missing."""
    need_lab()
    need_mpi("openmpi")
    victim = FAILING_RANKS - 1
    with lab_up() as name:
        for signal_number in (signal.SIGKILL, signal.SIGSTOP):
            with tempfile.TemporaryDirectory() as folder:
                job = failing_job(name, program, folder, victim, int(signal_number))
                check_survivors(told_ranks(folder, victim, job),
                                lambda _: [f"rank {victim} on node 1, host host1"])
            expect(not processes_in_hosts(name), f"left: {processes_in_hosts(name)}")
        with tempfile.TemporaryDirectory() as folder:
            job = failing_job(name, program, folder, -1, 0)
            there = kernel.wait_until((Path(folder) / "running").exists, 20)
            expect(there, "the ranks did not start")
            lab("link", "--name", name, 1, "down")
            half = FAILING_RANKS // 2
            check_survivors(told_ranks(folder, None, job), lambda rank: [
                f"rank {other} on node {other // half}, host host{other // half}"
                for other in range(FAILING_RANKS) if other // half != rank // half])
            expect(not processes_in_hosts(name), f"left: {processes_in_hosts(name)}")


def test_overlap(program):
    """Rows travel while ranks compute: with polling, and with a progress thread and no polling."""
    need_lab()
    need_mpi("openmpi")
    with lab_up() as name:
        # Others may need the cores: it is enough that it is seen once.
        for _ in range(ATTEMPTS):
            done = subprocess.run(words("run", "--name", name, "--own-cores", "--timeout", 40, "--",
                                        program, OVERLAP_TOKENS, OVERLAP_REPEATS),
                                  stdout=subprocess.PIPE, text=True, check=False)
            print(done.stdout, end="", flush=True)
            if done.returncode == 0:
                return
        fail(f"rows did not travel while ranks computed, {ATTEMPTS} times")


def test_conformance(program):
    """Rows and sums between hosts of 3 and 5 ranks."""
    need_lab()
    need_mpi("openmpi")
    with lab_up() as name, tempfile.NamedTemporaryFile() as shared:
        stdout, _ = lab("run", "--name", name, "--ranks-per-host", "3,5", "--timeout", 100, "--",
                        "env", f"FERRY_TEST_FILE={shared.name}", "FERRY_TEST_NODES=3+5", program,
                        f"--gtest_filter={CONFORMANCE_CASES}", "--gtest_brief=1")
        passed = [line for line in stdout.splitlines() if "PASSED" in line]
        expect(len(passed) == 8, f"not every rank has passed: {stdout}")
        expect("  PASSED  ] 0 " not in stdout, "the filter finds no case")


def list_keepers(name):
    return [member for found, member in state.keepers() if found == name]


PARTS = {"settings": test_settings, "refusals": test_refusals, "up_down": test_up_down,
         "isolation": test_isolation, "side_by_side": test_side_by_side, "jobs": test_jobs,
         "payload_openmpi": lambda: test_payload("openmpi"),
         "payload_mpich": lambda: test_payload("mpich"), "timeout": test_timeout,
         "crash": test_crash, "failure": test_failure, "overlap": test_overlap,
         "conformance": test_conformance}
WITH_PROGRAM = {"failure", "overlap", "conformance"}


def main():
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    if part not in PARTS or len(sys.argv) != 2 + (part in WITH_PROGRAM):
        print(f"usage: lab_test.py {'|'.join(PARTS)}, after {'|'.join(WITH_PROGRAM)} the program")
        return 2
    PARTS[part](*sys.argv[2:])
    print(f"lab {part}: passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
