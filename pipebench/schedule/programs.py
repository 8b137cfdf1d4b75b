"""The schedule: every worker's list of instructions, as data.

It is a pure function of the pipeline's shape and of the number of minibatches until the next drain, without model, time
or tensors. The simulator, the engines, pictures and tests read it. The order of work gives the passes; this module adds
messages, all-reduces, updates and weight versions.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

from pipebench.errors import ScheduleError
from pipebench.schedule.instructions import COPIES, ENDS, Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.orders import order_of
from pipebench.schedule.passes import COLLECTIVE, Pass, forwards, own_passes, with_copies, with_gathers, with_scatters
from pipebench.schedule.pipeline import SPLIT, Pipeline
from pipebench.schedule.syncs import GRADIENTS, PARAMETERS
from pipebench.schedule.weights import WEIGHT_POLICIES

# Makes an instruction of all seven fields, in half the time of `Instruction(...)`: a schedule has millions.
_instruction = partial(tuple.__new__, Instruction)

# A worker's list of instructions, made lazily part by part.
Parts = Iterator[list[Instruction]]
# Takes the pipeline, a worker, the number of minibatches, the worker's list, and the extension's entry in
# `by_extension`, None without one. Returns the list that the worker executes in place of the given one.
ProgramHook = Callable[[Pipeline, int, int, Parts, Any], Parts]
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})  # no entry for any extension


def programs(
    pipeline: Pipeline, num_minibatches: int, by_extension: Mapping[str, Any] = NOTHING
) -> list[Iterator[Instruction]]:
    """Return every worker's list of instructions between two drains, lazily.

    `by_extension` has, by extension, what its `ProgramHook` needs to know of this segment.
    """
    workers = range(pipeline.num_workers)
    parts = [_program(pipeline, worker, num_minibatches) for worker in workers]
    extended: ProgramHook
    for name, extended in pipeline.hooks("program").items():
        own = by_extension.get(name)
        parts = [extended(pipeline, worker, num_minibatches, parts[worker], own) for worker in workers]
    return [*map(chain.from_iterable, parts)]


def forward_programs(pipeline: Pipeline, num_minibatches: int) -> list[Iterator[Instruction]]:
    """Return every worker's list for an evaluation: forwards only, of whole minibatches, round-robin over replicas."""

    def program(worker: int) -> Iterator[list[Instruction]]:
        stages = {stage: StageProgram(pipeline, stage, worker, 0) for stage in pipeline.stages_of(worker)}
        for stage, op, unit in _evaluated(pipeline, worker, range(num_minibatches)):
            yield [stages[stage].collective(op)] if op in COLLECTIVE else stages[stage].forward(unit, -1)

    return [chain.from_iterable(program(worker)) for worker in range(pipeline.num_workers)]


def _evaluated(p: Pipeline, worker: int, units: range) -> Iterable[Pass]:
    if not p.gathers:
        return forwards(p, worker, units)
    passes = with_gathers(list(forwards(p, worker - p.replica_of(worker), units)), reshards=True)
    return own_passes(p, worker, list(passes), units)


def most_in_flight(pipeline: Pipeline) -> tuple[int, ...]:
    """Return, per stage, the most units that a replica has between their forwards and the ends of their backwards."""
    most = [0] * pipeline.num_stages
    # Without a flush the warm-up ends when every replica has run as many minibatches forward as its depth.
    num_minibatches = pipeline.period if pipeline.flushes else pipeline.block * (pipeline.depth + 1)
    for program in programs(pipeline, num_minibatches):
        in_flight = [0] * pipeline.num_stages
        for op, stage, *_ in program:
            in_flight[stage] += (op is Op.FORWARD) - (op in ENDS)
            most[stage] = max(most[stage], in_flight[stage])
    return tuple(most)


def _program(p: Pipeline, worker: int, num_minibatches: int) -> Iterator[list[Instruction]]:
    """Yield the parts of a worker's list: a pass and its messages each, or updates.

    A stage's update follows the last backward of its round; with flushes, all stages' updates follow at the flush.
    """
    stages = {stage: StageProgram(p, stage, worker, num_minibatches) for stage in p.stages_of(worker)}
    minibatch, swaps = p.minibatch, p.swaps
    for units in between_flushes(p, num_minibatches):
        for stage, op, unit in passes_of(p, worker, units):
            program = stages[stage]
            if op is Op.FORWARD:
                yield program.forward(unit, *program.read(minibatch(unit)[0], unit))
            elif op in COLLECTIVE:
                yield [program.collective(op)]
            elif swaps and op in COPIES:
                yield [Instruction(op, stage, unit)]
            else:
                yield program.backward(op, unit)
                if program.left == 0 and not p.flushes:
                    yield update_of(p, [program])
        if p.flushes:
            for program in stages.values():
                program.check_whole()
            yield update_of(p, [*stages.values()])
    for program in stages.values():
        program.check_whole(num_minibatches)
        if not p.flushes and program.updates * p.round_size(program.stage) < num_minibatches:
            yield update_of(p, [program])  # of the last, short round, in which this worker had no unit
    yield [gathered for program in stages.values() for gathered in program.gathered()]


def passes_of(p: Pipeline, worker: int, units: Sequence[int]) -> Iterable[Pass]:
    """Return a worker's passes between two flushes, with its copies to the host and its collectives."""
    if p.shard in (GRADIENTS, PARAMETERS) and p.shards_stage(0):
        first = list(order_of(p.order).passes(p, worker - p.replica_of(worker), units))
        if p.swaps:
            first = list(with_copies(first, p.swaps))
        if p.gathers:
            first = list(with_gathers(first, reshards=p.reshards))
        return own_passes(p, worker, list(with_scatters(first)), units)
    passes = order_of(p.order).passes(p, worker, units)
    return with_copies(passes, p.swaps) if p.swaps else passes


def forward_units(p: Pipeline, stage: int, worker: int, num_minibatches: int) -> Iterator[int]:
    """Yield a stage's units in the order in which a worker runs them forward, which a file's schedule chooses."""
    for units in between_flushes(p, num_minibatches):
        yield from (unit for each, op, unit in passes_of(p, worker, units) if each == stage and op is Op.FORWARD)


def between_flushes(p: Pipeline, num_minibatches: int) -> Iterator[Sequence[int]]:
    """Yield, for every group of minibatches that ends in a flush, its units; without flushes, all units at once."""
    if not p.flushes:
        yield _units(p, 0, num_minibatches)
        return
    for start in range(0, num_minibatches, p.period):
        yield _units(p, start, min(start + p.period, num_minibatches))


def _units(p: Pipeline, start: int, stop: int) -> Sequence[int]:
    """Return the units of minibatches `start` to `stop`, excluded, ascending; `start` is the first of a block.

    The units of a block's minibatches are interleaved, so those of a part of a block aren't consecutive.
    """
    if p.microbatches == 1 or stop % p.block == 0:
        return range(start * p.microbatches, stop * p.microbatches)
    return sorted(unit for minibatch in range(start, stop) for unit in p.units(minibatch))


def update_of(p: Pipeline, programs: Sequence["StageProgram"]) -> list[Instruction]:
    """Return the updates of a worker's stages at the end of a round, after the waits that they need."""
    instructions = [gathered for program in programs for gathered in program.gathered()]
    # The stages of sharded replicas share one process group, whose collectives all members call in one order. A worker
    # without a unit joins the sums here, so in the order in which the others' backwards start them: last stage first.
    waiting = reversed(programs) if p.is_sharded else programs
    instructions += [instruction for program in waiting for instruction in program.wait()]
    for group, stages in enumerate(p.ties, p.num_stages):
        own = [program for program in programs if program.stage in stages]
        instructions += [Instruction(Op.WAIT_TIED, each.stage, each.updates, group) for each in own[:1]]
    if p.shares_norm:
        instructions.append(Instruction(Op.WAIT_NORM, programs[0].stage, programs[0].updates))
    instructions += [program.update() for program in programs]
    return instructions + [program.gather() for program in programs if program.gathers_updated]


class StageProgram:
    """The instructions of one stage on one of its workers."""

    def __init__(self, p: Pipeline, stage: int, worker: int, num_minibatches: int) -> None:
        self.stage = stage
        self.updates = 0  # made so far
        self._pipeline = p
        self._num_minibatches = num_minibatches
        self._replica, self._replicas = p.replica_of(worker, stage), p.replicas[stage]
        self._policy = WEIGHT_POLICIES[p.weights]
        self._round_size = p.round_size(stage)
        self._units_of_whole = self._own(self._round_size)
        self._ended = 0  # units that have run backward
        self._used: dict[int, int] = {}  # unit in flight to the version that its forward read
        self._bellwether = (-1, 0)  # the last round that has begun here, and the version that its first forward read
        self._to_begin = 0  # units of that round that haven't run forward
        self._next = self._replica  # the worker's next minibatch to run forward
        self._is_sharded = p.shards_stage(stage)
        self.gathers_updated = self._is_sharded and not p.gathers  # whether replicas gather what an update has changed
        self._gathering = False  # whether such a gather has begun and hasn't been waited for
        self._waited = -1  # the last round whose reduction of gradients has been waited for
        self._connected: Pipeline | None = None
        self.connect(p)
        self._begin_round()

    def connect(self, p: Pipeline) -> None:
        """Send, receive and load by the edges and loads of `p` from here on: they change when layers move."""
        if p is self._connected:
            return
        stage, self._connected = self.stage, p
        self._loads = stage in p.loads
        # Stages of one worker exchange values without messages.
        away = [edge for edge in p.edges if not p.is_local(edge.source, edge.target)]
        self._sources = [edge.source for edge in away if edge.target == stage]
        self._targets = [edge.target for edge in away if edge.source == stage]
        # Gradients of several readers arrive from the last one first.
        self._answering = sorted((e.target for e in away if e.source == stage and e.has_gradient), reverse=True)
        self._answered = [edge.source for edge in away if edge.target == stage and edge.has_gradient]

    def read(self, minibatch: int, unit: int) -> tuple[int, int]:
        """Return the version that a unit's forward reads, and how many updates ahead its weights are predicted."""
        policy, p = self._policy, self._pipeline
        version, ahead = policy.version(p, self.stage, minibatch, self.updates), 0
        self._next = minibatch + self._replicas
        if policy.aim is not None:
            round_index = minibatch // p.round_size(self.stage)
            if self._bellwether[0] != round_index:
                # XPipe's bellwether is the round's first unit, whose prediction the round's other units reuse.
                self._bellwether, self._to_begin = (round_index, version), self._own_units(round_index)
            self._to_begin -= 1
            version = self._bellwether[1]
            ahead = policy.aim(p, self.stage, round_index) - version
        self._used[unit] = version
        return version, ahead

    def forward(self, unit: int, version: int, ahead: int = 0) -> list[Instruction]:
        """Return a forward and its messages."""
        stage, made = self.stage, self.gathered()
        if self._loads:
            made.append(_instruction((Op.LOAD_INPUT, stage, unit, -1, -1, -1, 0)))
        for source in self._sources:  # loops: comprehensions would cost lists, and this runs a million times
            made.append(_instruction((Op.RECEIVE_ACTIVATION, stage, unit, source, -1, -1, 0)))
        made.append(_instruction((Op.FORWARD, stage, unit, -1, -1, version, ahead)))
        for target in self._targets:
            made.append(_instruction((Op.SEND_ACTIVATION, stage, unit, target, -1, -1, 0)))
        return made

    def backward(self, op: Op, unit: int) -> list[Instruction]:
        """Return a backward, or a part of it, and its messages.

        The gradient is sent before any wait for a reduction; after it, some replicated plans (1-3-1) would deadlock.
        """
        if op is Op.BACKWARD and self._pipeline.backward == SPLIT:
            return self.backward(Op.BACKWARD_INPUT, unit) + self.backward(Op.BACKWARD_WEIGHT, unit)
        stage, reduce, made = self.stage, -1, []
        if unit not in self._used:
            raise self._wrong(f"runs {self._pipeline.label(unit)} backward before its forward, or twice")
        version, ahead = self._read_again(self._used[unit])
        if op in ENDS:
            del self._used[unit]
            self.left -= 1
            self._ended += 1
            reduce = self.updates if self.left == 0 and self._replicas > 1 else -1
        has_messages = op is not Op.BACKWARD_WEIGHT
        for target in self._answering if has_messages else ():
            made.append(_instruction((Op.RECEIVE_GRADIENT, stage, unit, target, -1, -1, 0)))
        made.append(_instruction((op, stage, unit, -1, reduce, version, ahead)))
        for source in self._answered if has_messages else ():
            made.append(_instruction((Op.SEND_GRADIENT, stage, unit, source, -1, -1, 0)))
        return made

    def check_whole(self, num_minibatches: int | None = None) -> None:
        """Check that each unit ran forward and backward once: of this round, or of all `num_minibatches` if given.

        Raises:
            ScheduleError: the order of work left a unit out or ran one twice. Files are checked when they are read.
        """
        if self._used:
            raise self._wrong(f"runs {self._pipeline.label(min(self._used))} forward, and not backward")
        missing = self.left if num_minibatches is None else self._own(num_minibatches) - self._ended
        if missing:
            raise self._wrong(f"leaves out {missing} of its units" if missing > 0 else f"runs {-missing} units twice")

    def _wrong(self, what: str) -> ScheduleError:
        return ScheduleError(f"order {self._pipeline.order}: stage {self.stage} replica {self._replica} {what}")

    def _read_again(self, version: int) -> tuple[int, int]:
        """Return the version that a backward reads, and by how many updates it is moved; its forward read `version`."""
        policy, newest = self._policy, self.updates
        if policy.stashed:
            return version, 0
        if policy.corrects:
            return newest, version - newest
        return newest, 0 if policy.aim is None else policy.aim(self._pipeline, self.stage, newest) - newest

    def wait(self) -> list[Instruction]:
        """Return the wait for a round's reduction of gradients, if one is due.

        A worker without a unit in the round has no backward to start the reduction, and joins it there with zeros.
        """
        if self._replicas == 1 or self._waited == self.updates:
            return []
        reduce, self._waited = self.updates if self._units_of_round == 0 else -1, self.updates
        op = Op.WAIT_SCATTER if self._is_sharded else Op.WAIT_ALL_REDUCE
        return [Instruction(op, self.stage, self.updates, -1, reduce)]

    def collective(self, op: Op) -> Instruction:
        """Return the instruction of a collective pass."""
        return self.wait()[0] if op is Op.WAIT_SCATTER else Instruction(op, self.stage, self.updates)

    def gather(self) -> Instruction:
        """Return the instruction that starts to gather the weights of the last update."""
        self._gathering = True
        return Instruction(Op.GATHER, self.stage, self.updates - 1)

    def gathered(self) -> list[Instruction]:
        """Return the wait for the gather of the last update's weights, if one has begun."""
        if not self._gathering:
            return []
        self._gathering = False
        return [Instruction(Op.WAIT_GATHER, self.stage, self.updates - 1)]

    def update(self) -> Instruction:
        """Return the update that ends a round, with the oldest version that a later pass of this stage may read."""
        made = self.updates + 1
        oldest = self._bellwether[1] if self._to_begin else made
        if self._next < self._num_minibatches:
            oldest = min(oldest, self._policy.version(self._pipeline, self.stage, self._next, made))
        instruction: Instruction = _instruction((Op.UPDATE, self.stage, self.updates, -1, -1, oldest, 0))
        self.updates = made
        self._begin_round()
        return instruction

    def _begin_round(self) -> None:
        is_whole = (self.updates + 1) * self._round_size <= self._num_minibatches
        self.left = self._units_of_round = self._units_of_whole if is_whole else self._own_units(self.updates)

    def _own_units(self, round_index: int) -> int:
        minibatches = self._pipeline.round_minibatches(self.stage, round_index, self._num_minibatches)
        return self._own(len(minibatches))

    def _own(self, num_minibatches: int) -> int:
        """Return how many units of a round of `num_minibatches` are the worker's."""
        return math.ceil(max(0, num_minibatches - self._replica) / self._replicas) * self._pipeline.microbatches
