"""The simulator: a discrete-event loop that assigns every instruction of a schedule a start and an end.

It is lazy: events come one by one, each after all that it depends on, so that an engine can execute them as they come.
Ties are broken by (time, priority, counter), so runs are deterministic.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heappushpop
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from pipebench.errors import ScheduleError
from pipebench.model.sampling import Size
from pipebench.schedule.instructions import BACKWARDS, COPIES, Instruction
from pipebench.schedule.operations import COMPUTE, Op, with_role
from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.agenda import WORKERS, Action, Entry
from pipebench.simulate.copies import Copies, Copy
from pipebench.simulate.costs import Costs, StageCosts
from pipebench.simulate.messages import RECEIVES, SENDS, Messages
from pipebench.simulate.network import Network
from pipebench.simulate.reductions import EVERY_STAGE, Reductions, Wait

LATER = -1.0  # returned by a `Play`: the worker continues at once, and the event is reported at the instruction's end


class TimelineEvent(NamedTuple):
    """One executed instruction."""

    start_s: float  # when the worker began it; of a copy, when the copy began
    end_s: float  # when the worker could continue; of a copy, which occupies no worker, its end
    worker: int
    instruction: Instruction
    # Part of a wait in which the message or sum was in transit: communication, not a bubble. Of a copy in: how long a
    # backward waited for it.
    stall_s: float = 0.0


class RunPart(NamedTuple):
    """The segment of a training run that is simulated."""

    first: int  # its first minibatch, counted from the start of the run
    limit: Callable[[], float]  # returns the number of its minibatches, as far as is known
    by_extension: Mapping[str, Any] = MappingProxyType({})  # extensions' parts in it
    # Shortens it to end before a minibatch, which no worker may have started
    end_at: Callable[[int], None] = lambda minibatch: None


# Begins an instruction, given the worker and the time. Returns the seconds that it occupies the worker; `LATER`; or
# None if that isn't known yet, and the worker continues when it is woken.
Play = Callable[[int, Instruction, float], float | None]


class SimulationExtension:
    """What an extension adds to a simulation; made from the simulation."""

    plays: Mapping[Op, Play]  # for its own operations, or in place of those of `Simulation.plays`

    def waiting(self) -> Iterable[tuple[int, float, Instruction]]:
        """Return the workers that wait for the extension, the time since which they wait, and the instruction."""
        return ()


_COMPUTE = (Op.FORWARD, *BACKWARDS)
_LASTS = with_role(COMPUTE)  # after these the other workers continue first, even if they took 0 s


@dataclass(eq=False, repr=False)
class Simulation:
    """Simulates programs with given costs and links; to be iterated over once.

    Raises:
        ScheduleError: workers wait for each other in a circle.
    """

    pipeline: Pipeline
    programs: Sequence[Iterator[Instruction]]  # instructions of every worker
    costs: Costs
    network: Network
    size_of: Callable[[int], Size]  # returns a unit's size, on which its costs depend
    start_s: float = 0.0  # when every worker starts
    part: RunPart | None = None  # None if nothing is trained
    copies: bool = False  # whether layers may swap; set if the pipeline swaps from the start
    evaluates: bool = False  # whether there are forwards only

    def __post_init__(self) -> None:
        pipeline, costs, network, start_s = self.pipeline, self.costs, self.network, self.start_s
        self._made: list[TimelineEvent] = []  # events from actions
        self._reductions = Reductions(pipeline, costs, network, self.wake)
        self.copies |= bool(pipeline.swaps)
        swapped = [stage.swap_bytes for stage in costs.stages]
        self._copies = Copies(swapped, network, self.size_of, pipeline.label, self._copied) if self.copies else None
        self.messages = Messages(pipeline, costs, network, self.size_of, self.wake, copies=self.copies)
        if not self.evaluates:
            self.messages.pace(self._resume)
        self._durations = {op: [_durations(stage, op) for stage in costs.stages] for op in _COMPUTE}
        self.plays: dict[Op, Play] = self._all_plays()
        self._extensions: list[SimulationExtension] = []
        for make in pipeline.hooks("play").values():
            self._extensions.append(make(self))
            self.plays.update(self._extensions[-1].plays)
        # By worker, the times at which the last load ended, and at which the last two loaded inputs were taken
        self._loaders = [(start_s, start_s, start_s)] * len(self.programs)
        self._running = set(range(len(self.programs)))
        self.end_s = start_s
        for worker in range(len(self.programs)):
            self.wake(start_s, worker, None)

    def _all_plays(self) -> dict[Op, Play]:
        return {
            **dict.fromkeys(_COMPUTE, self._compute),
            **dict.fromkeys(SENDS, self.messages.send),
            **dict.fromkeys(RECEIVES, self.messages.receive),
            **dict.fromkeys(COPIES, self._copy),
            Op.LOAD_INPUT: self._load,
            Op.UPDATE: self._update,
            Op.WAIT_ALL_REDUCE: self._wait_all_reduce,
            Op.WAIT_SCATTER: self._wait_all_reduce,
            Op.WAIT_NORM: self._join_and_wait,
            Op.GATHER: self._gather,
            Op.WAIT_GATHER: self._wait_gather,
            Op.FREE: lambda worker, it, now_s: 0.0,
            Op.WAIT_TIED: self._join_and_wait,
        }

    def __iter__(self) -> Iterator[TimelineEvent]:
        """Yield events in an order that respects every dependency."""
        # Names are looked up once, and events made without defaults, because this loop runs for every instruction.
        programs, made, plays, new = self.programs, self._made, self.plays, tuple.__new__
        heap, counter, pop, replace = self.network.agenda.heap, self.network.agenda.counter, heappop, heappushpop
        then: Entry | None = None  # the entry of the worker that has just been simulated
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
                yield new(TimelineEvent, (start_s, now_s, worker, instruction, stall_s))
            for instruction in programs[worker]:
                op = instruction[0]
                lasts_s = plays[op](worker, instruction, now_s)
                if lasts_s is None:
                    break
                if lasts_s == LATER:
                    yield from made
                    made.clear()
                    continue
                yield new(TimelineEvent, (now_s, now_s + lasts_s, worker, instruction, 0.0))
                if lasts_s or op in _LASTS:
                    then = (now_s + lasts_s, WORKERS, next(counter), worker, None)
                    break
            else:
                self._running.discard(worker)
        self._check_ended()

    def wake(self, time_s: float, worker: int, wait: Wait | None) -> None:
        """Schedule a worker to continue at a time."""
        agenda = self.network.agenda
        heappush(agenda.heap, (time_s, WORKERS, next(agenda.counter), worker, wait))

    def until(self, ready_s: float, worker: int, wait: Wait) -> float | None:
        """Return 0 if a wait is over when it begins; else wake the worker at `ready_s` and return None."""
        if ready_s <= wait[0]:
            return 0.0
        self.wake(ready_s, worker, wait)
        return None

    def emit(self, event: TimelineEvent) -> None:
        """Report an event that ends now and isn't of its worker's current instruction."""
        self.end_s = max(self.end_s, event.end_s)
        self._made.append(event)

    def _copied(self, copy: Copy, now_s: float) -> None:
        """Report a copy that has ended, and begin the backward that waits for it."""
        stall_s = 0.0 if copy.waiting is None else now_s - copy.waiting[1]
        self.emit(TimelineEvent(copy.start_s, now_s, copy.worker, copy.instruction, stall_s))
        if copy.waiting is not None:
            self._resume(copy.worker, copy.waiting[0], now_s)

    def _resume(self, worker: int, instruction: Instruction, now_s: float) -> None:
        """Let a worker that was held up play its instruction now."""
        lasts_s = self.plays[instruction.op](worker, instruction, now_s)
        assert lasts_s is not None  # what it waited for has come
        self._made.append(TimelineEvent(now_s, now_s + lasts_s, worker, instruction))
        self.wake(now_s + lasts_s, worker, None)

    def _compute(self, _worker: int, instruction: Instruction, now_s: float) -> float | None:
        """Run a forward, or a backward unless its unit isn't back from the host yet; join the sum of its gradients."""
        if self._copies is not None and self._copies.holds_up(instruction, now_s):
            return None
        op, stage, unit, _, reduce, _, _ = instruction
        lasts_s = self._durations[op][stage][self.size_of(unit)]
        if reduce >= 0:
            self._reductions.join(stage, reduce, now_s, lasts_s, in_part=op is Op.BACKWARD_WEIGHT)
        return lasts_s

    def _update(self, _worker: int, update: Instruction, _now_s: float) -> float:
        return self.costs.stages[update.stage].update_s

    def _copy(self, worker: int, copy: Instruction, now_s: float) -> float:
        """Request a copy, which occupies no worker."""
        assert self._copies is not None
        self._copies.begin(worker, copy, now_s)
        return LATER

    def _wait_all_reduce(self, worker: int, wait: Instruction, now_s: float) -> float | None:
        _, stage, round_index, _, reduce, *_ = wait
        if reduce >= 0:  # this worker ran no backward of the round
            self._reductions.join(stage, round_index, now_s)
        return self._wait(worker, (stage, round_index), wait, now_s)

    def _join_and_wait(self, worker: int, wait: Instruction, now_s: float) -> float | None:
        """Join and wait for the sum of a tie's copies, or of the gradients' norm."""
        if wait.op is Op.WAIT_TIED and self.pipeline.is_sharded:
            return 0.0  # a worker adds the shards of its own copies
        group = wait.peer if wait.op is Op.WAIT_TIED else EVERY_STAGE
        self._reductions.join(group, wait.number, now_s)
        return self._wait(worker, (group, wait.number), wait, now_s)

    def _gather(self, worker: int, gather: Instruction, now_s: float) -> float:
        self._reductions.gather(worker, gather.stage, now_s)
        return 0.0

    def _wait_gather(self, worker: int, wait: Instruction, now_s: float) -> float | None:
        return self._wait(worker, self._reductions.last_gather(worker, wait.stage), wait, now_s)

    def _wait(self, worker: int, key: tuple[int, int], wait: Instruction, now_s: float) -> float | None:
        """Wait for a round of reductions."""
        found = self._reductions.wait(worker, key, wait, now_s)
        if found is None:
            return None
        ready_s, joined_s = found
        return self.until(ready_s, worker, (now_s, wait, joined_s))

    def _load(self, worker: int, load: Instruction, now_s: float) -> float | None:
        """Wait for a unit's inputs.

        A worker has one loader and two buffers: a load starts when the one before has ended and a buffer is free.
        """
        load_s = self.costs.stages[load.stage].load_s[self.size_of(load.number)]
        if self.costs.host.fetches:
            ready_s = now_s + load_s
        else:
            loaded_s, taken_before_s, taken_s = self._loaders[worker]
            ready_s = max(loaded_s, taken_before_s) + load_s
            self._loaders[worker] = (ready_s, taken_s, max(now_s, ready_s))
        return self.until(ready_s, worker, (now_s, load, math.inf))

    def _check_ended(self) -> None:
        """Raise a ScheduleError if a worker still waits."""
        if not self._running:
            return
        waiting = [*self.messages.waiting(), *self._reductions.waiting()]
        waiting += (each for extension in self._extensions for each in extension.waiting())
        stuck = [
            f"worker {worker} ({self.pipeline.worker_names[worker]}) waits in {instruction} since {since_s:g} s"
            for worker, since_s, instruction in waiting
        ]
        raise ScheduleError("the schedule deadlocks:\n  " + "\n  ".join(stuck))


def _durations(costs: StageCosts, op: Op) -> Mapping[Size, float]:
    """Return the seconds of a forward, a backward or a part of one, by size of the unit."""
    if op is Op.BACKWARD_INPUT:
        return {size: seconds - costs.weight_s[size] for size, seconds in costs.backward_s.items()}
    return {Op.FORWARD: costs.forward_s, Op.BACKWARD: costs.backward_s, Op.BACKWARD_WEIGHT: costs.weight_s}[op]
