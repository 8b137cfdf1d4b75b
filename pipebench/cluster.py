"""Clusters: devices in levels (GPU in server, server in cluster) and the links between them.

Paper: PipeDream (SOSP'19) section 3.1, figure 7: level k joins components of level k-1 by links of bandwidth B_k.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipebench.errors import PlanError

LOCAL = "local"  # a cluster's device that is no entry of the catalogue but whatever is here
RING, TWO_LEVEL = "ring", "two-level"
ALL_REDUCES = (RING, TWO_LEVEL)  # the ways in which replicas sum their gradients, see `Cluster.all_reduce`
PER_PAIR, PER_VALUE = "per-pair", "per-value"
CONNECTIONS = (PER_PAIR, PER_VALUE)  # what has a connection of its own, see `Level.connections`


@dataclass(frozen=True)
class Level:
    """One level of links.

    Attributes:
        name: what one component of this level is, e.g. `server`.
        count: components of the level below inside one component of this level.
        bandwidth_bytes_per_s: what one component of the level below can send and, at the same time, receive;
            shared by all workers inside it.
        latency_s: from the last byte sent to the last byte received, on top of the transfer.
        efficiency: the fraction of the bandwidth that payload gets, above 0 and at most 1, the default.
        host_copy_bytes_per_s: the rate at which activations and gradients are copied from a device to its host before
            they are sent over this level, and from the host to a device when they have arrived, while the device waits;
            None where devices send and receive by themselves.
        flow_bytes_per_s: the payload that any one connection over this level gets at most, whatever its ports could
            carry; None without such a limit.
        ring_bytes_per_s: the payload that one sum among replicas, in a ring or by servers, passes on through a port of
            this level at most; None likewise.
        stage_ring_bytes_per_s: what takes its place for the stages of a pipeline; None where their replicas sum as
            those of a whole model do.
        p2p_bytes_per_s: the payload that one message from worker to worker gets at most; None likewise.
        connections: PER_PAIR, the default: the values of a message share one connection, and what that gets; PER_VALUE:
            each has its own.
        over_pcie: whether what crosses this level leaves and enters devices over the lanes to their hosts, `pcie`, and
            has priority there; true unless it says. NVLink doesn't.
    """

    name: str
    count: int
    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    host_copy_bytes_per_s: float | None = None
    flow_bytes_per_s: float | None = None
    ring_bytes_per_s: float | None = None
    stage_ring_bytes_per_s: float | None = None
    p2p_bytes_per_s: float | None = None
    connections: str = PER_PAIR
    over_pcie: bool = True

    def copy_s(self, num_bytes: float) -> float:
        """Return the seconds that one end of a message waits for its copy from, or to, its host."""
        return num_bytes / (self.host_copy_bytes_per_s or math.inf)

    @property
    def goodput_bytes_per_s(self) -> float:
        """What payload gets of the bandwidth."""
        return self.bandwidth_bytes_per_s * self.efficiency

    @property
    def message_cap_bytes_per_s(self) -> float:
        """What one connection of a message gets at most where its ports have room; infinite without such a limit."""
        return min(self.flow_bytes_per_s or math.inf, self.p2p_bytes_per_s or math.inf)

    def cap_of(self, values: float) -> float:
        """Return what a message of so many values of one size gets at most where its ports have room."""
        return self.message_cap_bytes_per_s * (values if self.connections == PER_VALUE else 1.0)

    def message_rate(self, values: float) -> float:
        """Return what a message of so many values of one size gets where it is alone."""
        return min(self.goodput_bytes_per_s, self.cap_of(values))

    @property
    def message_bytes_per_s(self) -> float:
        """What a message of one value that is alone gets."""
        return self.message_rate(1.0)

    def sum_cap_bytes_per_s(self, connections: float = 1.0) -> float:
        """Return what each connection of a sum gets at most where so many go through a port; infinite without limit."""
        return min(self.flow_bytes_per_s or math.inf, (self.ring_bytes_per_s or math.inf) / connections)

    @property
    def sum_bytes_per_s(self) -> float:
        """What a ring that is alone passes on."""
        return min(self.goodput_bytes_per_s, self.sum_cap_bytes_per_s())

    @property
    def of_stages(self) -> "Level":
        """The level as the sums of a pipeline's stages meet it."""
        rate = self.stage_ring_bytes_per_s
        return self if rate is None else replace(self, ring_bytes_per_s=rate, stage_ring_bytes_per_s=None)


@dataclass(frozen=True)
class Cluster:
    """A number of identical devices, grouped level by level.

    Attributes:
        name: short name, as in `recipes/clusters/`.
        device: name of the device every worker runs on: one of `pipebench/profile/devices.py` (`V100`, ...), or `local`
            for the machine we are on.
        memory_bytes: memory of one device; None where the cluster is the machine we are on.
        levels: innermost first.
        all_reduce: how replicas sum: RING (the default), or TWO_LEVEL: the sums of servers (the components of the
            outermost level that joins the replicas) are formed in a ring inside each, and added up in a ring among
            them.
        pcie_bytes_per_s: what a device copies to its host and, at the same time, back; needed where layers swap their
            activations; None where that isn't known.
        host_memory_bytes: memory of one host, a component that the outermost level joins, for what is swapped; None for
            no limit.
        launch_s: seconds that a host needs to issue one kernel to a device, which no kernel is shorter than; None for
            10 us, which eager PyTorch takes.
        pause_s: seconds that a device stands idle after every kernel that its host issues; None for none.
    """

    name: str
    device: str
    memory_bytes: int | None
    levels: tuple[Level, ...]
    all_reduce: str = RING
    pcie_bytes_per_s: float | None = None
    host_memory_bytes: int | None = None
    launch_s: float | None = None
    pause_s: float | None = None

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

    def for_stages(self, num_stages: int) -> "Cluster":
        """Return the cluster as the sums of a plan of so many stages, on different workers, meet it."""
        if num_stages < 2 or all(level.stage_ring_bytes_per_s is None for level in self.levels):
            return self
        return replace(self, levels=tuple(level.of_stages for level in self.levels))

    @property
    def at_best(self) -> "Cluster":
        """The cluster as the sums of no plan exceed it."""
        pairs = ((level, level.of_stages) for level in self.levels)
        return replace(self, levels=tuple(max(pair, key=lambda each: each.sum_bytes_per_s) for pair in pairs))

    def servers(self, ring: Sequence[int]) -> list[list[int]]:
        """Return which of a ring of devices, ascending, sum together first: all, or those of every server.

        By their positions in the ring.
        """
        if self.all_reduce == RING or len(ring) < 2:
            return [[*range(len(ring))]]
        outermost = self.level_between(ring[0], ring[-1])  # devices are numbered along the levels
        found: dict[int, list[int]] = {}
        for position, device in enumerate(ring):
            found.setdefault(self.component(device, outermost), []).append(position)
        return [*found.values()]


def coarser(cluster: Cluster, num_slices: int) -> Cluster:
    """Return the cluster of workers of so many neighbouring devices each.

    Each of a worker's devices sends what is its own over the ports that it shares with the others.

    Raises:
        PlanError: so many don't divide the devices of a component of the innermost level.
    """
    if num_slices == 1:
        return cluster
    inside, *others = cluster.levels
    if inside.count % num_slices:
        allowed = ", ".join(str(n) for n in range(1, inside.count + 1) if inside.count % n == 0)
        raise PlanError(
            f"got {num_slices}, and a {inside.name} of cluster {cluster.name} has {inside.count} devices, which so "
            f"many slices don't divide: allowed are {allowed}"
        )
    shared = (replace(each, bandwidth_bytes_per_s=each.bandwidth_bytes_per_s / num_slices) for each in others)
    host = cluster.host_memory_bytes
    return replace(
        cluster,
        levels=(replace(inside, count=inside.count // num_slices), *shared),
        host_memory_bytes=None if host is None else host // num_slices,
    )
