"""The processors that a run's processes compute on, cores of hosts and GPUs, and whether they compete for them."""

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch

from pipebench.model.cores import name_of_cores, usable_cores
from pipebench.simulate.costs import SharedProcessors

Shares = Sequence[Mapping[str, Any]]  # a process's `processor_shares`


def processor_shares(device: torch.device) -> list[dict[str, Any]]:
    """Return how this process uses its cores and, if it computes on a GPU, the GPU, as JSON data.

    Returns:
        A row per processor; the last one computes. `name` is unique among all hosts' processors, `kind` is `core` or
        `GPU`, `threads` is how many threads of this process run there, `capacity` how many threads it can run at once.
    """
    host, on_gpu = socket.gethostname(), device.type == "cuda"
    # A process with a GPU keeps one core busy to launch kernels.
    threads = 1 if on_gpu else torch.get_num_threads()
    cores = {"name": name_of_cores(), "host": host, "kind": "core", "threads": threads, "capacity": usable_cores()}
    if not on_gpu:
        return [cores]
    name = str(torch.cuda.get_device_properties(device).uuid)
    # Kernels of several processes take turns on a GPU (without its Multi-Process Service): it has one queue.
    return [cores, {"name": name, "host": host, "kind": "GPU", "threads": 1, "capacity": 1.0}]


def numbered(everyone: Sequence[Shares]) -> list[list[dict[str, Any]]]:
    """Return all processes' shares with numbers as names: they are the same after a restart on other cores or hosts."""
    names = list(dict.fromkeys(share["name"] for shares in everyone for share in shares))
    return [[{**share, "name": names.index(share["name"])} for share in shares] for shares in everyone]


def turns_of(everyone: Sequence[Shares]) -> list[int]:
    """Return each process's turn. In a turn every thread has a core or GPU of its own, if its process alone allows it.

    Args:
        everyone: all processes' `processor_shares`, by rank.
    """
    turns: list[int] = []
    taken: Counter[tuple[str, int]] = Counter()  # threads, by processor and turn
    for shares in everyone:
        turn = next(turn for turn in count() if all(_has_room(taken[share["name"], turn], share) for share in shares))
        taken.update({(share["name"], turn): share["threads"] for share in shares})
        turns.append(turn)
    return turns


def _has_room(threads: float, share: Mapping[str, Any]) -> bool:
    return threads == 0 or threads + share["threads"] <= share["capacity"]


def shared_processors(everyone: Sequence[Shares]) -> SharedProcessors | None:
    """Return how the processors that processes compute on are shared; None if every thread has its own.

    It is None, too, if processors differ in how many threads they run at once, which isn't simulated.
    """
    computing = [shares[-1] for shares in everyone]
    if len({share["capacity"] for share in computing}) > 1 or not _crowded(computing):
        return None
    names = list(dict.fromkeys(share["name"] for share in computing))
    return SharedProcessors(
        capacity=computing[0]["capacity"],
        threads=max(share["threads"] for share in computing),
        processors=tuple(names.index(share["name"]) for share in computing),
    )


def crowding(everyone: Sequence[Shares], *, simulated: bool = False) -> str:
    """Return a sentence on the processor with most threads for its capacity; "" if every thread can have its own.

    Args:
        everyone: all processes' `processor_shares`.
        simulated: whether the prediction models how the processors that compute are shared.
    """
    groups = _crowded([share for shares in everyone for share in shares])
    if not groups:
        return ""
    worst = max(groups, key=_threads_per_capacity)
    kind, capacity = worst[0]["kind"], worst[0]["capacity"]
    threads = sorted({share["threads"] for share in worst})
    one = f"{threads[0]} thread{'s' * (threads[0] > 1)}"
    many = one if len(threads) == 1 else f"{threads[0]} to {threads[-1]} threads"
    num_hosts = len({shares[0]["host"] for shares in everyone})
    on_one = len({share["host"] for share in worst}) == 1  # containers, which have host names of their own, share, too
    where = f" on one of {num_hosts} hosts" if on_one and num_hosts > 1 else ""
    processes = f"{len(worst)} process{'es' * (len(worst) > 1)}"
    what = f"{capacity:g} usable core{'s' * (capacity != 1)}" if kind == "core" else "one GPU"
    with_threads = f" x {many}" if kind == "core" else ""
    known = simulated and kind == everyone[0][-1]["kind"]
    modelled = "the prediction deals them out evenly" if known else "the prediction does not model that"
    return f"{processes}{with_threads} share {what}{where}; {modelled}"


def _crowded(shares: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the shares of every processor that has more threads than it can run at once."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for share in shares:
        found.setdefault(share["name"], []).append(share)
    return [each for each in found.values() if _threads_per_capacity(each) > 1]


def _threads_per_capacity(shares: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(share["threads"] for share in shares) / shares[0]["capacity"])
