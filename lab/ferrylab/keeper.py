"""The keeper of a lab and the first processes of its hosts.

Started by `lab/up` with REPORT COMMIT FOLDER NUM_HOSTS ferry-lab-keeper NAME. It becomes the first process of a PID namespace of its own, with the login host's namespaces; each host is a
child with namespaces nested in it. All report their process ids through the pipe REPORT. Until
`lab/up` has written to the pipe COMMIT the keeper ends with it, and with the keeper ends everything.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

from . import kernel
from .settings import LOGIN, SHM_BYTES, TMP_BYTES, host_name

SYSCTLS = {
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    # The login host must not carry packets from one host to another.
    "net/ipv4/ip_forward": "0",
    # Its neighbour discovery would add bytes to the links.
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}


def set_sysctls():
    for name, value in SYSCTLS.items():
        path = Path("/proc/sys", name)
        if path.exists():
            path.write_text(value)


def set_up_machine(name, folder, hosts_file):
    """Host name, names of the others, and memory of its own, for a host or the login host."""
    kernel.set_host_name(name)
    kernel.make_mounts_private()
    kernel.mount("tmpfs", "/dev/shm", f"size={SHM_BYTES},mode=1777")
    kernel.mount("tmpfs", f"{folder}/tmp", f"size={TMP_BYTES},mode=1777")
    kernel.bind(f"{folder}/{hosts_file}", "/etc/hosts")
    set_sysctls()


def reap_forever():
    """What the first process of a PID namespace is for: orphans end here."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait([signal.SIGCHLD])


def machine_pid():
    """By which `lab/up` knows this process, for as long as /proc is still the machine's."""
    return os.readlink("/proc/self")


def report(descriptor, name, pid):
    os.write(descriptor, f"{name} {pid}\n".encode())


def be_host(index, folder, descriptor):
    name = host_name(index)
    set_up_machine(name, folder, "hosts")
    pid = machine_pid()
    kernel.mount("proc", "/proc")
    kernel.mount("sysfs", "/sys")  # its list of interfaces is that of the network namespace
    report(descriptor, name, pid)
    os.close(descriptor)
    reap_forever()


def start_host(index, folder, descriptor):
    """A PID namespace begins with a child of the process that asked for it: hence two forks."""
    starter = os.fork()
    if starter == 0:
        reporting(descriptor, lambda: kernel.unshare(kernel.ALL_NAMESPACES))
        if os.fork() == 0:
            reporting(descriptor, lambda: be_host(index, folder, descriptor))
        os._exit(0)
    os.waitpid(starter, 0)


def reporting(descriptor, action):
    """Tells `lab/up` of a failure, which ends everything."""
    try:
        action()
    except Exception as error:  # nobody else would hear of it
        os.write(descriptor, f"error {error}\n".encode())
        os._exit(1)


def keep(report_pipe, commit_pipe, folder, num_hosts):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    reporting(report_pipe, lambda: set_up_machine(LOGIN, folder, "hosts.login"))
    report(report_pipe, LOGIN, machine_pid())
    for index in range(num_hosts):
        start_host(index, folder, report_pipe)
    os.close(report_pipe)
    if not os.read(commit_pipe, 1):
        os._exit(1)
    os.close(commit_pipe)
    reap_forever()


def main():
    report_pipe, commit_pipe, folder, num_hosts = sys.argv[1:5]
    # A job that eats the memory of the machine should not take the lab along.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000")
    reporting(int(report_pipe), lambda: kernel.unshare(kernel.ALL_NAMESPACES))
    if os.fork() == 0:
        os.chdir("/")
        keep(int(report_pipe), int(commit_pipe), folder, int(num_hosts))
    return 0
