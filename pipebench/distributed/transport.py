"""A worker's channels to the others: activations and gradients.

No plan can deadlock. A process blocks in five instructions only: receiving an activation, receiving a gradient, waiting
for an all-reduce, waiting for the norm, and sending an activation for which no gradient comes back. Everything else
returns at once. Sends copy. An all-reduce starts inside a backward and continues in threads of Gloo or NCCL, or in
shared memory once all replicas wait for it (`shared_sum`). The simulator blocks in the same five instructions of the
same lists and detects cycles. Tests run it on every kind of plan. Lists that could end in a cycle (short groups) are
taken from an execution that ended. It remains to show:

- What a blocked instruction waits for arrives. A channel carries its messages in the order of the sender's list. The
  receiver's list has the same order, or the receiver keeps messages that come before the one that it waits for
  (schedules of files, moving layers). On one host messages are in shared memory before the send returns. Between hosts
  receives are posted before they are waited for, and threads that wait for no worker move the bytes. Only moving layers
  may leave no earlier than they are waited for.
- An all-reduce and a message can't block each other: they use different process groups with their own connections
  (NCCL: communicators and streams). All replicas of a stage start the buckets of their rounds in one order.
- A sender whose receiver returns no gradient waits where, with gradients, it would wait for one: at most as many
  messages are under way as its stage has units in flight (`most_in_flight`). So the same argument holds for it.
- In an evaluation, a sender far ahead waits for its oldest message to leave. A unit reads only units of its own number,
  so the receiver of the oldest unfinished unit always has its inputs and continues, and then so does the sender.

With NCCL the first use of a communicator blocks its members' hosts, even if the call is asynchronous. So every
communicator is used before the first instruction: a pair's when its channel is opened, in one order on all workers, and
a stage's by `ProcessCollectives`. Work on a GPU only waits for what earlier instructions of the same lists have
started: NCCL's kernels are few and small enough to run at the same time (`nccl`).
"""

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipebench.distributed.channel import LANES, ChannelLink, ChannelSender, Receiver
from pipebench.distributed.ends import Received, ReceivingEnd, SendingEnd
from pipebench.distributed.instruction_times import HostTimer, Moment
from pipebench.distributed.launch_join import leave
from pipebench.distributed.meter import MeasuredMeter
from pipebench.distributed.shared_memory import connect
from pipebench.distributed.world import World
from pipebench.engine.setup import Setup, ranks_of
from pipebench.schedule.csv_form import is_csv
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import ACTIVATION, GRADIENT, MIGRATION, RECEIVE, Op, with_kind
from pipebench.schedule.programs import most_in_flight
from pipebench.simulate.timeline import CONTROL, EVALUATION, PCIE, Transfer

# A channel uses a tag for messages and the next one for the rests of large messages. These are the tags of the first
# edge; later edges have later ones. Channels of different kinds have different groups.
_TAGS = {ACTIVATION: 2, GRADIENT: 4, MIGRATION: 2}
_TAGS_OF_EDGE = 4
_RECEIVES = with_kind(RECEIVE)
_LABELS = {GRADIENT: "B", MIGRATION: "layers, "}
_MOST_UNANSWERED = 64  # messages of moving layers under way, which no message answers; see above, on evaluations
_MOST_LEAVING = 4  # messages of an evaluation under way: how far a worker may be ahead of the next one


class Channel(NamedTuple):
    """One direction of an edge, between two workers."""

    kind: str  # `activation`, `gradient` (the way back) or `migration` (moving layers, either way)
    source: int  # the sending stage
    target: int  # the receiving stage
    sender: int  # the sending worker
    receiver: int  # the receiving worker

    @property
    def edge(self) -> tuple[int, int]:
        """The earlier stage and the later one."""
        return min(self.source, self.target), max(self.source, self.target)

    @property
    def answering(self) -> "Channel":
        """The other direction of the edge."""
        kind = GRADIENT if self.kind == ACTIVATION else ACTIVATION
        return Channel(kind, self.target, self.source, self.receiver, self.sender)


class _Route(NamedTuple):
    """The channels of a message, looked up once per unit of a pipeline's period, as later units repeat them."""

    channel: Channel
    # This worker sends on the channel and receives on the answering one, or the other way round; None: no such channel
    sender: SendingEnd | None
    receiver: ReceivingEnd | None
    level: str  # cluster level between the two workers


class ChannelTransport:
    """The channels of one worker, its bytes, and its waits.

    With NCCL on GPUs the receiver knows how long its GPU waited for a message, and the sender how long the message
    took. `settle` combines these durations at a drain, so that the clocks of two GPUs are never compared.

    Args:
        setup: what to run.
        world: the workers.
        worker: this process's, by index.
        timer: times by the run's clock.
        meter: records every message that arrives and the wait for it.
        num_bytes: gets the bytes that this worker sends, by kind and level.
    """

    def __init__(
        self,
        setup: Setup,
        world: World,
        worker: int,
        timer: HostTimer,
        meter: MeasuredMeter,
        num_bytes: Counter[tuple[str, str]],
    ) -> None:
        self.latest_loss = float("nan")  # latest known mean loss, sent with every message
        self._worker = worker
        self._timer = timer
        self._meter = meter
        self._num_bytes = num_bytes
        self._senders: dict[Channel, SendingEnd] = {}
        self._receivers: dict[Channel, ReceivingEnd] = {}
        self._routes: dict[tuple[str, int, int, int], _Route] = {}
        self.switch_setup(setup)
        # Values that arrived before those that were waited for, by channel and unit
        self._early: dict[tuple[Channel, int], Any] = {}
        # With NCCL on a GPU: messages received since the last drain. Their times are those of the waits for them
        self._unsettled: dict[Channel, list[Transfer]] = {}
        self._groups: list[Any] = []
        self._rank_of = ranks_of(setup)
        channels = list(channels_of(setup))
        pairs = [(self._rank_of[channel.sender], self._rank_of[channel.receiver]) for channel in channels]
        shared = connect(world, pairs, timer.clock)
        if shared is None:
            self._open_groups(world, channels, pairs)
            return
        for channel, (sender, receiver) in zip(channels, shared, strict=True):
            if sender is not None:
                self._senders[channel] = sender
            if receiver is not None:
                self._receivers[channel] = receiver

    def _open_groups(self, world: World, channels: Sequence[Channel], pairs: Sequence[tuple[int, int]]) -> None:
        """Open channels by process groups: Gloo's for messages, NCCL's for tensors on GPUs."""
        setup = self._setup
        kinds = dict.fromkeys(channel.kind for channel in channels)
        lanes = {kind: [world.new_group("gloo") for _ in range(LANES)] for kind in kinds}
        timer = self._timer if self._timer.direct else None
        idle = torch.cuda.Stream(setup.device) if timer else None  # type: ignore[no-untyped-call]
        self._groups = [group for groups in lanes.values() for group in groups]
        edges = sorted({channel.edge for channel in channels})
        channels_of_worker = Counter(end for channel in channels for end in (channel.sender, channel.receiver))
        num_pairs = max(channels_of_worker.values(), default=0)
        for channel, ranks in zip(channels, pairs, strict=True):
            direct = _pair(world, ranks, num_pairs) if world.direct else None
            self._groups += [] if direct is None else [direct]
            if self._worker not in (channel.sender, channel.receiver):
                continue
            is_sender = self._worker == channel.sender
            tag = _TAGS[channel.kind] + _TAGS_OF_EDGE * edges.index(channel.edge)
            peer = world.process(ranks[is_sender])
            link = ChannelLink(peer, lanes[channel.kind], tag, direct, setup.device, self._timer.clock, idle, timer)
            # Tensors are sent separately: messages only have headers.
            first_bytes = 0 if world.direct else _expected_bytes(setup, channel)
            if is_sender:
                self._senders[channel] = ChannelSender(link, first_bytes)
            else:
                if timer:
                    self._unsettled[channel] = []
                self._receivers[channel] = Receiver(link, first_bytes)

    def switch_setup(self, setup: Setup) -> None:
        """Continue under a plan with other cuts; no message is under way."""
        self._setup = setup
        self._routes.clear()
        edges = setup.pipeline.edges
        self._returning = {(edge.source, edge.target) for edge in edges if edge.has_gradient}
        unanswered = [edge for edge in edges if not edge.has_gradient]
        most = most_in_flight(setup.pipeline) if unanswered else ()
        self._most_ahead = {(edge.source, edge.target): most[edge.source] for edge in unanswered}
        # Kinds of messages that a worker may wait for in another order than that in which they are sent.
        self._overtaken = {MIGRATION, *((ACTIVATION, GRADIENT) if is_csv(setup.pipeline.order) else ())}

    def expect(self, program: Iterable[Instruction], is_empty: Callable[[int], bool]) -> None:
        """Post the first receives of a program.

        Args:
            program: the worker's instructions.
            is_empty: whether a unit has no samples; such a unit is not sent.
        """
        counts: Counter[Channel] = Counter()
        for op, stage, unit, peer, *_ in program:
            if op in _RECEIVES and (op is Op.TAKE or not is_empty(unit)):
                counts[self._route(_RECEIVES[op], unit, peer, stage).channel] += 1
        for channel, count in counts.items():
            self._receivers[channel].expect(count)

    def send(self, kind: str, unit: int, source: int, target: int, values: Any) -> None:
        """Send a unit's values from one of this worker's stages to another worker's. See `SendingEnd.send`."""
        _, sender, answers, level = self._route(kind, unit, source, target)
        assert sender is not None
        num_taken = 0 if answers is None else answers.num_taken
        most_leaving = self._most_ahead.get((source, target), _MOST_UNANSWERED) if answers is None else None
        if kind == EVALUATION:
            most_leaving = _MOST_LEAVING
        self._num_bytes[kind, level] += sender.send(unit, values, self.latest_loss, most_leaving, num_taken)

    def receive(self, kind: str, unit: int, source: int, target: int) -> Any:
        """Wait for a unit's values from a stage of another worker."""
        route = self._route(kind, unit, source, target)
        if kind not in self._overtaken:
            return self._next(route, kind, unit).values
        while (route.channel, unit) not in self._early:
            message = self._next(route, kind, None)
            self._early[route.channel, message.unit] = message.values
        return self._early.pop((route.channel, unit))

    def _next(self, route: _Route, kind: str, unit: int | None) -> Received:
        """Receive the next message of a route, and record its transfer; `unit` is None for any unit.

        Takes note of the loss, and of the messages taken by the other worker, that come with it.
        """
        channel, sender, receiver, level = route
        assert receiver is not None
        start = self._timer.mark()
        message = receiver.receive(unit)
        if kind != CONTROL and sender is not None:
            sender.taken(message.taken)
        if kind == GRADIENT:
            self.latest_loss = message.note
        number = message.unit if kind == EVALUATION else self._setup.pipeline.label(message.unit)
        label = f"{_LABELS.get(kind, 'F')}{number}"
        workers, times_s = ((channel.sender,), (channel.receiver,)), (message.sent_s, message.arrived_s)
        self._arrived(channel, Transfer(kind, label, *workers, level, message.payload_bytes, *times_s), start)
        return message

    def _arrived(self, channel: Channel, transfer: Transfer, start: Moment) -> None:
        """Record a message that was waited for since `start`, now or at the next drain."""
        unsettled = self._unsettled.get(channel)
        if unsettled is not None:
            end = self._timer.mark()
            self._timer.then(lambda: unsettled.append(replace(transfer, start_s=start.s, end_s=end.s)))
        elif transfer.kind != CONTROL:
            self._timer.then(lambda: self._record(transfer, transfer.end_s - max(start.s, transfer.start_s), None))

    def _record(self, transfer: Transfer, stall_s: float, waited_s: float | None) -> None:
        self._meter.stalled(max(0.0, stall_s))
        self._meter.transfer(transfer, waited_s)

    def settle(self, world: World) -> None:
        """Record what has arrived since the last drain; all workers call it, when all moments are known."""
        if not self._timer.direct:
            return
        parcels: dict[int, bytes] = {}  # times of the messages sent, by the receiver's rank, in the order of channels
        for channel, sender in self._senders.items():
            rank = self._rank_of[channel.receiver]
            parcels[rank] = parcels.get(rank, b"") + array("d", sender.times_s()).tobytes()
        times_s = {rank: iter(array("d", content)) for rank, content in world.hand_over(parcels).items()}
        for channel, waits in self._unsettled.items():
            for wait in waits:
                sent_s, duration_s = (next(times_s[self._rank_of[channel.sender]]) for _ in range(2))
                end_s = min(sent_s + duration_s, wait.end_s)  # the two workers' clocks differ a little
                stall_s = min(wait.end_s - wait.start_s, duration_s)
                if wait.kind != CONTROL:
                    transfer = replace(wait, start_s=end_s - duration_s, end_s=end_s)
                    self._record(transfer, stall_s, end_s - stall_s)
            waits.clear()

    def copied(self, kind: str, num_bytes: int) -> None:
        """Count bytes copied between this worker's device and its host."""
        self._num_bytes[kind, PCIE] += num_bytes

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for sender in self._senders.values():
            sender.flush()

    def close(self) -> None:
        """Close the connections; no receive is pending."""
        ends: list[SendingEnd | ReceivingEnd] = [*self._senders.values(), *self._receivers.values()]
        for end in ends:
            end.close()
        leave(self._groups)

    def _route(self, kind: str, unit: int, source: int, target: int) -> _Route:
        """Return the channels of a unit's values between two stages; they are the same `pipeline.block` units later."""
        pipeline = self._setup.pipeline
        going = ACTIVATION if source < target else GRADIENT
        if kind == MIGRATION:
            going = MIGRATION
        key = (going, source, target, unit % pipeline.block)
        found = self._routes.get(key)
        if found is None:
            ends = pipeline.worker(source, unit), pipeline.worker(target, unit)
            channel = Channel(going, source, target, *ends)
            answers = going != MIGRATION and channel.edge in self._returning
            answering = channel.answering if answers else None
            out, back = (channel, answering) if ends[0] == self._worker else (answering, channel)
            level = self._setup.level_between(*ends).name
            sender, receiver = out and self._senders.get(out), back and self._receivers.get(back)
            found = _Route(channel, sender, receiver, level)
            self._routes[key] = found
        return found


def channels_of(setup: Setup) -> Iterator[Channel]:
    """Yield every channel of training and evaluation, in one order for all workers."""
    pipeline, returning = setup.pipeline, {}
    # Edges of training replace those of an evaluation, which have no gradients.
    for edge in (*setup.evaluation.pipeline.edges, *pipeline.edges):
        returning[edge.source, edge.target] = edge.has_gradient
    if setup.repartitions:  # layers may move, so any two stages may exchange values later
        stages = range(pipeline.num_stages)
        returning = dict.fromkeys(itertools.combinations(stages, 2), True)
    for (source, target), has_gradient in sorted(returning.items()):
        units = range(pipeline.replicas[source] * pipeline.replicas[target])
        pairs = {(pipeline.worker(source, unit), pipeline.worker(target, unit)) for unit in units}
        for sender, receiver in sorted(pairs):
            if sender == receiver:  # two stages of one worker
                continue
            channel = Channel(ACTIVATION, source, target, sender, receiver)
            yield channel
            if has_gradient:
                yield channel.answering
    for kind, source, target in (each for found in pipeline.hooks("channels").values() for each in found(setup)):
        yield Channel(kind, source, target, pipeline.worker(source, 0), pipeline.worker(target, 0))


def _expected_bytes(setup: Setup, channel: Channel) -> int:
    """Return the size of the largest values that the profile predicts on a channel."""
    if channel.kind == MIGRATION:
        return 0
    predicted = [setup.costs.activation_bytes, setup.evaluation.activation_bytes]
    if channel.kind == GRADIENT:
        predicted = [setup.costs.gradient_bytes]
    by_samples = [by_edge.get(channel.edge, {}) for by_edge in predicted]
    return max((num_bytes for sizes in by_samples for num_bytes in sizes.values()), default=0)


def _pair(world: World, ranks: tuple[int, int], num_pairs: int) -> Any:
    """Return an NCCL group of two, after its first use, which blocks both."""
    group = world.new_group("nccl", ranks, num_pairs=num_pairs)
    if world.rank in ranks:
        word = torch.zeros(1, device=world.device)
        if world.rank == ranks[0]:
            dist.send(word, world.process(ranks[1]), group=group)
        else:
            dist.recv(word, world.process(ranks[0]), group=group)
        if world.device.type == "cuda":  # complete before the next group is made
            torch.cuda.synchronize(world.device)
    return group
