"""How many of this host's cores a run may use, and whether its processes have to share them."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


def usable_cores(root: Path = Path("/")) -> float:
    """Return how many cores this process may keep busy; a batch system, `taskset` or a container gives it fewer.

    Args:
        root: where the system's files are.

    Returns:
        The cores it may run on, or the processor time of its control groups in cores, whichever is less; at least 0.01,
        the least that a control group can have.
    """
    # Python >= 3.13 has os.process_cpu_count for the first; nothing in Python tells the second.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(cores), *_quotas(root)])


def core_share(device: torch.device) -> dict[str, Any]:
    """Return this process's host, its threads that compute, and the cores they may use; JSON, for `crowding`."""
    # A process whose GPU computes keeps one core busy: it gives the GPU its work.
    threads = 1 if device.type == "cuda" else torch.get_num_threads()
    return {"host": socket.gethostname(), "threads": threads, "cores": usable_cores()}


class Turn(NamedTuple):
    """When a process works if not all can at once: in which turn, of how many."""

    number: int
    of: int


def turn_of(shares: Sequence[Mapping[str, Any]], rank: int) -> Turn:
    """Return a process's turn, such that in each turn every thread has a core of its own, if its process can.

    Args:
        shares: what `core_share` returned in every process, by rank.
        rank: whose turn.
    """
    turns: list[int] = []
    taken: dict[str, tuple[int, float]] = {}  # by host: the latest turn, and its threads
    for share in shares:
        index, threads = taken.get(share["host"], (0, 0))
        if threads and threads + share["threads"] > share["cores"]:
            index, threads = index + 1, 0
        taken[share["host"]] = index, threads + share["threads"]
        turns.append(index)
    return Turn(turns[rank], max(turns) + 1)


def shared_cores(shares: Sequence[Mapping[str, Any]]) -> tuple[float, int] | None:
    """Return the cores that the processes of a single host share, and each one's threads, where these are more.

    None where every thread can have a core of its own, and on several hosts.
    """
    if len({share["host"] for share in shares}) != 1 or _threads_per_core(shares) <= 1:
        return None
    return shares[0]["cores"], max(share["threads"] for share in shares)


def crowding(shares: Sequence[Mapping[str, Any]], *, simulated: bool = False) -> str:
    """Return a sentence about the host where most threads share a core; "" where every thread can have its own.

    Args:
        shares: what `core_share` returned in every process of a run.
        simulated: whether the prediction knows of it.
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
    many = (
        f"{threads[0]} thread{'s' * (threads[0] > 1)}"
        if len(threads) == 1
        else f"{threads[0]} to {threads[-1]} threads"
    )
    where = f" on one of {len(hosts)} hosts" if len(hosts) > 1 else ""
    processes = f"{len(worst)} process{'es' * (len(worst) > 1)} x {many}"
    known = "the prediction deals them out evenly" if simulated else "the prediction does not model that"
    return f"{processes} share {cores:g} usable core{'s' * (cores != 1)}{where}; {known}"


def _threads_per_core(shares: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(share["threads"] for share in shares) / shares[0]["cores"])


def _quotas(root: Path) -> Iterator[float]:
    """Yield the limit, in cores, of every control group that this process is in; Linux only, both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        mounted = root / "sys/fs/cgroup"
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        if number != "0":
            mounted /= "cpu"
        # A container may see its group's path as the host has it, and the group's own files at the top.
        group = mounted / path.strip("/")
        for folder in (group, *group.parents):
            yield from _quota(folder)
            if folder == mounted:
                break


def _quota(folder: Path) -> Iterator[float]:
    """Yield a control group's own limit in cores, if it has one: its processor time per period of real time."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        if quota != "max" and int(quota) > 0:
            yield int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # a limit that can't be read is none that is known
        return
