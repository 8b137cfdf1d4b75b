"""The simulator for hosts with fewer cores than busy threads, and for workers that share a GPU.

It has the same event loop, with cores or GPUs as shared resources. Computing, updating, loading inputs, and each end of
messages and all-reduces occupy a core per thread. Cores are divided evenly among the threads that need one, as the
kernel does over several time slices (`sharing`). Waiting occupies none. A GPU counts as one core, since kernels of
several processes take turns on it.

Gradients join their reduction at the end of a backward, not during it: on crowded cores an early start gains nothing.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

from pipebench.model.sampling import Size
from pipebench.schedule.instructions import BACKWARDS, Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.agenda import Action
from pipebench.simulate.costs import Costs, HostCosts
from pipebench.simulate.messages import RECEIVES, SENDS
from pipebench.simulate.network import Network
from pipebench.simulate.reductions import Wait
from pipebench.simulate.sharing import Flow, Resource, Uses
from pipebench.simulate.simulation import LATER, Simulation, TimelineEvent

_EXCHANGES = (Op.WAIT_SCATTER, Op.WAIT_GATHER)
_ALONE = 1.0  # the rate of work that has its processor to itself


class _Done(NamedTuple):
    """An instruction whose own work is done."""

    start_s: float
    instruction: Instruction
    sent_s: float  # from when waiting for it counts as a stall


class Crowded(Simulation):
    """A simulation whose workers share the processors of `costs.host.shared`; layers don't move."""

    def __post_init__(self) -> None:
        self._host = self.costs.host
        shared = self._host.shared
        assert shared is not None
        assert not self.copies
        # Host costs are work on shared cores here (`_own_s`), not durations.
        self.costs = replace(self.costs, host=HostCosts())
        super().__post_init__()
        processors = shared.processors or (0,) * len(self.programs)
        resources = {number: Resource(shared.capacity) for number in processors}
        self._uses: list[Uses] = [((resources[number], float(shared.threads)),) for number in processors]

    def __iter__(self) -> Iterator[TimelineEvent]:
        """Yield events in an order that respects every dependency."""
        agenda, made = self.network.agenda, self._made
        while agenda.heap:
            now_s, _, _, worker, payload = heapq.heappop(agenda.heap)
            if worker < 0:
                woken = cast("Action", payload)(now_s)
                yield from made
                made.clear()
                if woken is None:
                    continue
                worker, payload = cast("tuple[int, Wait | _Done]", woken)
            self.end_s = max(self.end_s, now_s)
            if payload is not None:
                done = _Done(*cast("Wait", payload))
                own_s = 0.0 if isinstance(payload, _Done) else self._own_s(done.instruction)
                if own_s > 0:
                    self._work(own_s, worker, done, now_s)
                    continue
                stall_s = now_s - min(now_s, max(done.start_s, done.sent_s))
                yield TimelineEvent(done.start_s, now_s, worker, done.instruction, stall_s)
            yield from self._go_on(worker, now_s)
        self._check_ended()

    def _go_on(self, worker: int, now_s: float) -> Iterator[TimelineEvent]:
        """Execute a worker's instructions until one takes time."""
        for instruction in self.programs[worker]:
            sent_s = math.inf
            if self._copies is not None and self._copies.holds_up(instruction, now_s):
                return
            if self._waits(instruction):
                lasts_s = self.plays[instruction.op](worker, instruction, now_s)
                if lasts_s is None:
                    return
                if lasts_s == LATER:
                    yield from self._made
                    self._made.clear()
                    continue
                sent_s = math.inf if instruction.op in SENDS else now_s  # it was sent before; the stall is the same
            own_s = self._own_s(instruction)
            if own_s > 0:
                self._work(own_s, worker, _Done(now_s, instruction, sent_s), now_s)
                return
            self._end(instruction, now_s)
            yield TimelineEvent(now_s, now_s, worker, instruction)
        self._running.discard(worker)

    def _resume(self, worker: int, instruction: Instruction, now_s: float) -> None:
        """Let a worker that was held up play its instruction now: a backward, or a send, on its cores."""
        if self._waits(instruction):
            lasts_s = self.plays[instruction.op](worker, instruction, now_s)
            assert lasts_s is not None  # what it waited for has come
        self._work(self._own_s(instruction), worker, _Done(now_s, instruction, math.inf), now_s)

    def _waits(self, instruction: Instruction) -> bool:
        """Return whether an instruction is more than work on the worker's own cores."""
        if instruction.op is Op.LOAD_INPUT:
            return not self._host.fetches
        return instruction.op not in self._durations and instruction.op is not Op.UPDATE

    def _own_s(self, instruction: Instruction) -> float:
        """Return an instruction's seconds on the worker's own cores if they are free."""
        op, stage, number, peer, *_ = instruction
        if op in self._durations:
            return self._durations[op][stage][self.size_of(number)]
        costs = self.costs.stages[stage]
        if op is Op.UPDATE:
            return costs.update_s
        if op is Op.LOAD_INPUT:
            return costs.load_s[self.size_of(number)] if self._host.fetches else 0.0
        if op is Op.WAIT_ALL_REDUCE or op in _EXCHANGES:
            num_bytes = sum(bucket.num_bytes for bucket in costs.buckets)
            cost = self._host.exchange if op in _EXCHANGES else self._host.all_reduce
            return cost(num_bytes, self.pipeline.replicas[stage])
        if op is Op.WAIT_TIED:
            num_bytes = self.costs.ties[peer - self.pipeline.num_stages].num_bytes
            return self._host.all_reduce(num_bytes, len(self.pipeline.members(peer)))
        if op not in SENDS and op not in RECEIVES:
            return 0.0
        num_bytes = self.messages.num_bytes(instruction)
        return self._host.message(num_bytes) if num_bytes else 0.0

    def _work(self, own_s: float, worker: int, done: _Done, now_s: float) -> None:
        """Occupy the worker's cores with work of so many seconds at full speed."""
        flow = Flow(own_s, self._uses[worker], cap=_ALONE)
        self.network.sharing.start(flow, now_s)
        self.network.sharing.notify(flow, partial(self._worked, worker, done), now_s)

    def _worked(self, worker: int, done: _Done, now_s: float) -> tuple[int, _Done]:
        """Return the worker that continues now."""
        self._end(done.instruction, now_s)
        return worker, done

    def _end(self, instruction: Instruction, now_s: float) -> None:
        """End an instruction's work: gradients of a backward join their reduction."""
        if instruction.op in BACKWARDS and instruction.reduce >= 0:
            in_part = instruction.op is Op.BACKWARD_WEIGHT
            self._reductions.join(instruction.stage, instruction.reduce, now_s, in_part=in_part)


def simulation_of(
    pipeline: Pipeline,
    programs: Sequence[Iterator[Instruction]],
    costs: Costs,
    network: Network,
    size_of: Callable[[int], Size],
) -> Simulation:
    """Return a simulation with shared processors, if workers share any."""
    made = Simulation if costs.host.shared is None else Crowded
    return made(pipeline, programs, costs, network, size_of)
