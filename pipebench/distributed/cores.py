"""The number of this host's cores that a run may use, and whether its processes compete for them."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


def usable_cores(root: Path = Path("/")) -> float:
    """Return how many cores this process may use, at least 0.01, the least quota of a control group.

    The smallest of its affinity and the quotas of its control groups, whose files are under `root`.
    """
    # Python >= 3.13 has os.process_cpu_count for the first; nothing in Python gives the second.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(cores), *_quotas(root)])


def core_share(device: torch.device) -> dict[str, Any]:
    """Return this process's host, its computing threads, and the cores they may use; JSON, for `crowding`."""
    # A process with a GPU keeps one core busy to launch kernels.
    threads = 1 if device.type == "cuda" else torch.get_num_threads()
    return {"host": socket.gethostname(), "threads": threads, "cores": usable_cores()}


class Turn(NamedTuple):
    """A process's turn, and the number of turns."""

    number: int
    of: int


def turn_of(shares: Sequence[Mapping[str, Any]], rank: int) -> Turn:
    """Return a rank's turn such that in each turn every thread has its own core, if its process allows.

    `shares` are all processes' `core_share`, by rank.
    """
    turns: list[int] = []
    taken: dict[str, tuple[int, float]] = {}  # by host: the latest turn and its number of threads
    for share in shares:
        index, threads = taken.get(share["host"], (0, 0))
        if threads and threads + share["threads"] > share["cores"]:
            index, threads = index + 1, 0
        taken[share["host"]] = index, threads + share["threads"]
        turns.append(index)
    return Turn(turns[rank], max(turns) + 1)


def shared_cores(shares: Sequence[Mapping[str, Any]]) -> tuple[float, int] | None:
    """Return the cores that processes of a single host share and each one's threads, or None.

    None if every thread can have its own core, and on several hosts.
    """
    if len({share["host"] for share in shares}) != 1 or _threads_per_core(shares) <= 1:
        return None
    return shares[0]["cores"], max(share["threads"] for share in shares)


def crowding(shares: Sequence[Mapping[str, Any]], *, simulated: bool = False) -> str:
    """Return a sentence on the host with most threads per core; "" if every thread can have its own.

    `shares` are all processes' `core_share`; `simulated` whether the prediction models it.
    """
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for share in shares:
        hosts.setdefault(share["host"], []).append(share)
    if not hosts:
        return ""
    worst = max(hosts.values(), key=_threads_per_core)
    if _threads_per_core(worst) <= 1:
        return ""
    threads, cores = sorted({share["threads"] for share in worst}), worst[0]["cores"]
    one = f"{threads[0]} thread{'s' * (threads[0] > 1)}"
    many = one if len(threads) == 1 else f"{threads[0]} to {threads[-1]} threads"
    where = f" on one of {len(hosts)} hosts" if len(hosts) > 1 else ""
    processes = f"{len(worst)} process{'es' * (len(worst) > 1)} x {many}"
    known = "the prediction deals them out evenly" if simulated else "the prediction does not model that"
    return f"{processes} share {cores:g} usable core{'s' * (cores != 1)}{where}; {known}"


def _threads_per_core(shares: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(share["threads"] for share in shares) / shares[0]["cores"])


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
