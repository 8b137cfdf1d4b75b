"""Clusters: devices in levels (GPU in server, server in cluster) and the links between them.

Paper: PipeDream (SOSP'19) section 3.1, figure 7: level k joins components of level k-1 by links of bandwidth B_k.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipebench.errors import PlanError

LOCAL = "local"  # as the device of a cluster: the devices of this machine
RING, TWO_LEVEL = "ring", "two-level"
ALL_REDUCES = (RING, TWO_LEVEL)  # algorithms of an all-reduce, see `Cluster.all_reduce`
PER_PAIR, PER_VALUE = "per-pair", "per-value"
CONNECTIONS = (PER_PAIR, PER_VALUE)  # see `Level.connections`


@dataclass(frozen=True)
class Level:
    """One level of links.

    A port is the link of one component of the level below. All rates are in one direction.

    Attributes:
        name: what one component of this level is, e.g. `server`.
        count: components of the level below inside one component of this level.
        bandwidth_bytes_per_s: what one component of the level below can send and, at the same time, receive;
            shared by all workers inside it.
        latency_s: from the last byte sent to the last byte received, on top of the transfer.
        efficiency: the fraction of the bandwidth that payload gets, above 0 and at most 1, the default.
        host_copy_bytes_per_s: the rate at which a device copies activations and gradients to its host before it sends
            them over this level, and from its host after it receives them, while it computes nothing; None where
            devices send and receive without such copies.
        flow_bytes_per_s: the most payload that one connection over this level carries, however fast its ports are;
            None: no limit.
        ring_bytes_per_s: the most payload that one all-reduce among replicas, or one exchange with parameter servers,
            carries through a port of this level; None: no limit.
        stage_ring_bytes_per_s: replaces `ring_bytes_per_s` for the replicas of a pipeline's stages; None where that
            holds for them, too.
        p2p_bytes_per_s: the most payload that one connection of a message from worker to worker carries; None: no
            limit.
        connections: PER_PAIR, the default: the tensors of a message share one connection and its limits; PER_VALUE:
            each tensor has a connection of its own.
        over_pcie: whether traffic over this level also crosses the PCIe lanes between a device and its host (`pcie`),
            where it has priority over swapping; true by default. NVLink doesn't.
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
        """Return the seconds that one end of a message spends on the copy to, or from, its host."""
        return num_bytes / (self.host_copy_bytes_per_s or math.inf)

    @property
    def goodput_bytes_per_s(self) -> float:
        """The bandwidth that is left for payload."""
        return self.bandwidth_bytes_per_s * self.efficiency

    @property
    def connection_cap_bytes_per_s(self) -> float:
        """The limit on one connection of a message, whatever its ports carry; infinite for none."""
        return min(self.flow_bytes_per_s or math.inf, self.p2p_bytes_per_s or math.inf)

    def message_cap_bytes_per_s(self, num_values: float) -> float:
        """Return the limit on a message of tensors of equal size, whatever its ports carry; infinite for none."""
        return self.connection_cap_bytes_per_s * (num_values if self.connections == PER_VALUE else 1.0)

    def message_rate(self, num_values: float) -> float:
        """Return the bytes per second of a message of tensors of equal size that has the ports to itself."""
        return min(self.goodput_bytes_per_s, self.message_cap_bytes_per_s(num_values))

    @property
    def message_bytes_per_s(self) -> float:
        """The rate of a message of one tensor that has the ports to itself."""
        return self.message_rate(1.0)

    def sum_cap_bytes_per_s(self, num_connections: float = 1.0) -> float:
        """Return the limit on each of an all-reduce's connections through one port; infinite for none."""
        return min(self.flow_bytes_per_s or math.inf, (self.ring_bytes_per_s or math.inf) / num_connections)

    @property
    def sum_bytes_per_s(self) -> float:
        """The rate of a ring all-reduce that has the ports to itself."""
        return min(self.goodput_bytes_per_s, self.sum_cap_bytes_per_s())

    @property
    def of_stages(self) -> "Level":
        """The level with the limit for sums among replicas of a pipeline's stages as `ring_bytes_per_s`."""
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
        all_reduce: how replicas sum: RING (the default), or TWO_LEVEL, which sums in a ring inside each server (a
            component of the outermost level that joins the replicas), and then in a ring among servers.
        pcie_bytes_per_s: the rate at which a device copies to its host and, at the same time, back. Needed where layers
            swap their activations; None if unknown.
        host_memory_bytes: memory for swapped activations of one host, a component that the outermost level joins;
            None: no limit.
        launch_s: seconds that a host needs to issue one kernel to a device, the least that a kernel takes; None:
            10 us, as in eager PyTorch.
        pause_s: seconds that a device is idle after every kernel that its host issues; None: none.
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
        """Return the index of the component that a device is in, at the level below `level_index`.

        Components are counted over the whole cluster. Devices of one component have consecutive numbers.
        """
        return device // math.prod(level.count for level in self.levels[:level_index])

    def level_between(self, sender: int, receiver: int) -> int:
        """Return the index of the innermost level that joins two different devices."""
        for index in range(len(self.levels)):
            if self.component(sender, index + 1) == self.component(receiver, index + 1):
                return index
        raise ValueError(f"devices {sender} and {receiver} are not both in {self.name} ({self.num_workers} devices)")

    def for_stages(self, num_stages: int) -> "Cluster":
        """Return the cluster with the limits on sums that hold for a plan with stages on different workers."""
        if num_stages < 2 or all(level.stage_ring_bytes_per_s is None for level in self.levels):
            return self
        return replace(self, levels=tuple(level.of_stages for level in self.levels))

    @property
    def at_best(self) -> "Cluster":
        """The cluster with the faster of both limits on sums at each level: a bound for every plan."""
        pairs = ((level, level.of_stages) for level in self.levels)
        return replace(self, levels=tuple(max(pair, key=lambda each: each.sum_bytes_per_s) for pair in pairs))

    def servers(self, ring: Sequence[int]) -> list[list[int]]:
        """Return the groups of a ring's devices that sum first: one per server with TWO_LEVEL, otherwise one.

        Args:
            ring: devices, ascending.

        Returns:
            Per group, positions in `ring`.
        """
        if self.all_reduce == RING or len(ring) < 2:
            return [[*range(len(ring))]]
        outermost = self.level_between(ring[0], ring[-1])  # devices are numbered along the levels
        found: dict[int, list[int]] = {}
        for position, device in enumerate(ring):
            found.setdefault(self.component(device, outermost), []).append(position)
        return [*found.values()]


def coarser(cluster: Cluster, num_slices: int) -> Cluster:
    """Return the cluster in which `num_slices` neighbouring devices make one worker.

    The devices of a worker share its ports: each has 1 / `num_slices` of the bandwidth for its slice.

    Raises:
        PlanError: `num_slices` doesn't divide the devices of a component of the innermost level.
    """
    if num_slices == 1:
        return cluster
    inside, *others = cluster.levels
    if inside.count % num_slices:
        allowed = ", ".join(str(n) for n in range(1, inside.count + 1) if inside.count % n == 0)
        raise PlanError(
            f"got {num_slices}, which doesn't divide the {inside.count} devices of a {inside.name} of cluster "
            f"{cluster.name}: allowed are {allowed}"
        )
    shared = (replace(each, bandwidth_bytes_per_s=each.bandwidth_bytes_per_s / num_slices) for each in others)
    host = cluster.host_memory_bytes
    return replace(
        cluster,
        levels=(replace(inside, count=inside.count // num_slices), *shared),
        host_memory_bytes=None if host is None else host // num_slices,
    )
