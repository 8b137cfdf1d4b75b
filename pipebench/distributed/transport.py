"""What one worker sends to and receives from the others: activations and gradients, each by a channel of its own.

Why nothing can deadlock, for any plan. An engine process blocks in four instructions only: receiving an activation,
receiving a gradient, waiting for an all-reduce, waiting for the norm. Everything else that talks to another process
returns at once: sends copy and go, an all-reduce starts inside a backward and goes on in Gloo's or NCCL's own threads.
The simulator blocks in the same four instructions of the same lists, and finds a circle if there is one; the tests run
it on every kind of plan, and where a list could end in a circle (short groups) it is read off an execution that ended.
Three things remain to be shown.

- What a blocked instruction waits for does arrive: every channel carries its messages in the order in which both ends
  list them, receives are posted before they are waited for, and the bytes are moved by threads that wait for nobody.
- An all-reduce and a message can't block each other: they belong to different process groups, with connections (NCCL:
  communicators and streams) of their own. All replicas of a stage start the buckets of their rounds in one order.
- In an evaluation, a sender that is far ahead waits for its oldest message to leave. A unit reads nothing but units of
  its own number, so the receiver of the oldest unfinished unit always has what it needs: it goes on, and the sender
  after it.

With NCCL the first use of a communicator makes its members' hosts wait for each other, also where the call is said to
return at once. So each is used before the first instruction: two workers' when their channel is opened, all channels by
all workers in one order; a stage's by `Together`. What runs on a GPU, too, waits for nothing but what an earlier
instruction of the same lists has started: NCCL's kernels are few and small enough to run at the same time (`world`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from pipebench.distributed.channel import LANES, Link, Message, Receiver, Sender
from pipebench.distributed.launch_join import leave
from pipebench.distributed.world import World
from pipebench.engine.setup import Setup, ranks_of
from pipebench.schedule.instructions import Instruction, Op
from pipebench.simulate.timeline import ACTIVATION, GRADIENT

_TAGS = {ACTIVATION: 2, GRADIENT: 4}  # each and the next one, for what is too large
_SENDS = {Op.SEND_ACTIVATION: ACTIVATION, Op.SEND_GRADIENT: GRADIENT}
_RECEIVES = {Op.RECEIVE_ACTIVATION: ACTIVATION, Op.RECEIVE_GRADIENT: GRADIENT}
_ANSWERS = {ACTIVATION: GRADIENT, GRADIENT: ACTIVATION}
_MOST_UNANSWERED = 64  # messages under way on an edge from which nothing comes back; see above, on evaluations
_Key = tuple[str, int, int]  # kind, sender, receiver


class Transport:
    """The channels of one worker.

    Args:
        setup: whose stages exchange values.
        world: the processes.
        worker: which worker this process is.
        clock: the run's clock, seconds.
    """

    def __init__(self, setup: Setup, world: World, worker: int, clock: Callable[[], float]) -> None:
        self._worker = worker
        self._senders: dict[tuple[str, int], Sender] = {}
        self._receivers: dict[tuple[str, int], Receiver] = {}
        rank_of = ranks_of(setup)
        lanes = {kind: [world.new_group("gloo") for _ in range(LANES)] for kind in _TAGS}
        on_gpu = setup.device.type == "cuda" and world.direct
        idle = torch.cuda.Stream(setup.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._groups: list[Any] = [group for groups in lanes.values() for group in groups]
        channels = list(channels_of(setup))
        most = max(Counter(end for _, *ends in channels for end in ends).values(), default=0)
        for kind, sender, receiver in channels:
            ranks = (rank_of[sender], rank_of[receiver])
            direct = _pair(world, ranks, most) if world.direct else None
            self._groups += [] if direct is None else [direct]
            if worker not in (sender, receiver):
                continue
            peer = ranks[1] if worker == sender else ranks[0]
            link = Link(peer, lanes[kind], _TAGS[kind], direct, setup.device, clock, idle)
            # Beside tensors that travel by themselves there is a header, and nothing else.
            first_bytes = 0 if world.direct else _expected_bytes(setup, kind, sender, receiver)
            if worker == sender:
                self._senders[kind, receiver] = Sender(link, first_bytes)
            else:
                self._receivers[kind, sender] = Receiver(link, first_bytes)

    def expect(self, program: Iterable[Instruction], is_empty: Callable[[int], bool]) -> None:
        """Post the first receives of a program; units without samples don't travel."""
        counts: Counter[tuple[str, int]] = Counter()
        for op, unit, peer, _ in program:
            if op in _RECEIVES and not is_empty(unit):
                counts[_RECEIVES[op], peer] += 1
        for key, count in counts.items():
            self._receivers[key].expect(count)

    def send(self, kind: str, unit: int, peer: int, values: Any, note: float, most_leaving: int | None = None) -> int:
        """Send a unit's values to a worker; return their payload in bytes. See `Sender.send`."""
        answers = self._receivers.get((_ANSWERS[kind], peer))
        if answers is None:
            most_leaving = most_leaving or _MOST_UNANSWERED
            return self._senders[kind, peer].send(unit, values, note, most_leaving)
        return self._senders[kind, peer].send(unit, values, note, most_leaving, answers.num_taken)

    def receive(self, kind: str, unit: int, peer: int) -> Message:
        """Wait for a unit's values from a worker.

        Raises:
            PeerLostError: it is gone.
        """
        message = self._receivers[kind, peer].receive(unit)
        sender = self._senders.get((_ANSWERS[kind], peer))
        if sender is not None:
            sender.taken(message.taken)
        return message

    def flush(self) -> None:
        """Wait until everything sent has left.

        Raises:
            PeerLostError: a receiver is gone.
        """
        for sender in self._senders.values():
            sender.flush()

    def close(self) -> None:
        """Give up the connections; nothing is under way any more that anybody waits for."""
        leave(self._groups)


def channels_of(setup: Setup) -> Iterator[_Key]:
    """Yield every channel of training and evaluation, in one order for all workers."""
    pipeline, returning = setup.pipeline, {}
    for edge in (*setup.evaluation.pipeline.edges, *pipeline.edges):  # the training's last: it says what comes back
        returning[edge.source, edge.target] = edge.has_gradient
    for (source_stage, target_stage), has_gradient in sorted(returning.items()):
        units = range(pipeline.replicas[source_stage] * pipeline.replicas[target_stage])
        pairs = {(pipeline.worker(source_stage, unit), pipeline.worker(target_stage, unit)) for unit in units}
        for source, target in sorted(pairs):
            yield ACTIVATION, source, target
            if has_gradient:
                yield GRADIENT, target, source


def _expected_bytes(setup: Setup, kind: str, sender: int, receiver: int) -> int:
    """Return the size of the largest values that the profile foresees on a channel."""
    places = setup.pipeline.places
    stages = (places[sender][0], places[receiver][0])
    if kind == GRADIENT:
        return max(setup.costs.gradient_bytes[stages[1], stages[0]].values())
    foreseen = [part.activation_bytes.get(stages, {}) for part in (setup.costs, setup.evaluation)]
    return max(num_bytes for by_size in foreseen for num_bytes in by_size.values())


def _pair(world: World, ranks: tuple[int, int], num_pairs: int) -> Any:
    """Return an NCCL group of two of its own, used once already: the first use waits for both."""
    group = world.new_group("nccl", ranks, num_pairs=num_pairs)
    if world.rank in ranks:
        word = torch.zeros(1, device=world.device)
        if world.rank == ranks[0]:
            dist.send(word, ranks[1], group=group)
        else:
            dist.recv(word, ranks[0], group=group)
        if world.device.type == "cuda":  # nothing is to be on its way when the next group is made
            torch.cuda.synchronize(world.device)
    return group
