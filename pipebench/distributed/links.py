"""What a cluster's links carry, measured between the processes of one job: the levels of a cluster's file.

Messages and sums travel as in training: by NCCL between GPUs of their own, else by Gloo through the hosts' memory. Each
rate is that of the payload, so a level measured here needs no `efficiency`.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.launch_join import peers
from pipebench.distributed.world import World
from pipebench.errors import UserError

_FIRST_BYTES, _MOST_BYTES = 1 << 18, 1 << 28  # size of a message, doubled until it takes `_LONG_S`
_LONG_S = 0.1  # long compared with the 100 us between the workers' starts
_REPEATED = 7  # measurements of which the median is taken, after one for warm-up
_ROUND_TRIPS = 50  # of a small message, per measurement

NO_LINKS = "processes on the CPUs of one host share memory, and use no link: cluster local says what that carries"
Pairs = Sequence[tuple[int, int]]  # ranks


@dataclass(frozen=True)
class MeasuredLevel:
    """One level of links, measured between workers of its components, which are components of the level below.

    Attributes:
        name: `server` or `cluster`.
        count: number of components.
        port_bytes_per_s: payload that all workers of one component together send to another one, while as much comes
            back.
        pair_bytes_per_s: payload that one worker sends to a worker of another component, while as much comes back and
            no other sends.
        sum_bytes_per_s: bytes that a worker sends in an all-reduce of one worker of every component, which is
            2 (r - 1) / r times the tensor's bytes with r components.
        latency_s: half of a small message's round trip.
        message_bytes: size of the messages of `port_bytes_per_s`.
    """

    name: str
    count: int
    port_bytes_per_s: float
    pair_bytes_per_s: float
    sum_bytes_per_s: float
    latency_s: float
    message_bytes: int


@dataclass(frozen=True)
class MeasuredLinks:
    """A cluster's links.

    Attributes:
        device: a worker's.
        backend: `NCCL`, or `Gloo` through the hosts' memory.
        levels: innermost first.
        pcie_bytes_per_s: bytes that a GPU copies to pinned memory of its host, while as much comes back and all other
            GPUs do the same; None for CPUs.
    """

    device: str
    backend: str
    levels: tuple[MeasuredLevel, ...]
    pcie_bytes_per_s: float | None = None


def measure_links(world: World, device: str, on_progress: Callable[[str], None]) -> MeasuredLinks:
    """Measure the links between a job's workers; collective.

    Args:
        world: at least two workers.
        device: the name of this one's.
        on_progress: gets what is being measured, in words.

    Raises:
        UserError: hosts have different numbers of workers, or all are on the CPUs of one host and share its memory.
        PeerLostError: a worker is gone.
    """
    hosts = _hosts(world)
    if len({len(ranks) for ranks in hosts}) > 1:
        counts = ", ".join(str(len(ranks)) for ranks in hosts)
        raise UserError(f"a cluster's servers are alike: got hosts of {counts} workers, needed are as many on each")
    if len(hosts) == 1 and world.device.type == "cpu":
        raise UserError(NO_LINKS)
    links = _Links(world, on_progress)
    levels = []
    if len(hosts[0]) > 1:
        pairs = [(hosts[0][0], hosts[0][1])]
        levels.append(links.level("server", pairs, hosts[0]))
    if len(hosts) > 1:
        pairs = [*zip(hosts[0], hosts[1], strict=True)]
        levels.append(links.level("cluster", pairs, [ranks[0] for ranks in hosts]))
    pcie_bytes_per_s = links.pcie() if world.device.type == "cuda" else None
    return MeasuredLinks(device, "NCCL" if world.direct else "Gloo", tuple(levels), pcie_bytes_per_s)


def _hosts(world: World) -> list[list[int]]:
    """Return the ranks of every host's workers. On each host they are consecutive."""
    starts = world.exchange(world.place.rank - world.place.local_rank)
    return [[rank for rank, start in enumerate(starts) if start == each] for each in dict.fromkeys(starts)]


class _Links:
    """Timed messages and sums among a world's workers. All of them call every method, with the same arguments."""

    def __init__(self, world: World, on_progress: Callable[[str], None]) -> None:
        self._world, self._on_progress = world, on_progress
        self._device = world.device if world.direct else torch.device("cpu")
        # A group for each way, as activations and gradients have: a connection of Gloo's that is used in both ways at
        # the same time carries half as much each way.
        self._all, self._back = (world.new_group(world.backend) for _ in range(2))
        with peers():
            for group in (self._all, self._back):  # the first use of a group of NCCL's must be by all its members
                dist.all_reduce(self._bytes(1), group=group)
                self._synchronize()

    def level(self, name: str, pairs: Pairs, ring: Sequence[int]) -> MeasuredLevel:
        """Measure one level: between `pairs` of workers of two components, and among one worker of each, `ring`."""
        self._on_progress(f"measuring messages of level {name}")
        port, num_bytes = self._rate(lambda size: self._messages(pairs, size))
        pair, _ = self._rate(lambda size: self._messages(pairs[:1], size)) if len(pairs) > 1 else (port, 0)
        latency_s = self._median_s(lambda: self._round_trips(*pairs[0])) / (2 * _ROUND_TRIPS)
        self._on_progress(f"measuring sums of level {name}")
        group = self._world.new_group(self._world.backend, ring)
        passed, _ = self._rate(lambda size: self._sum(group, ring, size))
        share = 2 * (len(ring) - 1) / len(ring)
        return MeasuredLevel(name, len(ring), len(pairs) * port, pair, share * passed, latency_s, num_bytes)

    def pcie(self) -> float:
        """Return the bytes per second of all GPUs' copies to their hosts and back, each way."""
        self._on_progress("measuring copies between GPUs and their hosts")
        return self._rate(partial(copies, self._world.device))[0]

    def _rate(self, work: Callable[[int], Callable[[], None]]) -> tuple[float, int]:
        """Return the bytes per second of `work`, and the number of bytes that it was measured with.

        Args:
            work: returns a function that moves so many bytes.
        """
        num_bytes = _FIRST_BYTES
        while True:
            run = work(num_bytes)
            self._slowest_s(run)  # a first use may connect and load kernels
            if min(self._slowest_s(run) for _ in range(2)) >= _LONG_S or num_bytes >= _MOST_BYTES:
                return num_bytes / self._median_s(run), num_bytes
            num_bytes *= 2

    def _median_s(self, run: Callable[[], None]) -> float:
        return statistics.median([self._slowest_s(run) for _ in range(1 + _REPEATED)][1:])

    def _slowest_s(self, run: Callable[[], None]) -> float:
        """Return how long `run` takes on the slowest worker, seconds."""
        self._world.barrier()
        start_s = time.perf_counter()
        with peers():
            run()
            self._synchronize()
        return float(max(self._world.exchange(time.perf_counter() - start_s)))

    def _messages(self, pairs: Pairs, num_bytes: int) -> Callable[[], None]:
        """Return a function that sends so many bytes both ways between the workers of all pairs at the same time."""
        rank = self._world.rank
        partner = dict([*pairs, *((second, first) for first, second in pairs)]).get(rank)
        if partner is None:
            return _nothing
        mine, theirs = self._bytes(num_bytes), self._bytes(num_bytes)

        def run() -> None:
            if rank < partner:
                _wait([dist.isend(mine, partner, self._all), dist.irecv(theirs, partner, self._back)])
            else:  # groups in the same order, so that NCCL's kernels can't wait for each other
                _wait([dist.irecv(theirs, partner, self._all), dist.isend(mine, partner, self._back)])

        return run

    def _round_trips(self, first: int, second: int) -> None:
        word, rank = self._bytes(4), self._world.rank
        for _ in range(_ROUND_TRIPS if rank in (first, second) else 0):
            if rank == first:
                dist.send(word, second, group=self._all)
                dist.recv(word, second, group=self._all)
            else:
                dist.recv(word, first, group=self._all)
                dist.send(word, first, group=self._all)

    def _sum(self, group: Any, ranks: Sequence[int], num_bytes: int) -> Callable[[], None]:
        if self._world.rank not in ranks:
            return _nothing
        values = torch.zeros(num_bytes // 4, device=self._device)
        return lambda: _wait([dist.all_reduce(values, group=group, async_op=True)])

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self._device)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def copies(device: torch.device, num_bytes: int) -> Callable[[], None]:
    """Return a function that copies so many bytes from a GPU to pinned memory, and as many back at the same time."""
    mine, theirs = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    out, back = (torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)  # these streams don't wait for what has made the tensors

    def run() -> None:
        for stream, (target, source) in zip(streams, ((out, mine), (theirs, back)), strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    return run


def _nothing() -> None:
    """Take no part."""


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()
