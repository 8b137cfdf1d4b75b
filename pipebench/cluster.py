"""Clusters: devices in levels (GPU in server, server in cluster) and the links between them.

Paper: PipeDream (SOSP'19) section 3.1, figure 7: level k joins components of level k-1 by links of bandwidth B_k.
"""

import math
from dataclasses import dataclass


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
    """

    name: str
    device: str
    memory_bytes: int | None
    levels: tuple[Level, ...]

    @property
    def num_workers(self) -> int:
        """Number of devices, each of which takes one worker."""
        return math.prod(level.count for level in self.levels)

    def component(self, device: int, level_index: int) -> int:
        """Return which component of the level below `level_index` a device is in, counted over the cluster.

        Devices are numbered along the levels: those of one component follow each other.
        """
        return device // math.prod(level.count for level in self.levels[:level_index])

    def level_between(self, sender: int, receiver: int) -> int:
        """Return the index of the innermost level that joins two different devices."""
        for index in range(len(self.levels)):
            if self.component(sender, index + 1) == self.component(receiver, index + 1):
                return index
        raise ValueError(f"devices {sender} and {receiver} are not both in {self.name} ({self.num_workers} devices)")
