"""The cluster's links in time: who may send when, and when the last byte arrives.

A transfer between two workers crosses one level, the innermost that joins them, and takes the sending component's
outgoing port and the receiving component's incoming port of that level for bytes / bandwidth seconds, whole and in
order of request, at the level's goodput (bandwidth times efficiency). Its last byte arrives one latency later.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from pipebench.cluster import Cluster
from pipebench.timeline import Transfer

_Port = tuple[int, int, bool]  # level, component of the level below, outgoing?


def ring_bytes(num_bytes: int, size: int) -> list[int]:
    """Return what each member of a ring all-reduce sends, in bytes; together exactly 2 (size - 1) num_bytes.

    The buffer is cut into `size` chunks as evenly as 4-byte elements allow. Member i passes on every chunk but chunk
    i+1 while sums are formed, and every chunk but chunk i+2 while they are handed round.
    """
    elements, rest = divmod(num_bytes, 4)
    chunks = [4 * (elements // size + (i < elements % size)) for i in range(size)]
    chunks[0] += rest
    return [2 * num_bytes - chunks[(i + 1) % size] - chunks[(i + 2) % size] for i in range(size)]


class Network:
    """Grants links by time of request and counts payload bytes, by kind and level, once, at the sender."""

    def __init__(self, cluster: Cluster, observe: Callable[[Transfer], None] | None = None) -> None:
        self.cluster = cluster
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        self._free_s: dict[_Port, float] = {}
        self._paths: dict[tuple[int, int], tuple[int, _Port, _Port]] = {}
        self._observe = observe

    def send(self, kind: str, label: str, sender: int, receiver: int, num_bytes: int, now_s: float) -> float:
        """Start a transfer; return when its last byte arrives [s]."""
        level_index, outgoing, incoming = self._path(sender, receiver)
        level = self.cluster.levels[level_index]
        start_s = max(now_s, self._free_s.get(outgoing, 0.0), self._free_s.get(incoming, 0.0))
        sent_s = start_s + num_bytes / level.goodput_bytes_per_s
        self._free_s[outgoing] = self._free_s[incoming] = sent_s
        end_s = sent_s + level.latency_s
        self.num_bytes[kind, level.name] += num_bytes
        if self._observe is not None:
            self._observe(Transfer(kind, label, (sender,), (receiver,), level.name, num_bytes, start_s, end_s))
        return end_s

    def all_reduce(self, kind: str, label: str, workers: Sequence[int], num_bytes: int, now_s: float) -> float:
        """Start a ring all-reduce of a buffer of `num_bytes` among two or more workers; return its end [s].

        2 (r - 1) steps, each as slow as the ring's slowest link (bandwidth-optimal ring; PipeDream section 3.1).
        """
        size, ring = len(workers), self.cluster.ring(workers)
        paths = [self._path(worker, ring[(i + 1) % size]) for i, worker in enumerate(ring)]
        levels = [self.cluster.levels[index] for index, _, _ in paths]
        ports = {port for _, outgoing, incoming in paths for port in (outgoing, incoming)}
        start_s = max(now_s, *(self._free_s.get(port, 0.0) for port in ports))
        step_s = max(num_bytes / size / level.goodput_bytes_per_s + level.latency_s for level in levels)
        end_s = start_s + 2 * (size - 1) * step_s
        for port in ports:
            self._free_s[port] = end_s
        for level, sent in zip(levels, ring_bytes(num_bytes, size), strict=True):
            self.num_bytes[kind, level.name] += sent
        if self._observe is not None:
            members, slowest = tuple(workers), min(levels, key=lambda level: level.goodput_bytes_per_s)
            total = 2 * (size - 1) * num_bytes
            self._observe(Transfer(kind, label, members, members, slowest.name, total, start_s, end_s))
        return end_s

    def _path(self, sender: int, receiver: int) -> tuple[int, _Port, _Port]:
        path = self._paths.get((sender, receiver))
        if path is None:
            index = self.cluster.level_between(sender, receiver)
            outgoing = (index, self.cluster.component(sender, index), True)
            incoming = (index, self.cluster.component(receiver, index), False)
            path = self._paths[sender, receiver] = (index, outgoing, incoming)
        return path
