"""The simulator: a discrete-event loop that gives every instruction of a schedule a start and an end.

It is lazy: events come out one by one, each after everything it depends on, so that an engine can execute them as
they come. Equal times are settled by (time, priority, counter), so a run is the same run every time.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

from pipebench.errors import ScheduleError
from pipebench.schedule.instructions import BACKWARDS, Instruction, Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.pushes import Turns
from pipebench.schedule.syncs import ALL_REDUCE, SYNCS
from pipebench.simulate.costs import NO_HOST_COSTS, Bucket, Costs, StageCosts
from pipebench.simulate.network import Network
from pipebench.simulate.timeline import ACTIVATION, CONTROL, GRADIENT

_EVERY_STAGE = -1
_NORM = (Bucket(4, 1.0),)  # one float32: the squared norm of all gradients
_NETWORK_FIRST, _WORKERS = 0, 1  # at equal times links are granted before workers go on


class Event(NamedTuple):
    """One executed instruction.

    Attributes:
        start_s: when the worker turned to it.
        end_s: when the worker could go on.
        worker: worker index.
        instruction: what it executed.
        stall_s: the part of the wait during which what it waited for was on its way (communication, not a bubble).
    """

    start_s: float
    end_s: float
    worker: int
    instruction: Instruction
    stall_s: float = 0.0


@dataclass
class _Reduction:
    """One all-reduce: the gradients of one round of one stage."""

    ready_s: list[float]  # per bucket, when the last replica has it
    waits_left: int
    joined: int = 0
    buckets_left: int = 0
    end_s: float | None = None
    all_joined_s: float = 0.0


@dataclass
class _Server:
    """What applies pushes one after the other, and answers pulls.

    Attributes:
        turns: whose push is next.
        there: pushes that have arrived, by minibatch: the worker and its instruction.
        free_s: when it is done with those it has begun to apply.
        applied: pushes applied.
        outstanding: workers whose push isn't applied yet.
        pulling: by worker, since when it waits for weights, and by which instruction.
    """

    turns: Turns
    there: dict[int, tuple[int, Instruction]] = field(default_factory=dict)
    free_s: float = 0.0
    applied: int = 0
    outstanding: set[int] = field(default_factory=set)
    pulling: dict[int, tuple[float, Instruction]] = field(default_factory=dict)

    def answers(self, worker: int, pull: Instruction) -> bool:
        """Return whether a pull can be answered: what the worker has pushed is in, or all that it waits for."""
        return worker not in self.outstanding and self.applied >= pull.version


_Network = Callable[[float], Iterable["Event"]]  # what happens on the links or the server at a time
_Message = tuple[Op, int, int, int]  # kind of send, unit, the stage it leaves, the one that reads it


class Simulation:
    """Plays programs against costs and links. Iterate over it once.

    Args:
        pipeline: the shape the programs belong to.
        programs: one lazy list of instructions per worker.
        costs: what instructions cost.
        network: the links.
        size_of: number of samples of a unit.
        start_s: time at which every worker starts.
        turns: whose push the server applies next, where replicas don't wait for each other.

    Raises:
        ScheduleError: while iterating, if workers wait for each other in a circle.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        programs: Sequence[Iterator[Instruction]],
        costs: Costs,
        network: Network,
        size_of: Callable[[int], int],
        start_s: float = 0.0,
        turns: Turns | None = None,
    ) -> None:
        self._server = _Server(turns or Turns())
        self._pipeline = pipeline
        self._programs = programs
        self._costs = costs
        self._network = network
        self._size_of = size_of
        self._counter = itertools.count()
        self._heap: list[tuple[float, int, int, int, object]] = []
        self._arrivals: dict[_Message, tuple[float, float]] = {}
        self._receiving: dict[_Message, tuple[float, Instruction]] = {}
        self._reductions: dict[tuple[int, int], _Reduction] = {}
        self._waiting: dict[tuple[int, int], list[tuple[int, float, Instruction]]] = {}
        self._loaders = [(start_s, start_s, start_s)] * len(programs)  # loaded; taken, the last two
        self._running = set(range(len(programs)))
        self.end_s = start_s
        for worker in range(len(programs)):
            self._push(start_s, worker, None)

    def __iter__(self) -> Iterator[Event]:
        """Yield events in an order that respects every dependency."""
        heap = self._heap
        while heap:
            now_s, _, _, worker, payload = heapq.heappop(heap)
            if worker < 0:
                yield from cast("_Network", payload)(now_s)
                continue
            self.end_s = max(self.end_s, now_s)
            if payload is not None:
                start_s, instruction, sent_s = cast("tuple[float, Instruction, float]", payload)
                yield Event(start_s, now_s, worker, instruction, now_s - min(now_s, max(start_s, sent_s)))
            yield from self._run(worker, now_s)
        if self._running:
            raise ScheduleError(self._deadlock())

    def _push(self, time_s: float, worker: int, payload: object, priority: int = _WORKERS) -> None:
        heapq.heappush(self._heap, (time_s, priority, next(self._counter), worker, payload))

    def _run(self, worker: int, now_s: float) -> Iterator[Event]:
        """Execute a worker's instructions until one takes time."""
        stages = self._costs.stages
        for instruction in self._programs[worker]:
            op, stage, number, _, reduce, *_ = instruction
            if op is Op.FORWARD:
                duration = stages[stage].forward_s[self._size_of(number)]
            elif op in BACKWARDS:
                duration = _backward_s(stages[stage], op, self._size_of(number))
                if reduce >= 0:
                    self._join(stage, reduce, now_s, duration, in_part=op is Op.BACKWARD_WEIGHT)
            elif op is Op.UPDATE:
                duration = stages[stage].update_s
            elif op is Op.PUSH:  # its event comes once the server has applied it
                duration = self._set_out(worker, instruction, now_s)
                if duration > 0:
                    self._push(now_s + duration, worker, None)
                    return
                continue
            elif op is Op.SEND_ACTIVATION or op is Op.SEND_GRADIENT:
                duration = self._send(worker, instruction, now_s)
                if duration == 0:
                    yield Event(now_s, now_s, worker, instruction)
                    continue
            else:
                ready = self._ready(worker, instruction, now_s)
                if ready is None:
                    return
                ready_s, sent_s = ready
                host_s = self._host_s(instruction)
                if host_s > 0:
                    ready_s = max(ready_s, now_s) + host_s
                if ready_s <= now_s:
                    yield Event(now_s, now_s, worker, instruction)
                    continue
                self._push(ready_s, worker, (now_s, instruction, sent_s))
                return
            yield Event(now_s, now_s + duration, worker, instruction)
            self._push(now_s + duration, worker, None)
            return
        self._running.discard(worker)

    def _send(self, worker: int, instruction: Instruction, now_s: float) -> float:
        """Let a message set out; return the seconds that sending it keeps the worker."""
        op, stage, unit, other, *_ = instruction
        size, peer = self._size_of(unit), self._pipeline.worker(other, unit)
        if op is Op.SEND_ACTIVATION:
            kind, label, num_bytes = ACTIVATION, "F", self._costs.activation_bytes[stage, other][size]
        else:
            kind, label, num_bytes = GRADIENT, "B", self._costs.gradient_bytes[other, stage][size]
        arrival_s = self._network.send(kind, f"{label}{self._pipeline.label(unit)}", worker, peer, num_bytes, now_s)
        message = (op, unit, stage, other)
        receiver = self._receiving.pop(message, None)
        if receiver is None:
            self._arrivals[message] = (arrival_s, now_s)
        else:
            host_s = self._host_s(receiver[1])
            self._push(max(arrival_s, now_s) + host_s, peer, (*receiver, now_s))
        return self._costs.host.message(num_bytes) if size else 0.0

    def _host_s(self, instruction: Instruction) -> float:
        """Return what a wait's communication takes of the waiting worker's own processor."""
        op, stage, number, other, *_ = instruction
        host = self._costs.host
        if host == NO_HOST_COSTS:
            return 0.0
        if op is Op.WAIT_ALL_REDUCE:
            buckets = self._costs.stages[stage].buckets
            return host.all_reduce(sum(bucket.num_bytes for bucket in buckets), self._pipeline.replicas[stage])
        if op not in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT) or self._size_of(number) == 0:
            return 0.0
        size = self._size_of(number)
        if op is Op.RECEIVE_ACTIVATION:
            return host.message(self._costs.activation_bytes[other, stage][size])
        return host.message(self._costs.gradient_bytes[stage, other][size])

    def _ready(self, worker: int, instruction: Instruction, now_s: float) -> tuple[float, float] | None:
        """Return when a blocking instruction can end and when what it waits for set out; None if unknown yet."""
        op, stage, number, other, *_ = instruction
        if op is Op.LOAD_INPUT:
            return self._load(worker, stage, number, now_s), math.inf
        if op is Op.WAIT_ALL_REDUCE:
            if instruction.reduce >= 0:  # no backward of this round ran here
                self._join(stage, number, now_s, 0.0)
            return self._wait_for_reduction(worker, stage, instruction, now_s)
        if op is Op.WAIT_NORM:
            self._join(_EVERY_STAGE, number, now_s, 0.0)
            return self._wait_for_reduction(worker, _EVERY_STAGE, instruction, now_s)
        if op is Op.PULL:
            if not self._server.answers(worker, instruction):
                self._server.pulling[worker] = (now_s, instruction)
                self._apply(now_s)  # a given order may have waited for what a shorter segment doesn't have
                return None
            return self._hand_out(worker, instruction, now_s), now_s
        sent_as = Op.SEND_ACTIVATION if op is Op.RECEIVE_ACTIVATION else Op.SEND_GRADIENT
        message = (sent_as, number, other, stage)
        arrival = self._arrivals.pop(message, None)
        if arrival is None:
            self._receiving[message] = (now_s, instruction)
        return arrival

    def _load(self, worker: int, stage: int, unit: int, now_s: float) -> float:
        """One loader and two buffers per worker: a load starts when the last one is done and a buffer was taken."""
        if self._costs.host.fetches:
            return now_s + self._costs.stages[stage].load_s[self._size_of(unit)]
        loaded_s, taken_before_s, taken_s = self._loaders[worker]
        ready_s = max(loaded_s, taken_before_s) + self._costs.stages[stage].load_s[self._size_of(unit)]
        self._loaders[worker] = (ready_s, taken_s, max(now_s, ready_s))
        return ready_s

    def _join(self, stage: int, round_index: int, now_s: float, duration_s: float, *, in_part: bool = False) -> None:
        """A replica's gradients of a round become ready, bucket by bucket, while its backward (or its part) runs."""
        buckets, workers, _, _ = self._group(stage)
        replicas = len(workers)
        reduction = self._reductions.get((stage, round_index))
        if reduction is None:
            reduction = self._reductions[stage, round_index] = _Reduction([0.0] * len(buckets), replicas)
        reduction.joined += 1
        reduction.all_joined_s = max(reduction.all_joined_s, now_s + duration_s)
        for index, bucket in enumerate(buckets):
            ready = bucket.ready_in_part if in_part else bucket.ready
            reduction.ready_s[index] = max(reduction.ready_s[index], now_s + ready * duration_s)
        if reduction.joined < replicas:
            return
        reduction.buckets_left = len(buckets)
        for index in range(len(buckets)):
            start = partial(self._start_bucket, stage, round_index, index, reduction)
            self._push(reduction.ready_s[index], -1, start, _NETWORK_FIRST)
        if not buckets:
            start = partial(self._start_bucket, stage, round_index, -1, reduction)
            self._push(reduction.all_joined_s, -1, start, _NETWORK_FIRST)

    def _start_bucket(
        self, stage: int, round_index: int, index: int, reduction: _Reduction, now_s: float
    ) -> Iterable[Event]:
        if index < 0:
            self._reduced(stage, round_index, reduction, now_s)
            return ()
        buckets, workers, sync, kind = self._group(stage)
        end_s = self._network.sum_up(sync, kind, f"R{round_index}", workers, buckets[index].num_bytes, now_s)
        reduction.buckets_left -= 1
        if reduction.buckets_left == 0:
            self._reduced(stage, round_index, reduction, end_s)
        return ()

    def _reduced(self, stage: int, round_index: int, reduction: _Reduction, end_s: float) -> None:
        reduction.end_s = end_s
        for worker, since_s, instruction in self._waiting.pop((stage, round_index), ()):
            end_here_s = max(end_s, since_s) + self._host_s(instruction)
            self._push(end_here_s, worker, (since_s, instruction, reduction.all_joined_s))

    def _group(self, stage: int) -> tuple[Sequence[Bucket], range, str, str]:
        """Return what is summed up, among whom, in which way, and the kind of bytes it is."""
        if stage == _EVERY_STAGE:
            return _NORM, range(self._pipeline.num_workers), ALL_REDUCE, CONTROL
        sync = self._pipeline.sync
        return self._costs.stages[stage].buckets, self._pipeline.workers_of(stage), sync, SYNCS[sync].kind

    def _wait_for_reduction(
        self, worker: int, stage: int, instruction: Instruction, now_s: float
    ) -> tuple[float, float] | None:
        key = (stage, instruction.number)
        reduction = self._reductions[key]
        reduction.waits_left -= 1
        if reduction.waits_left == 0:
            del self._reductions[key]
        if reduction.end_s is None:
            self._waiting.setdefault(key, []).append((worker, now_s, instruction))
            return None
        return reduction.end_s, reduction.all_joined_s

    def _set_out(self, worker: int, push: Instruction, now_s: float) -> float:
        """Let gradients set out for the server; return the seconds that sending them keeps the worker."""
        host, num_bytes = self._pipeline.workers_of(push.stage)[0], self._weight_bytes(push.stage)
        self._server.outstanding.add(worker)
        arrival_s, kept_s = now_s, 0.0
        if worker != host:
            kind, label = SYNCS[self._pipeline.sync].kind, f"push {push.number}"
            arrival_s = self._network.send(kind, label, worker, host, num_bytes, now_s)
            kept_s = self._costs.host.message(num_bytes)
        self._push(arrival_s, -1, partial(self._arrived, worker, push), _NETWORK_FIRST)
        return kept_s

    def _arrived(self, worker: int, push: Instruction, now_s: float) -> Iterable[Event]:
        self._server.there[push.number] = (worker, push)
        self._apply(now_s)
        return ()

    def _apply(self, now_s: float) -> None:
        """Let the server begin with the pushes whose turn it is, one after the other."""
        server = self._server
        while (minibatch := server.turns.next_of(server.there)) is not None:
            worker, push = server.there.pop(minibatch)
            server.free_s = max(server.free_s, now_s) + self._costs.stages[push.stage].update_s
            self._push(server.free_s, -1, partial(self._applied, worker, push), _NETWORK_FIRST)

    def _applied(self, worker: int, push: Instruction, now_s: float) -> Iterable[Event]:
        """An update is made: whoever waits for it gets the weights."""
        server = self._server
        server.applied += 1
        server.outstanding.discard(worker)
        self.end_s = max(self.end_s, now_s)
        yield Event(now_s, now_s, worker, push)
        for puller, (since_s, pull) in list(server.pulling.items()):
            if server.answers(puller, pull):
                del server.pulling[puller]
                self._push(self._hand_out(puller, pull, now_s), puller, (since_s, pull, now_s))

    def _hand_out(self, worker: int, pull: Instruction, now_s: float) -> float:
        """Let the newest weights set out for a worker; return when they are there, its own part done."""
        host, num_bytes = self._pipeline.workers_of(pull.stage)[0], self._weight_bytes(pull.stage)
        if worker == host:
            return now_s
        kind, label = SYNCS[self._pipeline.sync].kind, f"pull {pull.number}"
        arrival_s = self._network.send(kind, label, host, worker, num_bytes, now_s)
        return max(arrival_s, now_s) + self._costs.host.message(num_bytes)

    def _weight_bytes(self, stage: int) -> int:
        return sum(bucket.num_bytes for bucket in self._costs.stages[stage].buckets)

    def _deadlock(self) -> str:
        pipeline = self._pipeline
        receiving = [
            (pipeline.worker(stage, unit), *waiting) for (_, unit, _, stage), waiting in sorted(self._receiving.items())
        ]
        reducing = [waiter for _, waiters in sorted(self._waiting.items()) for waiter in waiters]
        pulling = [(worker, *waiting) for worker, waiting in self._server.pulling.items()]
        stuck = [
            f"worker {worker} ({pipeline.worker_names[worker]}) waits in {instruction} since {since_s:g} s"
            for worker, since_s, instruction in (*receiving, *reducing, *pulling)
        ]
        return "the schedule deadlocks:\n  " + "\n  ".join(stuck)


def _backward_s(costs: StageCosts, op: Op, size: int) -> float:
    """Return the seconds of a backward, or of a part of one."""
    if op is Op.BACKWARD:
        return costs.backward_s[size]
    return costs.weight_s[size] if op is Op.BACKWARD_WEIGHT else costs.backward_s[size] - costs.weight_s[size]
