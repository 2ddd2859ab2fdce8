"""What a lab is made of: its number of hosts, the rate of its links, names and addresses.

Pure: nothing here touches the machine. docs/lab.md gives the reason for each figure.
"""

import re
from dataclasses import asdict, dataclass

from .common import LabError

MTU_BYTES = 9000
SHM_BYTES = 64 << 20
TMP_BYTES = 256 << 20
MAX_HOSTS = 64
MIN_BITS_PER_S, MAX_BITS_PER_S = 10_000_000, 100_000_000_000
LINK, MANAGEMENT = "eth0", "mgmt0"  # interfaces of a host; the login host has the second
LOGIN = "login"                     # where launchers run; no rank does
LOGIN_ADDRESS = "10.78.0.254"
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}

# Up to this rate: this burst and this much queueing. A burst must hold what arrives between two
# runs of the kernel's timer; below 96 kB at 1 Gbit/s the rate collapses.
SHAPES = (
    (100_000_000, 64 << 10, 200),
    (300_000_000, 128 << 10, 100),
    (1_000_000_000, 256 << 10, 50),
    (MAX_BITS_PER_S, 512 << 10, 50),
)


@dataclass(frozen=True)
class Settings:
    """What `lab/up` was asked for. `bits_per_s` is 0 for links without a limit."""

    name: str
    num_hosts: int
    bits_per_s: int

    def as_dict(self):
        return asdict(self)

    def __str__(self):
        return f"--hosts {self.num_hosts} --rate {rate_text(self.bits_per_s)}"


@dataclass(frozen=True)
class Shape:
    """A limited link: rate, burst allowance and the time that a packet may queue."""

    bits_per_s: int
    burst_bytes: int
    latency_ms: int


def make_settings(name, num_hosts, rate):
    """Validated settings; anything else is a LabError."""
    check_name(name)
    if not 1 <= num_hosts <= MAX_HOSTS:
        raise LabError(f"--hosts {num_hosts} is not a size of a lab; allowed: 1..{MAX_HOSTS}; "
                       "fix: give another number")
    return Settings(name, num_hosts, parse_rate(rate))


def check_name(name):
    """It becomes a folder's name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", name):
        raise LabError(f"--name {name!r} is not a name of a lab; allowed: 1 to 32 letters, digits, "
                       "'-' and '_', beginning with a letter or digit; fix: give another name")


def parse_rate(text):
    """Bits per second of a rate as tc writes it; 0 for "none"."""
    if text == "none":
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    bits_per_s = round(float(match.group(1)) * UNITS[match.group(2)]) if match else 0
    if not MIN_BITS_PER_S <= bits_per_s <= MAX_BITS_PER_S:
        raise LabError(f"--rate {text!r} is not a rate of a link; allowed: 10mbit to 100gbit, in "
                       "kbit, mbit or gbit, or none for no limit; fix: for example --rate 1gbit")
    return bits_per_s


def rate_text(bits_per_s):
    """The shortest way to write a rate, as `--rate` takes it."""
    if bits_per_s == 0:
        return "none"
    for unit in ("gbit", "mbit"):
        if bits_per_s % (UNITS[unit] // 1000) == 0 and bits_per_s >= UNITS[unit]:
            return f"{bits_per_s / UNITS[unit]:g}{unit}"
    return f"{bits_per_s / UNITS['kbit']:g}kbit"


def shape_of(bits_per_s):
    """The shape of a link of this rate, or None for one without a limit."""
    if bits_per_s == 0:
        return None
    for limit, burst_bytes, latency_ms in SHAPES:
        if bits_per_s <= limit:
            return Shape(bits_per_s, burst_bytes, latency_ms)
    raise AssertionError("make_settings has checked the rate")


def host_name(index):
    return f"host{index}"


def link_address(index):
    return f"10.77.0.{index + 1}"


def management_address(index):
    return f"10.78.0.{index + 1}"


def hosts_file(num_hosts, address_of):
    """Text of /etc/hosts: between hosts a name leads over the link, for the launcher around it."""
    lines = ["127.0.0.1 localhost", f"{LOGIN_ADDRESS} {LOGIN}"]
    lines += [f"{address_of(index)} {host_name(index)}" for index in range(num_hosts)]
    return "\n".join(lines) + "\n"


def parse_host(text, num_hosts):
    """Index of a host that is given as 2 or as host2."""
    match = re.fullmatch(r"(?:host)?(\d+)", text)
    if not match or int(match.group(1)) >= num_hosts:
        raise LabError(f"host {text!r} is not in this lab; allowed: 0..{num_hosts - 1} or "
                       f"host0..host{num_hosts - 1}; fix: give one of these")
    return int(match.group(1))
