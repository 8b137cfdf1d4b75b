"""The processor cores that a process may use, also in a container."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from pipebench.model.control_groups import folders


def usable_cores(root: Path = Path("/")) -> float:
    """Return how many cores this process may use: the least of its affinity and the quotas of its control groups.

    It is at least 0.01, the least quota of a control group. The control groups' files are under `root`.
    """
    # Python >= 3.13 has os.process_cpu_count for the affinity; nothing in Python gives the quotas.
    quotas = (quota for folder in folders("cpu", root) for quota in _quota(folder))
    return min([float(len(_affinity())), *quotas])


def name_of_cores(root: Path = Path("/")) -> str:
    """Return a name for the cores that this process may use, which is the same in all processes that compete for them.

    Processes that a launcher binds to different cores don't compete. Containers on one machine do, unless each has a
    quota or its own cores. The system's files are under `root`.
    """
    cores, host = _affinity(), socket.gethostname()
    if usable_cores(root) < len(cores):
        return f"{host}'s quota"
    try:
        machine = (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        machine = host
    return f"{machine}'s {','.join(map(str, cores))}"


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _quota(folder: Path) -> Iterator[float]:
    """Yield a control group's own quota in cores, if it has one: its processor time per period."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        if quota != "max" and int(quota) > 0:
            yield int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # unreadable limits are ignored
        return
