"""Clusters: devices in levels (GPU in server, server in cluster) and the links between them.

Paper: PipeDream (SOSP'19) section 3.1, figure 7: level k joins components of level k-1 by links of bandwidth B_k.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Level:
    """One level of links.

    Attributes:
        name: what one component of this level is, e.g. `server`.
        count: components of the level below inside one component of this level.
        bandwidth_bytes_per_s: what one component of the level below can send and, at the same time, receive;
            shared by all workers inside it.
        latency_s: from the last byte sent to the last byte received, on top of the transfer.
        efficiency: the fraction of the bandwidth that payload gets, above 0 and at most 1.
    """

    name: str
    count: int
    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0

    @property
    def goodput_bytes_per_s(self) -> float:
        """What payload gets of the bandwidth."""
        return self.bandwidth_bytes_per_s * self.efficiency


@dataclass(frozen=True)
class Cluster:
    """A number of identical devices, grouped level by level.

    Attributes:
        name: short name, as in `recipes/clusters/`.
        device: name of the device every worker runs on (`V100`, ..., or `local` for the machine we are on).
        memory_bytes: memory of one device; None where the cluster is the machine we are on.
        levels: innermost first.
        devices: which device each worker runs on, numbered along the levels; empty for worker i on device i.
    """

    name: str
    device: str
    memory_bytes: int | None
    levels: tuple[Level, ...]
    devices: tuple[int, ...] = ()

    @property
    def num_workers(self) -> int:
        """Number of devices."""
        return math.prod(level.count for level in self.levels)

    def placed(self, devices: Sequence[int]) -> "Cluster":
        """Return the cluster with worker i on `devices[i]`."""
        return replace(self, devices=() if list(devices) == list(range(len(devices))) else tuple(devices))

    def device_of(self, worker: int) -> int:
        """Return the device a worker runs on."""
        return self.devices[worker] if self.devices else worker

    def ring(self, workers: Iterable[int]) -> list[int]:
        """Return workers in the order of their devices: as a ring, they leave and enter every component once."""
        return sorted(workers, key=self.device_of)

    def component(self, worker: int, level_index: int) -> int:
        """Return which component of the level below `level_index` the worker is in, counted over the cluster."""
        return self.device_of(worker) // math.prod(level.count for level in self.levels[:level_index])

    def level_between(self, sender: int, receiver: int) -> int:
        """Return the index of the innermost level that joins two different workers."""
        for index in range(len(self.levels)):
            if self.component(sender, index + 1) == self.component(receiver, index + 1):
                return index
        raise ValueError(f"workers {sender} and {receiver} are not both in {self.name} ({self.num_workers} workers)")
