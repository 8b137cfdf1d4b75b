"""The cluster's links in time: what is on its way at once shares them, and nobody takes them whole.

A message between two workers crosses one level, the innermost that joins them: the sending component's outgoing port
and the receiving component's incoming port of that level, each with the level's goodput (bandwidth times efficiency) as
its capacity. Its last byte arrives one latency after it was sent. Rates are max-min fair (`sharing`), and a level may
limit what one message, or one sum, gets of its ports.

What travels on one connection stays in order: a message waits until the last byte of the one before it is sent. A
connection is one kind of message from one worker to another; connections share ports. Likewise the buckets of one
group: a sum starts when the one before it has come to its end.

A ring all-reduce is one flow over all ports of its ring, at the pace of the slowest: 2 (r-1) steps in which every
member passes on one chunk, each with its latency (bandwidth-optimal ring; PipeDream section 3.1). Its chunks are many
and small, so a message that shares a port with it has half of the port, not nothing until the ring is done. On clusters
that say so it has two levels: reduce-scatter inside every server, rings among servers, all-gather inside.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from pipebench.cluster import Cluster, Level
from pipebench.schedule.operations import ACTIVATION, GRADIENT
from pipebench.schedule.syncs import ALL_REDUCE, PARAMETER_SERVER
from pipebench.simulate.agenda import Action, Agenda
from pipebench.simulate.sharing import NEVER, OVER, Flow, Resource, Sharing, Uses, YieldingFlow
from pipebench.simulate.sums import all_reduce_traffic, traffic
from pipebench.simulate.timeline import Transfer

_Port = tuple[int, int, bool]  # level, component of the level below, outgoing?
_LANE = -1  # in place of a level: between a device, in place of the component, and its host


class Connection:
    """Where one kind of messages goes from one worker to another.

    Attributes:
        kind: what travels on it.
        ends: sender and receiver.
        level: the level of links that it crosses.
        counted: under what its bytes are counted.
        copies: whether messages travel from host to host, and are copied there and from there.
        cap: the most bytes/s that a message on it gets.
    """

    __slots__ = ("cap", "copies", "counted", "ends", "kind", "last", "latency_s", "level", "uses")

    def __init__(self, kind: str, ends: tuple[int, int], level: Level, uses: Uses, values: float = 1.0) -> None:
        self.kind = kind
        self.ends = ends
        self.level = level
        self.counted = (kind, level.name)
        self.copies = level.host_copy_bytes_per_s is not None and kind in (ACTIVATION, GRADIENT)
        self.latency_s = level.latency_s
        self.cap = level.cap_of(values)
        self.uses = uses
        self.last: Flow = OVER


class Message(Flow):
    """Bytes on their way from one worker to another."""

    __slots__ = ("connection", "label", "num_bytes")

    def __init__(self, connection: Connection, num_bytes: int, label: str) -> None:
        super().__init__(num_bytes, connection.uses, connection.latency_s, connection.cap)
        self.connection = connection
        self.num_bytes = num_bytes
        self.label = label


@dataclass(frozen=True)
class _Part:
    """What members of a group send each other over one level in one phase, all of them at one pace.

    Attributes:
        share: of the buffer, what goes through each connection.
        uses: the ports, with the number of connections through each.
        latency_s: of the phase's steps together.
        cap: the most bytes/s that each connection gets.
    """

    share: float
    uses: Uses
    latency_s: float
    cap: float


@dataclass
class ReductionGroup:
    """Workers that sum buffers in one way.

    Attributes:
        sync: the way, a name in `syncs.SYNCS`.
        ring: the workers in the order of their devices: as a ring, they leave and enter every component once.
        phases: one after the other, the parts of each side by side.
        level: the slowest level that is crossed.
        queue: sums that wait for the one under way.
    """

    sync: str
    ring: Sequence[int]
    phases: list[list[_Part]]
    level: Level
    queue: deque["_Sum"] = field(default_factory=deque)
    sent: dict[int, Counter[str]] = field(default_factory=dict)  # by size of a buffer: bytes by level


@dataclass
class _Sum:
    """One buffer that a group sums."""

    group: ReductionGroup
    kind: str
    label: str
    num_bytes: int
    done: Action
    start_s: float = 0.0
    phase: int = -1
    under_way: int = 0


class Network:
    """Lets bytes travel, and counts them as payload, by kind and level, once, at the sender."""

    def __init__(
        self,
        cluster: Cluster,
        devices: Sequence[int] | None = None,
        observe: Callable[[Transfer], None] | None = None,
        *,
        copies: bool = False,
    ) -> None:
        """Take the links.

        Args:
            cluster: their levels.
            devices: of every worker; None where worker i is on device i.
            observe: is told of every transfer that has come to its end.
            copies: whether devices copy to their hosts and back, over lanes that messages cross, too.
        """
        self.cluster = cluster
        self.devices = range(cluster.num_workers) if devices is None else devices
        self.num_bytes: Counter[tuple[str, str]] = Counter()
        self.agenda = Agenda()
        self.sharing = Sharing(self.agenda)
        self.observed = observe is not None
        self._observe = observe
        self._copies = copies
        self._ports: dict[_Port, Resource] = {}
        self._connections: dict[tuple[str, int, int, float], Connection] = {}
        self._groups: dict[tuple[str, str, Sequence[int]], ReductionGroup] = {}

    def connection(self, kind: str, sender: int, receiver: int, values: float = 1.0) -> Connection:
        """Return the connection that a kind of messages takes from one worker to another.

        Args:
            kind: of the messages.
            sender: worker.
            receiver: worker.
            values: as how many of one size a message comes.
        """
        found = self._connections.get((kind, sender, receiver, values))
        if found is None:
            index, *ports = self._path(sender, receiver)
            found = Connection(kind, (sender, receiver), self.cluster.levels[index], (), values)
            if not found.copies:
                ports += self._lanes(index, sender, receiver)
            found.uses = tuple((self._port(port), 1.0) for port in ports)
            self._connections[kind, sender, receiver, values] = found
        return found

    def send(self, connection: Connection, num_bytes: int, now_s: float, label: str = "") -> Message:
        """Let a message set out, once it is on the host where it is copied there; return it."""
        self.num_bytes[connection.counted] += num_bytes
        message = Message(connection, num_bytes, label)
        copy_s = connection.level.copy_s(num_bytes) if connection.copies else 0.0
        if copy_s:
            self.copy_with_host(message, now_s, out=True)
            self.agenda.push(now_s + copy_s, partial(self._set_out, message))
        else:
            self._set_out(message, now_s)
        return message

    def copy_with_host(self, message: Message, now_s: float, *, out: bool) -> None:
        """Let a message that travels from host to host take its part of a lane while an end of it is copied."""
        connection = message.connection
        if self._copies and connection.copies:
            lane = self._port((_LANE, self.devices[connection.ends[not out]], out))
            rate = connection.level.host_copy_bytes_per_s or NEVER
            self.sharing.start(Flow(message.num_bytes, ((lane, 1.0),), cap=rate), now_s)

    def _set_out(self, message: Message, now_s: float) -> None:
        """Let a message go, behind those that are on its connection."""
        connection = message.connection
        last, connection.last = connection.last, message
        if last.end_s <= now_s:
            self.sharing.start(message, now_s)
        else:
            self.sharing.then(last, message, now_s)

    def arrived(self, message: Message) -> None:
        """Tell who observes that a message was taken."""
        if self._observe is not None:
            kind, (sender, receiver), level = message.connection.kind, message.connection.ends, message.connection.level
            start_s, end_s, num_bytes = message.start_s, message.arrival_s, message.num_bytes
            told = Transfer(kind, message.label, (sender,), (receiver,), level.name, num_bytes, start_s, end_s)
            self._observe(told)

    def deliver(self, messages: Iterable[Message]) -> None:
        """Let messages arrive before anything else goes on: at a drain."""
        self.agenda.play()
        for message in messages:
            self.arrived(message)

    def copy(self, worker: int, num_bytes: int, now_s: float, done: Action, *, out: bool) -> None:
        """Let a worker's device copy to its host, or back: at the rate that messages leave it.

        Args:
            worker: whose device it is.
            num_bytes: how much is copied.
            now_s: when it begins, the one before it over.
            done: happens when all of it is there.
            out: whether it goes to the host.
        """
        flow = YieldingFlow(num_bytes, ((self._port((_LANE, self.devices[worker], out)), 1.0),))
        self.sharing.start(flow, now_s)
        self.sharing.tell(flow, done, now_s)

    def copied(self, copy: Transfer) -> None:
        """Count a copy that has ended, and tell who observes of it."""
        self.num_bytes[copy.kind, copy.level] += copy.num_bytes
        if self._observe is not None:
            self._observe(copy)

    def sum_up(
        self, sync: str, kind: str, label: str, workers: Sequence[int], num_bytes: int, now_s: float, done: Action
    ) -> None:
        """Let workers sum a buffer, once what they have begun before is done.

        Args:
            sync: in which way, a name in `syncs.SYNCS`.
            kind: what its bytes are counted as.
            label: for people.
            workers: who sums.
            num_bytes: the buffer's size.
            now_s: when all of them have it.
            done: happens when all of them have the sum.
        """
        group = self._group(sync, kind, workers)
        for level, sent in self._sent(group, num_bytes).items():
            self.num_bytes[kind, level] += sent
        group.queue.append(_Sum(group, kind, label, num_bytes, done))
        if len(group.queue) == 1:
            self._begin(group.queue[0], now_s)

    def _begin(self, begun: _Sum, now_s: float) -> None:
        begun.start_s = now_s
        self._next_phase(begun, now_s)

    def _next_phase(self, begun: _Sum, now_s: float) -> None:
        begun.phase += 1
        group = begun.group
        if begun.phase == len(group.phases):
            self._end(begun, now_s)
            return
        parts = group.phases[begun.phase]
        begun.under_way = len(parts)
        for part in parts:
            flow = Flow(part.share * begun.num_bytes, part.uses, part.latency_s, part.cap)
            self.sharing.start(flow, now_s)
            self.sharing.tell(flow, partial(self._part_done, begun), now_s)

    def _part_done(self, begun: _Sum, now_s: float) -> None:
        begun.under_way -= 1
        if begun.under_way == 0:
            self._next_phase(begun, now_s)

    def _end(self, ended: _Sum, now_s: float) -> None:
        group = ended.group
        if self._observe is not None and group.phases:
            members, total = tuple(sorted(group.ring)), self._sent(group, ended.num_bytes).total()
            level = group.level.name
            told = Transfer(ended.kind, ended.label, members, members, level, total, ended.start_s, now_s)
            self._observe(told)
        group.queue.popleft()
        ended.done(now_s)
        if group.queue:
            self._begin(group.queue[0], now_s)

    def _group(self, sync: str, kind: str, workers: Sequence[int]) -> ReductionGroup:
        found = self._groups.get((sync, kind, workers))
        if found is None:
            ring = sorted(workers, key=self.devices.__getitem__)
            ways = {ALL_REDUCE: self._all_reduce_phases, PARAMETER_SERVER: self._server_phases}
            phases = ways[sync](ring) if len(ring) > 1 else []
            crossed = {self._path(ring[i], ring[j])[0] for i, j, _ in self._traffic(sync, ring, 0)}
            levels = [self.cluster.levels[index] for index in sorted(crossed)]
            # Who is alone sums at once, and crosses none.
            level = min(levels, key=lambda each: each.sum_bytes_per_s, default=self.cluster.levels[0])
            found = self._groups[sync, kind, workers] = ReductionGroup(sync, ring, phases, level)
        return found

    def _traffic(self, sync: str, ring: Sequence[int], num_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield what the members of a ring send each other: sender and receiver by position, bytes."""
        if sync == ALL_REDUCE:
            return all_reduce_traffic(num_bytes, self._servers(ring))
        return traffic(sync, num_bytes, len(ring))

    def _servers(self, ring: Sequence[int]) -> list[list[int]]:
        return self.cluster.servers([self.devices[worker] for worker in ring])

    def _all_reduce_phases(self, ring: Sequence[int]) -> list[list[_Part]]:
        """One ring of all; or reduce-scatter in every server, rings among them, all-gather in every server.

        A chunk's ring among servers joins those who have its sum: as many rings as the largest server has members.
        """
        servers = [[ring[position] for position in server] for server in self._servers(ring)]
        if len(servers) == 1:
            return [self._ring_part(servers, 2)]
        inside = [server for server in servers if len(server) > 1]
        halves = [self._ring_part(inside, 1)] if inside else []
        across = [[server[chunk % len(server)] for server in servers] for chunk in range(max(map(len, servers)))]
        return [*halves, self._ring_part(across, 2, len(across)), *halves]

    def _ring_part(self, rings: Sequence[Sequence[int]], rounds: int, connections: int = 1) -> list[_Part]:
        """Return a phase of rings side by side, at the pace of the slowest link, as often as slow as there are steps.

        Args:
            rings: workers, in the order in which they pass on.
            rounds: how often a chunk goes round: to be summed, and to be handed out.
            connections: how many of the rings go the same way and divide the buffer among them.
        """
        size = max(map(len, rings))
        weights: dict[_Port, float] = {}
        latency_s, cap = 0.0, NEVER
        for ring in rings:
            steps = rounds * (len(ring) - 1)
            for i, worker in enumerate(ring):
                index, *ports = self._path(worker, ring[(i + 1) % len(ring)])
                level = self.cluster.levels[index]
                lanes = self._lanes(index, worker, ring[(i + 1) % len(ring)])
                latency_s = max(latency_s, steps * level.latency_s)
                # A smaller ring passes on less, at the same pace.
                part = (len(ring) - 1) / len(ring) / ((size - 1) / size)
                cap = min(cap, level.sum_cap_bytes_per_s(connections) / part)
                weights.update(dict.fromkeys(ports, connections * part) | dict.fromkeys(lanes, part))
        share = rounds * (size - 1) / size / connections
        return [_Part(share, tuple((self._port(port), weight) for port, weight in weights.items()), latency_s, cap)]

    def _server_phases(self, ring: Sequence[int]) -> list[list[_Part]]:
        """Every worker is the server of a share: all push everybody its share, and when all are there pull the sums.

        Connections over one level go at one pace, that of the port that most of them go through.
        """
        ports: dict[int, Counter[_Port]] = {}
        for sender, receiver in itertools.permutations(ring, 2):
            index, *both = self._path(sender, receiver)
            ports.setdefault(index, Counter()).update([*both, *self._lanes(index, sender, receiver)])
        phase = [
            _Part(
                1 / len(ring),
                tuple((self._port(port), float(count)) for port, count in counts.items()),
                self.cluster.levels[index].latency_s,
                self.cluster.levels[index].sum_cap_bytes_per_s(max(counts.values())),
            )
            for index, counts in ports.items()
        ]
        return [phase, phase]

    def _sent(self, group: ReductionGroup, num_bytes: int) -> Counter[str]:
        """Return what a group sends when it sums a buffer, by level."""
        found = group.sent.get(num_bytes)
        if found is None:
            found = group.sent[num_bytes] = Counter()
            for sender, receiver, sent in self._traffic(group.sync, group.ring, num_bytes):
                index, *_ = self._path(group.ring[sender], group.ring[receiver])
                found[self.cluster.levels[index].name] += sent
        return found

    def _port(self, port: _Port) -> Resource:
        found = self._ports.get(port)
        if found is None:
            if port[0] == _LANE:  # what messages get is the ports' to say
                found = Resource(NEVER, self.cluster.pcie_bytes_per_s or NEVER)
            else:
                found = Resource(self.cluster.levels[port[0]].goodput_bytes_per_s)
            self._ports[port] = found
        return found

    def _lanes(self, index: int, sender: int, receiver: int) -> list[_Port]:
        """Return the lanes that a message over a level crosses beside its ports, where copies share them."""
        if not self._copies or not self.cluster.levels[index].over_pcie:
            return []
        return [(_LANE, self.devices[sender], True), (_LANE, self.devices[receiver], False)]

    def _path(self, sender: int, receiver: int) -> tuple[int, _Port, _Port]:
        """Return the level between two workers, and the ports at both ends."""
        sending, receiving = self.devices[sender], self.devices[receiver]
        index = self.cluster.level_between(sending, receiving)
        outgoing = (index, self.cluster.component(sending, index), True)
        return index, outgoing, (index, self.cluster.component(receiving, index), False)
