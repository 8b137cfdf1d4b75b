"""Algorithms by which a group sums a buffer: what its members send each other, and the time that it takes.

A ring all-reduce is one flow over all ports of its ring, at the pace of the slowest: 2 (r-1) steps in which every
member passes on a chunk (bandwidth-optimal ring; PipeDream section 3.1). A step waits only for the neighbour's step
before, so latencies are those of the hops that a chunk makes, not of the slowest hop at every step. Chunks are many and
small, so a message that shares a port with the ring gets half of the port. On clusters with `all_reduce: two-level` it
has three phases: reduce-scatter within every server, rings among servers, all-gather within every server.

The arithmetic is in `engine/ring.py`, and the formulas of the planner's searches in `planner/cost_models.py`.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from pipebench.cluster import Cluster
from pipebench.schedule.syncs import ALL_REDUCE, ALL_TO_ALL, ORDERED, PARAMETER_SERVER, RING
from pipebench.simulate.sharing import NEVER, Resource, Uses

Port = tuple[int, int, bool]  # level, component of the level below, whether it is outgoing
_CLEARLY_FASTER = 0.99  # of the time of another algorithm, so that rounding doesn't decide
Groups = Sequence[Sequence[int]]  # positions in a ring of members that sum first, see `Cluster.servers`


class Links(Protocol):
    """The links of a cluster, as a `Network` has them."""

    cluster: Cluster

    def path(self, sender: int, receiver: int) -> tuple[int, Port, Port]:
        """Return the level between two workers, and the ports at both ends."""

    def lanes(self, index: int, sender: int, receiver: int) -> list[Port]:
        """Return the lanes to hosts that a message over a level also uses."""

    def port(self, port: Port) -> Resource:
        """Return the resource of a port."""


@dataclass(frozen=True)
class Part:
    """A group's traffic in one phase and on one level, at one rate."""

    share: float  # fraction of the buffer per connection
    uses: Uses  # ports, with the number of connections through each
    latency_s: float  # of all the phase's steps
    cap: float  # limit on each connection's bytes/s

    def alone_s(self, num_bytes: int) -> float:
        """Return the seconds for a buffer without other traffic."""
        rate = min([self.cap, *(resource.capacity / weight for resource, weight in self.uses)])
        return self.latency_s + self.share * num_bytes / rate


Phases = list[list[Part]]  # in sequence; the parts of each run at the same time


class SumAlgorithm(NamedTuple):
    """An algorithm that sums a buffer over a group."""

    traffic: Callable[[int, Groups], Iterator[tuple[int, int, int]]]  # yields (sender, receiver, bytes) of a buffer
    phases: Callable[[Links, Sequence[int], Groups], Phases]  # returns those of workers in the order of their devices


def traffic(sync: str, num_bytes: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (sender, receiver, bytes) of a group that sums a buffer as one."""
    return ALGORITHMS[sync].traffic(num_bytes, [range(size)])


def faster_sums(cluster: Cluster, devices: Sequence[int]) -> str:
    """Return the order in which sharded replicas sum: ORDERED unless RING is clearly faster, latencies left out.

    RING is faster if several devices share a port: in ORDERED all their messages cross it, in a ring those of one.
    """
    ring_s = ordered_s = 0.0  # of a byte of every device's shard
    for index, level in enumerate(cluster.levels):
        inside, around = (Counter(cluster.component(device, i) for device in devices) for i in (index, index + 1))
        parents = {cluster.component(device, index): cluster.component(device, index + 1) for device in devices}
        most = max(count * (around[parents[child]] - count) for child, count in inside.items())
        if most:
            pace = max(most / level.goodput_bytes_per_s, 1 / level.sum_cap_bytes_per_s(most))
            ordered_s = max(ordered_s, pace)
            ring_s = max(ring_s, (len(devices) - 1) / level.sum_bytes_per_s)
    return RING if ring_s < _CLEARLY_FASTER * ordered_s else ORDERED


def ring_bytes(num_bytes: int, size: int) -> list[int]:
    """Return the bytes that each member of a ring all-reduce sends; 2 (size - 1) num_bytes in all.

    The buffer is cut into `size` chunks as evenly as 4-byte elements allow. Member i passes on every chunk but i+1
    while summing, and every chunk but i+2 while distributing.
    """
    chunks = _chunks(num_bytes, size)
    return [2 * num_bytes - chunks[(i + 1) % size] - chunks[(i + 2) % size] for i in range(size)]


def all_reduce_traffic(num_bytes: int, servers: Groups) -> Iterator[tuple[int, int, int]]:
    """Yield (sender, receiver, bytes) of an all-reduce over `servers`; 2 (r-1) num_bytes in all.

    Every server's members reduce and distribute in a ring of their own, and so do the servers among each other; the
    first members send for their servers. A single server of all members is a plain ring.
    """
    for ring in (*servers, [server[0] for server in servers]):
        size = len(ring)
        if size > 1:
            yield from ((ring[i], ring[(i + 1) % size], sent) for i, sent in enumerate(ring_bytes(num_bytes, size)))


def server_traffic(num_bytes: int, servers: Groups) -> Iterator[tuple[int, int, int]]:
    """Yield (sender, receiver, bytes) of a sum by servers, whatever their order.

    Each member sends every other its share, and all the sum of its own: 2 (m-1) |w| / m sent and received per member
    (the 2018 preprint counts both, 4 (m-1) |w| / m).
    """
    size = sum(map(len, servers))
    chunks = _chunks(num_bytes, size)
    yield from ((i, j, chunks[j] + chunks[i]) for i in range(size) for j in range(size) if i != j)


def ring_traffic(num_bytes: int, servers: Groups) -> Iterator[tuple[int, int, int]]:
    """Yield (sender, receiver, bytes) of half a ring all-reduce: a reduce-scatter, or an all-gather.

    Member i passes on every chunk but one: (r-1) num_bytes in all, half of an all-reduce (ZeRO, SC'20, section 7.1).
    """
    ring = [member for server in servers for member in server]
    chunks = _chunks(num_bytes, len(ring))
    for i, member in enumerate(ring):
        following = (i + 1) % len(ring)
        yield member, ring[following], num_bytes - chunks[following]


def all_to_all_traffic(num_bytes: int, servers: Groups) -> Iterator[tuple[int, int, int]]:
    """Yield (sender, receiver, bytes) of a reduce-scatter, or an all-gather, in which all send each other one chunk."""
    size = sum(map(len, servers))
    chunks = _chunks(num_bytes, size)
    yield from ((i, j, chunks[j]) for i in range(size) for j in range(size) if i != j)


def _chunks(num_bytes: int, size: int) -> list[int]:
    elements, rest = divmod(num_bytes, 4)
    chunks = [4 * (elements // size + (i < elements % size)) for i in range(size)]
    chunks[0] += rest
    return chunks


def all_reduce_phases(links: Links, ring: Sequence[int], servers: Groups) -> Phases:
    """Return one ring of all; or reduce-scatter within every server, rings among servers, all-gather within.

    Among servers, a chunk's ring joins those that hold its sum: as many rings as the largest server has members.
    """
    members = [[ring[position] for position in server] for server in servers]
    if len(members) == 1:
        return [_ring_part(links, members, 2)]
    inside = [server for server in members if len(server) > 1]
    halves = [_ring_part(links, inside, 1)] if inside else []
    across = [[server[chunk % len(server)] for server in members] for chunk in range(max(map(len, members)))]
    return [*halves, _ring_part(links, across, 2, len(across)), *halves]


def _ring_part(links: Links, rings: Groups, rounds: int, connections: int = 1) -> list[Part]:
    """Return a phase of rings at the same time, at the pace of the slowest link.

    Args:
        links: of the cluster.
        rings: workers of every ring, in order.
        rounds: how often a chunk goes round its ring: once to be summed, once to distribute the sum.
        connections: rings that use the same ports and divide the buffer.
    """
    size = max(map(len, rings))
    weights: dict[Port, float] = {}
    latency_s, cap = 0.0, NEVER
    for ring in rings:
        hops_s = []
        for i, worker in enumerate(ring):
            index, *ports = links.path(worker, ring[(i + 1) % len(ring)])
            level = links.cluster.levels[index]
            lanes = links.lanes(index, worker, ring[(i + 1) % len(ring)])
            hops_s.append(level.latency_s)
            # A smaller ring sends less in the same time.
            part = (len(ring) - 1) / len(ring) / ((size - 1) / size)
            cap = min(cap, level.sum_cap_bytes_per_s(connections) / part)
            weights.update(dict.fromkeys(ports, connections * part) | dict.fromkeys(lanes, part))
        latency_s = max(latency_s, ring_latency_s(hops_s, rounds))
    share = rounds * (size - 1) / size / connections
    return [Part(share, tuple((links.port(port), weight) for port, weight in weights.items()), latency_s, cap)]


def ring_phases(links: Links, ring: Sequence[int], servers: Groups) -> Phases:
    """Return one ring of all, in which every chunk goes round once."""
    return [_ring_part(links, [ring], 1)]


def ring_latency_s(hops_s: Sequence[float], rounds: int = 2) -> float:
    """Return the latency of the chunk that arrives last, given the latency of every hop around a ring.

    A chunk makes `rounds` times (size - 1) successive hops: `rounds` times around the ring but for `rounds` successive
    hops. The chunk that arrives last leaves out those with the least latency.
    """
    size = len(hops_s)
    around = [*hops_s, *hops_s[:rounds]]
    start = min(range(size), key=lambda first: sum(around[first : first + rounds])) + rounds
    return math.fsum(hops_s[(start + hop) % size] for hop in range(rounds * (size - 1)))


def server_phases(links: Links, ring: Sequence[int], servers: Groups) -> Phases:
    """Return the phases of a sharded parameter server: members push every member's share to it, then pull the sums.

    Connections over one level have the rate of the port that most of them cross.
    """
    ports: dict[int, Counter[Port]] = {}
    for sender, receiver in itertools.permutations(ring, 2):
        index, *both = links.path(sender, receiver)
        ports.setdefault(index, Counter()).update([*both, *links.lanes(index, sender, receiver)])
    phase = [
        Part(
            1 / len(ring),
            tuple((links.port(port), float(count)) for port, count in counts.items()),
            links.cluster.levels[index].latency_s,
            links.cluster.levels[index].sum_cap_bytes_per_s(max(counts.values())),
        )
        for index, counts in ports.items()
    ]
    return [phase, phase]


ALGORITHMS: Final[dict[str, SumAlgorithm]] = {
    ALL_REDUCE: SumAlgorithm(all_reduce_traffic, all_reduce_phases),
    PARAMETER_SERVER: SumAlgorithm(server_traffic, server_phases),
    RING: SumAlgorithm(ring_traffic, ring_phases),
    ALL_TO_ALL: SumAlgorithm(all_to_all_traffic, lambda links, ring, servers: server_phases(links, ring, servers)[:1]),
}
