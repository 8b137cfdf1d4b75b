"""Bytes that cross the loopback interface, with headers and acknowledgements, by Linux's counters."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from torch import distributed

# /sys/class/net would show the interfaces of the network namespace that it was mounted in.
_COUNTERS = Path("/proc/net/dev")
_SENT_BYTES = 8  # column after the interface's name
_OWN = "PIPEBENCH_OWN_LOOPBACK"


def can_measure() -> bool:
    return _COUNTERS.exists()


def loopback_bytes() -> int:
    """Return the bytes sent over the loopback interface since it is up, which equal those received."""
    (line,) = [line for line in _COUNTERS.read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[_SENT_BYTES])


def bytes_of(work: Callable[[], object]) -> int:
    """Return the bytes that all processes send during some work, which they begin and end together."""
    distributed.barrier()
    before = loopback_bytes()
    distributed.barrier()
    work()
    distributed.barrier()
    after = loopback_bytes()
    distributed.barrier()
    return after - before


def is_alone() -> bool:
    """Return whether nothing else uses this process's loopback interface."""
    return _OWN in os.environ


def command_alone(module: str, *words: str) -> list[str]:
    """Return a command that runs a module with a loopback interface of its own, if this system allows that.

    Where the system allows user namespaces, that needs no root. Elsewhere the command uses the machine's interface,
    whose counters include other programs' traffic.
    """
    command = [sys.executable, "-m", module, *words]
    unshare, ip = shutil.which("unshare"), shutil.which("ip")
    if unshare is None or ip is None:
        return command
    inside = [unshare, "--user", "--map-root-user", "--net", "sh", "-c", f'{ip} link set lo up && {_OWN}=1 exec "$@"']
    works = subprocess.run([*inside, "sh", "true"], capture_output=True, check=False).returncode == 0
    return [*inside, "sh", *command] if works else command
