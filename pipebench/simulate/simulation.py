"""The simulator: a discrete-event loop that gives every instruction of a schedule a start and an end.

It is lazy: events come out one by one, each after everything it depends on, so that an engine can execute them as
they come. Equal times are settled by (time, priority, counter), so a run is the same run every time.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, cast

from pipebench.errors import ScheduleError
from pipebench.model.sampling import Size
from pipebench.schedule.instructions import BACKWARDS, COPIES, Instruction, Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.pushes import Turns
from pipebench.simulate.agenda import WORKERS, Action, Entry
from pipebench.simulate.copies import Copies, Copy
from pipebench.simulate.costs import Costs, StageCosts
from pipebench.simulate.network import Connection, Message, Network
from pipebench.simulate.pushing import Pushing
from pipebench.simulate.reductions import EVERY_STAGE, Reductions, Wait
from pipebench.simulate.timeline import ACTIVATION, GRADIENT, MIGRATION


class Event(NamedTuple):
    """One executed instruction.

    Attributes:
        start_s: when the worker turned to it; of a copy, when it began.
        end_s: when the worker could go on; of a copy, which keeps no worker, when it was over. Only then it is told of.
        worker: worker index.
        instruction: what it executed.
        stall_s: the part of the wait during which what it waited for was on its way (communication, not a bubble); of
            a copy in, how long a backward has waited for its end.
    """

    start_s: float
    end_s: float
    worker: int
    instruction: Instruction
    stall_s: float = 0.0


@dataclass
class _Edge:
    """Messages from one stage to another, of one kind.

    Attributes:
        kind: of the bytes.
        letter: of their labels.
        num_bytes: by size of the unit.
        first, replicas: workers of the stage that reads them: unit u goes to worker first + u mod replicas.
        values: as how many values of one size they come.
        connections: by sender and receiver.
        arrived: by unit, messages that nobody waits for yet, with the time at which they were sent.
        waiting: by unit, since when its receiver waits, and in which instruction.
    """

    kind: str
    letter: str
    num_bytes: Mapping[Size, int]
    first: int
    replicas: int
    values: float = 1.0
    connections: dict[tuple[int, int], Connection] = field(default_factory=dict)
    arrived: dict[int, tuple[Message, float]] = field(default_factory=dict)
    waiting: dict[int, tuple[float, Instruction]] = field(default_factory=dict)


class Moving(Protocol):
    """What moving layers costs, where they move while a pipeline runs."""

    def update_s(self, stage: int, round_index: int) -> float:
        """Return the seconds of an update."""

    def again_s(self, it: Instruction) -> float:
        """Return the seconds in which a unit runs forward once more through layers that have come."""

    def num_bytes(self, it: Instruction) -> int:
        """Return the bytes of what is given."""


_Stages = tuple[int, int]  # the stage a message leaves, the one that reads it
_RECEIVES = (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT, Op.TAKE_UNIT, Op.TAKE)


class Simulation:
    """Plays programs against costs and links. Iterate over it once.

    Args:
        pipeline: the shape the programs belong to.
        programs: one lazy list of instructions per worker.
        costs: what instructions cost.
        network: the links.
        size_of: what the costs of a unit depend on, its number of samples.
        start_s: time at which every worker starts.
        turns: whose push the server applies next, where replicas don't wait for each other.
        moving: what it costs that layers move; None where they stay.

    Raises:
        ScheduleError: while iterating, if workers wait for each other in a circle.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        programs: Sequence[Iterator[Instruction]],
        costs: Costs,
        network: Network,
        size_of: Callable[[int], Size],
        start_s: float = 0.0,
        turns: Turns | None = None,
        moving: Moving | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._moving = moving
        self._programs = programs
        self._costs = costs
        self._network = network
        self._size_of = size_of
        self._made: list[Event] = []  # events that actions have come to
        self._reductions = Reductions(pipeline, costs, network, self._wake)
        self._pushing = Pushing(pipeline, costs, network, turns or Turns(), self._wake, self._applied)
        swapped = [stage.swap_bytes for stage in costs.stages]
        copying = bool(pipeline.swaps) or moving is not None  # layers may begin to swap with a move
        self._copies = Copies(swapped, network, size_of, pipeline.label, self._copied) if copying else None
        self._durations = {op: [_durations(stage, op) for stage in costs.stages] for op in (Op.FORWARD, *BACKWARDS)}
        self._activations: dict[_Stages, _Edge] = {}
        self._gradients: dict[_Stages, _Edge] = {}
        first, replicas = pipeline.first_workers, pipeline.replicas
        for (source, target), sizes in costs.activation_bytes.items():
            values, _ = costs.values.get((source, target), (1.0, 1.0))
            self._activations[source, target] = _Edge(ACTIVATION, "F", sizes, first[target], replicas[target], values)
        for (source, target), sizes in costs.gradient_bytes.items():
            _, values = costs.values.get((source, target), (1.0, 1.0))
            self._gradients[target, source] = _Edge(GRADIENT, "B", sizes, first[source], replicas[source], values)
        self._migrations: dict[_Stages, _Edge] = {}
        for left in range(pipeline.num_stages - 1 if moving is not None else 0):
            for source, target in ((left, left + 1), (left + 1, left)):
                self._migrations[source, target] = _Edge(MIGRATION, "M", {}, first[target], replicas[target])
        self._loaders = [(start_s, start_s, start_s)] * len(programs)  # loaded; taken, the last two
        self._running = set(range(len(programs)))
        self.end_s = start_s
        for worker in range(len(programs)):
            self._wake(start_s, worker, None)

    def __iter__(self) -> Iterator[Event]:
        """Yield events in an order that respects every dependency."""
        agenda, programs, size_of, made = self._network.agenda, self._programs, self._size_of, self._made
        heap, counter, pop, replace = agenda.heap, agenda.counter, heapq.heappop, heapq.heappushpop
        durations, update_s = self._durations, [stage.update_s for stage in self._costs.stages]
        copies = self._copies
        # Names looked up once: this loop runs for every instruction. So does the making of events without defaults.
        new, update, weight, sends = (
            tuple.__new__,
            Op.UPDATE,
            Op.BACKWARD_WEIGHT,
            (Op.SEND_ACTIVATION, Op.SEND_GRADIENT, Op.GIVE_UNIT, Op.GIVE),
        )
        moving, again = self._moving, Op.FORWARD_AGAIN
        then: Entry | None = None  # what the worker at hand comes to next
        while heap or then is not None:
            now_s, _, _, worker, payload = pop(heap) if then is None else replace(heap, then)
            then = None
            if worker < 0:
                woken = cast("Action", payload)(now_s)
                if made:
                    yield from made
                    made.clear()
                if woken is None:
                    continue
                worker, payload = cast("tuple[int, Wait]", woken)
            if now_s > self.end_s:
                self.end_s = now_s
            if payload is not None:
                start_s, instruction, sent_s = cast("Wait", payload)
                stall_s = now_s - min(now_s, max(start_s, sent_s))
                yield new(Event, (start_s, now_s, worker, instruction, stall_s))
            for instruction in programs[worker]:
                op, stage, number, _, reduce, _, _ = instruction
                if op in durations:
                    if copies is not None and copies.holds_up(instruction, now_s):
                        break
                    lasts_s = durations[op][stage][size_of(number)]
                    if reduce >= 0:
                        self._reductions.join(stage, reduce, now_s, lasts_s, in_part=op is weight)
                elif op is update:
                    lasts_s = update_s[stage] if moving is None else moving.update_s(stage, number)
                elif op is again:
                    lasts_s = moving.again_s(instruction) if moving is not None else 0.0
                elif op in sends:
                    lasts_s = self._send(worker, instruction, now_s)
                    if lasts_s == 0:
                        yield new(Event, (now_s, now_s, worker, instruction, 0.0))
                        continue
                elif op is Op.PUSH:  # its event comes once the server has applied it
                    lasts_s = self._pushing.push(worker, instruction, now_s)
                    if lasts_s == 0:
                        continue
                    then = (now_s + lasts_s, WORKERS, next(counter), worker, None)
                    break
                elif copies is not None and op in COPIES:
                    copies.begin(worker, instruction, now_s)
                    yield from made
                    made.clear()
                    continue
                else:
                    ready = self._ready(worker, instruction, now_s)
                    if ready is None:
                        break
                    ready_s, sent_s = ready
                    if ready_s <= now_s:
                        yield new(Event, (now_s, now_s, worker, instruction, 0.0))
                        continue
                    then = (ready_s, WORKERS, next(counter), worker, (now_s, instruction, sent_s))
                    break
                yield new(Event, (now_s, now_s + lasts_s, worker, instruction, 0.0))
                then = (now_s + lasts_s, WORKERS, next(counter), worker, None)
                break
            else:
                self._running.discard(worker)
        self._check_ended()

    def _wake(self, time_s: float, worker: int, wait: Wait | None) -> None:
        """Let a worker go on at a time."""
        agenda = self._network.agenda
        heapq.heappush(agenda.heap, (time_s, WORKERS, next(agenda.counter), worker, wait))

    def _applied(self, now_s: float, worker: int, push: Instruction) -> None:
        """Take note of an update that a server has made."""
        self.end_s = max(self.end_s, now_s)
        self._made.append(Event(now_s, now_s, worker, push))

    def _copied(self, copy: Copy, now_s: float) -> None:
        """Take note of a copy that has ended, and let the backward begin that has waited for it."""
        stall_s = 0.0 if copy.waiting is None else now_s - copy.waiting[1]
        self.end_s = max(self.end_s, now_s)
        self._made.append(Event(copy.start_s, now_s, copy.worker, copy.instruction, stall_s))
        if copy.waiting is not None:
            self._compute(copy.worker, copy.waiting[0], now_s)

    def _compute(self, worker: int, instruction: Instruction, now_s: float) -> None:
        """Let a worker that has waited run a backward now."""
        op, stage, unit, _, reduce, *_ = instruction
        lasts_s = self._durations[op][stage][self._size_of(unit)]
        if reduce >= 0:
            self._reductions.join(stage, reduce, now_s, lasts_s, in_part=op is Op.BACKWARD_WEIGHT)
        self._made.append(Event(now_s, now_s + lasts_s, worker, instruction))
        self._wake(now_s + lasts_s, worker, None)

    def _send(self, worker: int, instruction: Instruction, now_s: float) -> float:
        """Let a message set out; return the seconds that sending it keeps the worker."""
        op, stage, unit, other, *_ = instruction
        edge = self._edges(op)[stage, other]
        peer = edge.first + unit % edge.replicas
        if edge.kind == MIGRATION and self._moving is not None:
            num_bytes = self._moving.num_bytes(instruction)
        else:
            num_bytes = edge.num_bytes[self._size_of(unit)]
        connection = edge.connections.get((worker, peer))
        if connection is None:
            connection = edge.connections[worker, peer] = self._network.connection(edge.kind, worker, peer, edge.values)
        label = (
            edge.letter + (str(unit) if op is Op.GIVE else self._pipeline.label(unit)) if self._network.observed else ""
        )
        message = self._network.send(connection, num_bytes, now_s, label)
        waiting = edge.waiting.pop(unit, None)
        if waiting is None:
            edge.arrived[unit] = message, now_s
        else:
            self._receive(message, peer, (*waiting, now_s), now_s)
        return self._end_s(message)

    def _edges(self, op: Op) -> dict[_Stages, _Edge]:
        """Return the messages that an instruction sends or receives one of."""
        if op is Op.SEND_ACTIVATION or op is Op.RECEIVE_ACTIVATION:
            return self._activations
        return self._gradients if op is Op.SEND_GRADIENT or op is Op.RECEIVE_GRADIENT else self._migrations

    def _receive(self, message: Message, worker: int, wait: Wait, now_s: float) -> None:
        """Let a worker go on when a message has arrived, and its end of it is done."""
        self._network.sharing.tell(message, partial(self._received, message, worker, wait), now_s)

    def _received(self, message: Message, worker: int, wait: Wait, now_s: float) -> tuple[int, Wait] | None:
        """Return who goes on now."""
        self._network.arrived(message)
        if self._copies is not None:
            self._network.copy_with_host(message, now_s, out=False)
        end_s = self._end_s(message)
        if end_s == 0:
            return worker, wait
        self._wake(now_s + end_s, worker, wait)
        return None

    def _end_s(self, message: Message) -> float:
        """Return what one end of a message takes of its worker's own time; there is none where nothing is sent."""
        num_bytes, connection = message.num_bytes, message.connection
        if not num_bytes:
            return 0.0
        host_s = self._costs.host.message(num_bytes)
        return host_s + connection.level.copy_s(num_bytes) if connection.copies else host_s

    def _ready(self, worker: int, instruction: Instruction, now_s: float) -> tuple[float, float] | None:
        """Return until when an instruction waits, and when what it waits for set out.

        None if that isn't known yet: the worker goes on when it is there.
        """
        op, stage, number, other, *_ = instruction
        if op is Op.LOAD_INPUT:
            return self._load(worker, stage, number, now_s), math.inf
        if op is Op.RECUT:
            return now_s, now_s
        if op in _RECEIVES:
            edge = self._edges(op)[other, stage]
            arrived = edge.arrived.pop(number, None)
            if arrived is None:
                edge.waiting[number] = now_s, instruction
                return None
            message, sent_s = arrived
            if message.arrival_s > now_s:
                self._receive(message, worker, (now_s, instruction, sent_s), now_s)
                return None
            self._network.arrived(message)
            if self._copies is not None:
                self._network.copy_with_host(message, now_s, out=False)
            return now_s + self._end_s(message), sent_s
        if op is Op.PULL:
            pulled_s = self._pushing.pull(worker, instruction, now_s)
            return None if pulled_s is None else (pulled_s, now_s)
        whose = EVERY_STAGE if op is Op.WAIT_NORM else stage
        if op is Op.WAIT_NORM or instruction.reduce >= 0:  # no backward of the round ran here
            self._reductions.join(whose, number, now_s)
        return self._reductions.wait(worker, whose, instruction, now_s)

    def _load(self, worker: int, stage: int, unit: int, now_s: float) -> float:
        """One loader and two buffers per worker: a load starts when the last one is done and a buffer was taken."""
        if self._costs.host.fetches:
            return now_s + self._costs.stages[stage].load_s[self._size_of(unit)]
        loaded_s, taken_before_s, taken_s = self._loaders[worker]
        ready_s = max(loaded_s, taken_before_s) + self._costs.stages[stage].load_s[self._size_of(unit)]
        self._loaders[worker] = (ready_s, taken_s, max(now_s, ready_s))
        return ready_s

    def _check_ended(self) -> None:
        """Refuse to end while somebody waits."""
        if self._running:
            raise ScheduleError(self._deadlock())

    def _deadlock(self) -> str:
        pipeline = self._pipeline
        edges = (*self._activations.items(), *self._gradients.items(), *self._migrations.items())
        receiving = [
            (pipeline.worker(stage, unit), *waiting)
            for (_, stage), edge in edges
            for unit, waiting in sorted(edge.waiting.items())
        ]
        stuck = [
            f"worker {worker} ({pipeline.worker_names[worker]}) waits in {instruction} since {since_s:g} s"
            for worker, since_s, instruction in (*receiving, *self._reductions.waiting(), *self._pushing.waiting())
        ]
        return "the schedule deadlocks:\n  " + "\n  ".join(stuck)


def _durations(costs: StageCosts, op: Op) -> Mapping[Size, float]:
    """Return the seconds of a forward, of a backward or of a part of one, by size of the unit."""
    if op is Op.BACKWARD_INPUT:
        return {size: seconds - costs.weight_s[size] for size, seconds in costs.backward_s.items()}
    return {Op.FORWARD: costs.forward_s, Op.BACKWARD: costs.backward_s, Op.BACKWARD_WEIGHT: costs.weight_s}[op]
