"""The cluster's links in time; concurrent transfers share them.

A message crosses one level, the innermost that joins its two workers. It uses the sending component's outgoing port and
the receiving component's incoming port, each with the level's goodput (bandwidth times efficiency) as capacity. Its
last byte arrives one latency after it was sent. Rates are max-min fair (`sharing`), and a level may limit the rate of a
message or a sum.

A connection carries one kind of message from one worker to another, in order: a message starts when the last byte of
the one before is sent. Connections share ports. The buckets of a group are also summed one after another.

A sum consists of flows in phases, each over all ports of a part of the group (`sums`).
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pipebench.cluster import Cluster, Level
from pipebench.schedule.operations import ACTIVATION, GRADIENT
from pipebench.simulate.agenda import Action, Agenda
from pipebench.simulate.sharing import NEVER, OVER, Flow, Resource, Sharing, Uses, YieldingFlow
from pipebench.simulate.sums import ALGORITHMS, Phases, Port
from pipebench.simulate.timeline import Transfer

_LANE = -1  # level of a `Port` between a device, in place of the component, and its host


class Connection:
    """The path of one kind of message from one worker to another."""

    __slots__ = ("copies", "counted", "ends", "kind", "last", "latency_s", "level", "uses")

    def __init__(self, kind: str, ends: tuple[int, int], level: Level, uses: Uses) -> None:
        self.kind = kind
        self.ends = ends  # sender and receiver
        self.level = level
        self.counted = (kind, level.name)  # key in `Network.num_bytes`
        # Whether messages go through the hosts, with a copy at both ends
        self.copies = level.host_copy_bytes_per_s is not None and kind in (ACTIVATION, GRADIENT)
        self.latency_s = level.latency_s
        self.uses = uses
        self.last: Flow = OVER


class Message(Flow):
    """Bytes on their way from one worker to another."""

    __slots__ = ("connection", "label", "num_bytes")

    def __init__(self, connection: Connection, num_bytes: int, label: str, values: float) -> None:
        cap_bytes_per_s = connection.level.message_cap_bytes_per_s(values)
        super().__init__(num_bytes, connection.uses, connection.latency_s, cap_bytes_per_s)
        self.connection = connection
        self.num_bytes = num_bytes
        self.label = label


@dataclass
class ReductionGroup:
    """Workers that sum buffers together."""

    sync: str  # how, a name in `sums.ALGORITHMS`
    kind: str  # of bytes
    ring: Sequence[int]  # the workers in the order of devices, so that a ring enters and leaves every component once
    servers: Sequence[Sequence[int]]  # positions in the ring of workers that sum first, see `Cluster.servers`
    phases: Phases  # in sequence; the parts of each run at the same time
    level: Level  # the slowest that is crossed
    queue: deque["_Sum"] = field(default_factory=deque)  # the current sum and those that wait for it
    sent: dict[int, Counter[str]] = field(default_factory=dict)  # bytes by level, by bytes of the buffer


@dataclass
class _Sum:
    """One buffer that a group sums."""

    group: ReductionGroup
    label: str
    num_bytes: int
    done: Action
    start_s: float = 0.0
    phase: int = -1
    num_running: int = 1  # parts of the phase; 1 before the first phase


class Network:
    """Transfers bytes, and counts them as payload by kind and level, once, at the sender.

    Args:
        cluster: the links.
        devices: the device of every worker; None: worker i is on device i.
        observe: called with every transfer that has ended.
        copies: whether devices copy to their hosts and back, on lanes that messages also use.
    """

    def __init__(
        self,
        cluster: Cluster,
        devices: Sequence[int] | None = None,
        observe: Callable[[Transfer], None] | None = None,
        *,
        copies: bool = False,
    ) -> None:
        self.cluster = cluster
        self.devices = range(cluster.num_workers) if devices is None else devices
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        self.agenda = Agenda()
        self.sharing = Sharing(self.agenda)
        self.observed = observe is not None
        self._observe = observe
        self._copies = copies
        self._ports: dict[Port, Resource] = {}
        self._connections: dict[tuple[str, int, int], Connection] = {}
        self._groups: dict[tuple[str, str, Sequence[int], int], ReductionGroup] = {}

    def connection(self, kind: str, sender: int, receiver: int) -> Connection:
        """Return the connection for a kind of message between two workers, which all their stages share."""
        found = self._connections.get((kind, sender, receiver))
        if found is None:
            index, *ports = self.path(sender, receiver)
            found = Connection(kind, (sender, receiver), self.cluster.levels[index], ())
            if not found.copies:
                ports += self.lanes(index, sender, receiver)
            found.uses = tuple((self.port(port), 1.0) for port in ports)
            self._connections[kind, sender, receiver] = found
        return found

    def send(
        self, connection: Connection, num_bytes: int, now_s: float, label: str = "", values: float = 1.0
    ) -> Message:
        """Send a message of `values` equal values, after its copy to the host if there is one; return it."""
        self.num_bytes[connection.counted] += num_bytes
        message = Message(connection, num_bytes, label, values)
        copy_s = connection.level.copy_s(num_bytes) if connection.copies else 0.0
        if copy_s:
            self.copy_with_host(message, now_s, out=True)
            self.agenda.push(now_s + copy_s, partial(self._set_out, message))
        else:
            self._set_out(message, now_s)
        return message

    def copy_with_host(self, message: Message, now_s: float, *, out: bool) -> None:
        """Occupy a lane while one end of a message that goes through the hosts is copied."""
        connection = message.connection
        if self._copies and connection.copies:
            lane = self.port((_LANE, self.devices[connection.ends[not out]], out))
            rate = connection.level.host_copy_bytes_per_s or NEVER
            self.sharing.start(Flow(message.num_bytes, ((lane, 1.0),), cap=rate), now_s)

    def _set_out(self, message: Message, now_s: float) -> None:
        """Start a message after those before it on its connection."""
        connection = message.connection
        last, connection.last = connection.last, message
        if last.end_s <= now_s:
            self.sharing.start(message, now_s)
        else:
            self.sharing.then(last, message, now_s)

    def arrived(self, message: Message) -> None:
        """Report a received message to the observer."""
        if self._observe is not None:
            kind, (sender, receiver), level = message.connection.kind, message.connection.ends, message.connection.level
            start_s, end_s, num_bytes = message.start_s, message.arrival_s, message.num_bytes
            self._observe(Transfer(kind, message.label, (sender,), (receiver,), level.name, num_bytes, start_s, end_s))

    def deliver(self, messages: Iterable[Message]) -> None:
        """Advance until these messages have arrived, at a drain, when nothing else is in progress."""
        self.agenda.play()
        for message in messages:
            self.arrived(message)

    def copy(self, worker: int, num_bytes: int, now_s: float, done: Action, *, out: bool) -> None:
        """Copy between a device and its host with the bandwidth that messages leave; runs `done` at its end."""
        flow = YieldingFlow(num_bytes, ((self.port((_LANE, self.devices[worker], out)), 1.0),))
        self.sharing.start(flow, now_s)
        self.sharing.notify(flow, done, now_s)

    def copied(self, copy: Transfer) -> None:
        """Count a copy that has ended, and report it to the observer."""
        self.num_bytes[copy.kind, copy.level] += copy.num_bytes
        if self._observe is not None:
            self._observe(copy)

    def sum_up(self, group: ReductionGroup, label: str, num_bytes: int, now_s: float, done: Action) -> None:
        """Sum a buffer after the group's earlier ones; `done` runs when all members have the sum."""
        for level, sent in self._sent(group, num_bytes).items():
            self.num_bytes[group.kind, level] += sent
        group.queue.append(_Sum(group, label, num_bytes, done))
        if len(group.queue) == 1:
            self._go_on(group.queue[0], now_s)

    def alone_s(self, sync: str, workers: Sequence[int], num_bytes: int) -> float:
        """Return the seconds of a group's sum without other traffic."""
        phases = self.group(sync, sync, workers).phases
        return math.fsum(max(part.alone_s(num_bytes) for part in parts) for parts in phases)

    def _go_on(self, begun: _Sum, now_s: float) -> None:
        """Start a sum, or its next phase once all parts of the current one have ended."""
        begun.num_running -= 1
        if begun.num_running > 0:
            return
        begun.phase += 1
        if begun.phase == 0:
            begun.start_s = now_s
        group = begun.group
        if begun.phase == len(group.phases):
            self._end(begun, now_s)
            return
        parts = group.phases[begun.phase]
        begun.num_running = len(parts)
        for part in parts:
            flow = Flow(part.share * begun.num_bytes, part.uses, part.latency_s, part.cap)
            self.sharing.start(flow, now_s)
            self.sharing.notify(flow, partial(self._go_on, begun), now_s)

    def _end(self, ended: _Sum, now_s: float) -> None:
        group = ended.group
        if self._observe is not None and group.phases:
            members, total = tuple(sorted(group.ring)), self._sent(group, ended.num_bytes).total()
            level, start_s = group.level.name, ended.start_s
            self._observe(Transfer(group.kind, ended.label, members, members, level, total, start_s, now_s))
        group.queue.popleft()
        ended.done(now_s)
        if group.queue:
            self._go_on(group.queue[0], now_s)

    def group(self, sync: str, kind: str, workers: Sequence[int], number: int = 0) -> ReductionGroup:
        """Return the group of workers for sums of a kind; `number` distinguishes groups of the same workers."""
        found = self._groups.get((sync, kind, workers, number))
        if found is None:
            ring = sorted(workers, key=self.devices.__getitem__)
            servers = self.cluster.servers([self.devices[worker] for worker in ring])
            phases = ALGORITHMS[sync].phases(self, ring, servers) if len(ring) > 1 else []
            crossed = {self.path(ring[i], ring[j])[0] for i, j, _ in ALGORITHMS[sync].traffic(0, servers)}
            levels = [self.cluster.levels[index] for index in sorted(crossed)]
            # A single worker crosses no level.
            level = min(levels, key=lambda each: each.sum_bytes_per_s, default=self.cluster.levels[0])
            found = self._groups[sync, kind, workers, number] = ReductionGroup(sync, kind, ring, servers, phases, level)
        return found

    def _sent(self, group: ReductionGroup, num_bytes: int) -> Counter[str]:
        """Return the bytes that a group sends to sum a buffer, by level."""
        found = group.sent.get(num_bytes)
        if found is None:
            found = group.sent[num_bytes] = Counter()
            for sender, receiver, sent in ALGORITHMS[group.sync].traffic(num_bytes, group.servers):
                index, *_ = self.path(group.ring[sender], group.ring[receiver])
                found[self.cluster.levels[index].name] += sent
        return found

    def port(self, port: Port) -> Resource:
        """Return the resource of a port, or of a lane to a host."""
        found = self._ports.get(port)
        if found is None:
            if port[0] == _LANE:  # unlimited for messages, which ports limit; copies get the rest of its rate
                found = Resource(NEVER, self.cluster.pcie_bytes_per_s or NEVER)
            else:
                found = Resource(self.cluster.levels[port[0]].goodput_bytes_per_s)
            self._ports[port] = found
        return found

    def lanes(self, index: int, sender: int, receiver: int) -> list[Port]:
        """Return the lanes to hosts that a message over a level also uses, if copies use them."""
        if not self._copies or not self.cluster.levels[index].over_pcie:
            return []
        return [(_LANE, self.devices[sender], True), (_LANE, self.devices[receiver], False)]

    def path(self, sender: int, receiver: int) -> tuple[int, Port, Port]:
        """Return the level between two workers, and the ports at both ends."""
        sending, receiving = self.devices[sender], self.devices[receiver]
        index = self.cluster.level_between(sending, receiving)
        outgoing = (index, self.cluster.component(sending, index), True)
        return index, outgoing, (index, self.cluster.component(receiving, index), False)
