"""The cores that a process may use, in a container, too."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> float:
    """Return how many cores this process may use, at least 0.01, the least quota of a control group.

    The smallest of its affinity and the quotas of its control groups, whose files are under `root`.
    """
    # Python >= 3.13 has os.process_cpu_count for the first; nothing in Python gives the second.
    return min([float(len(_affinity())), *_quotas(root)])


def name_of_cores(root: Path = Path("/")) -> str:
    """Return a name for the cores that this process may use, the same in all processes that compete for them.

    Processes that a launcher binds to different cores don't compete; containers of one machine do, unless a quota or
    cores of their own limit them. Files of the system are under `root`.
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


def _quotas(root: Path) -> Iterator[float]:
    """Yield the limit, in cores, of every control group of this process; Linux only, versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        mounted = root / ("sys/fs/cgroup" if number == "0" else "sys/fs/cgroup/cpu")
        # A container may see its group's host path, with the group's own files at the top.
        group = mounted / path.strip("/")
        for folder in (group, *group.parents):
            yield from _quota(folder)
            if folder == mounted:
                break


def _quota(folder: Path) -> Iterator[float]:
    """Yield a control group's own limit in cores, if any: its processor time per period."""
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
