"""The schedule: what every worker does, in which order, as data.

A schedule is a pure function of the pipeline's shape and of how many minibatches run until the next drain. It knows
no model, no time and no tensor; simulator, engines, pictures and tests all read it.

Units. What travels is a unit: a minibatch, or one microbatch of it. Units are numbered so that unit u runs on replica
u mod r of every stage, forward and backward alike (1F1B-RR, PipeDream section 3.2). Microbatches of the minibatches
of one block (as many as the least common multiple of the replica counts) are interleaved to keep that true.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipebench.schedule.instructions import Instruction, Op
from pipebench.schedule.modes import ALL_FORWARDS
from pipebench.schedule.short_group import short_group_orders


@dataclass(frozen=True)
class Edge:
    """Values go from a stage to a later one; `has_gradient` tells whether gradients come back."""

    source: int
    target: int
    has_gradient: bool = True


def chain(num_stages: int) -> tuple[Edge, ...]:
    """Return the edges of a pipeline without skip connections."""
    return tuple(Edge(stage, stage + 1) for stage in range(num_stages - 1))


@dataclass(frozen=True)
class Pipeline:
    """The shape of a pipeline and its order of work.

    Attributes:
        replicas: replicas per stage; workers are numbered stage by stage.
        edges: which stages exchange values.
        order: `all-forwards` or `1f1b`.
        flushes: whether every update empties the pipeline.
        depth: minibatches in flight per input-stage replica (1F1B only).
        microbatches: units per minibatch.
        accumulate: blocks of minibatches per flush.
        loads: stages that read fields of the dataset.
        shares_norm: whether all stages agree on the gradient's global norm before an update (clipping in flushing
            modes).
    """

    replicas: tuple[int, ...]
    edges: tuple[Edge, ...]
    order: str
    flushes: bool
    depth: int
    microbatches: int = 1
    accumulate: int = 1
    loads: tuple[int, ...] = (0,)
    shares_norm: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.replicas)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return sum(self.replicas)

    @cached_property
    def block(self) -> int:
        """Minibatches that give every replica of every stage equally many: lcm of the replica counts."""
        return math.lcm(*self.replicas)

    @cached_property
    def warmups(self) -> tuple[int, ...]:
        """Depth d_s of every stage: how many units a replica runs forward before its first backward.

        d_s = min(ceil(sum of r_t for t >= s, over r_s), 1 + floor((d_t - 1) r_t / r_s) for t < s), d_0 = depth:
        the second bound is what the stages before can have sent while they wait for the first backward.
        """
        depths = [self.depth]
        for stage in range(1, self.num_stages):
            r = self.replicas[stage]
            bounds = [1 + (depths[t] - 1) * self.replicas[t] // r for t in range(stage)]
            depths.append(min(math.ceil(sum(self.replicas[stage:]) / r), *bounds))
        return tuple(depths)

    def worker(self, stage: int, unit: int) -> int:
        """Return the worker that runs a unit at a stage."""
        return sum(self.replicas[:stage]) + unit % self.replicas[stage]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Stage and replica index of every worker."""
        return tuple((stage, replica) for stage, r in enumerate(self.replicas) for replica in range(r))

    def minibatch(self, unit: int) -> tuple[int, int]:
        """Return the minibatch (numbered since the drain) and the microbatch that a unit is."""
        block, within = divmod(unit, self.block * self.microbatches)
        microbatch, position = divmod(within, self.block)
        return block * self.block + position, microbatch

    def units(self, minibatch: int) -> list[int]:
        """Return the units of a minibatch, in order of microbatches."""
        block, position = divmod(minibatch, self.block)
        start = block * self.block * self.microbatches + position
        return [start + index * self.block for index in range(self.microbatches)]

    def round_minibatches(self, stage: int, round_index: int, num_minibatches: int) -> range:
        """Return the minibatches whose mean gradient is one update of a stage; the last round may be short."""
        size = self.round_size(stage)
        return range(round_index * size, min((round_index + 1) * size, num_minibatches))

    def round_size(self, stage: int) -> int:
        """Return how many minibatches one update of a stage averages over."""
        return self.block * self.accumulate if self.flushes else self.replicas[stage]

    def label(self, unit: int) -> str:
        """Return a unit's short name: `3`, or `3.1` for microbatch 1 of minibatch 3."""
        minibatch, microbatch = self.minibatch(unit)
        return f"{minibatch}.{microbatch}" if self.microbatches > 1 else str(minibatch)


def noam(replicas: Sequence[int]) -> int:
    """Return NOAM = ceil(workers / replicas of the input stage), PipeDream section 3.2."""
    return math.ceil(sum(replicas) / replicas[0])


def programs(pipeline: Pipeline, num_minibatches: int) -> list[Iterator[Instruction]]:
    """Return every worker's list of instructions for `num_minibatches` minibatches between two drains, lazily."""
    return [
        (_flushing if pipeline.flushes else _without_flush)(pipeline, stage, replica, num_minibatches)
        for stage, replica in pipeline.places
    ]


def forward_programs(pipeline: Pipeline, num_minibatches: int) -> list[Iterator[Instruction]]:
    """Return every worker's list for an evaluation: forwards only, whole minibatches dealt round-robin."""

    def program(stage: int, replica: int) -> Iterator[Instruction]:
        for unit in range(replica, num_minibatches, pipeline.replicas[stage]):
            yield from _forward(pipeline, stage, unit)

    return [program(stage, replica) for stage, replica in pipeline.places]


def _without_flush(p: Pipeline, stage: int, replica: int, num_minibatches: int) -> Iterator[Instruction]:
    """1F1B-RR: warm up, then one forward and one backward in turn; every round of backwards is an update."""
    r = p.replicas[stage]
    units = range(replica, num_minibatches, r)
    for forward, unit in _one_f_one_b(units, p.warmups[stage]):
        if forward:
            yield from _forward(p, stage, unit)
        else:
            yield from _backward(p, stage, unit, unit // r)
            yield from _update(p, stage, unit // r)
    if num_minibatches % r > 0 and replica >= num_minibatches % r:  # the last round is short and has no unit for us
        yield from _update(p, stage, num_minibatches // r, idle=True)


def _flushing(p: Pipeline, stage: int, replica: int, num_minibatches: int) -> Iterator[Instruction]:
    """Group after group: all its units forward and backward, then one update."""
    group_size = p.block * p.accumulate
    for group in range(math.ceil(num_minibatches / group_size)):
        minibatches = range(group * group_size, min((group + 1) * group_size, num_minibatches))
        every_unit = sorted(unit for minibatch in minibatches for unit in p.units(minibatch))
        units = [unit for unit in every_unit if unit % p.replicas[stage] == replica]
        if p.order == ALL_FORWARDS:
            steps = [(True, unit) for unit in units] + [(False, unit) for unit in reversed(units)]
        elif len(minibatches) == group_size:
            steps = list(_one_f_one_b(units, p.warmups[stage]))
        else:
            worker = sum(p.replicas[:stage]) + replica
            steps = short_group_orders(p.replicas, p.warmups, every_unit)[worker]
        last = len(steps) - 1
        for position, (forward, unit) in enumerate(steps):
            if forward:
                yield from _forward(p, stage, unit)
            else:
                yield from _backward(p, stage, unit, group if position == last else -1)
        yield from _update(p, stage, group, idle=not units)


def _one_f_one_b(units: Sequence[int], warmup: int) -> Iterator[tuple[bool, int]]:
    """Yield (is it a forward, unit): `warmup` forwards, then backward and forward in turn, then backwards."""
    for unit in units[:warmup]:
        yield True, unit
    for position, unit in enumerate(units):
        yield False, unit
        if position + warmup < len(units):
            yield True, units[position + warmup]


def _forward(p: Pipeline, stage: int, unit: int) -> Iterator[Instruction]:
    if stage in p.loads:
        yield Instruction(Op.LOAD_INPUT, unit)
    for edge in p.edges:
        if edge.target == stage:
            yield Instruction(Op.RECEIVE_ACTIVATION, unit, p.worker(edge.source, unit))
    yield Instruction(Op.FORWARD, unit)
    for edge in p.edges:
        if edge.source == stage:
            yield Instruction(Op.SEND_ACTIVATION, unit, p.worker(edge.target, unit))


def _backward(p: Pipeline, stage: int, unit: int, reduce: int) -> Iterator[Instruction]:
    """Gradients that meet come from the last reader first; they leave before any wait, or some plans deadlock."""
    for edge in sorted(p.edges, key=lambda edge: -edge.target):
        if edge.source == stage and edge.has_gradient:
            yield Instruction(Op.RECEIVE_GRADIENT, unit, p.worker(edge.target, unit))
    yield Instruction(Op.BACKWARD, unit, reduce=reduce if p.replicas[stage] > 1 else -1)
    for edge in p.edges:
        if edge.target == stage and edge.has_gradient:
            yield Instruction(Op.SEND_GRADIENT, unit, p.worker(edge.source, unit))


def _update(p: Pipeline, stage: int, round_index: int, *, idle: bool = False) -> Iterator[Instruction]:
    """An idle replica, one without a unit in the round, joins the all-reduce in its wait, with zeros."""
    if p.replicas[stage] > 1:
        yield Instruction(Op.WAIT_ALL_REDUCE, round_index, reduce=round_index if idle else -1)
    if p.shares_norm:
        yield Instruction(Op.WAIT_NORM, round_index)
    yield Instruction(Op.UPDATE, round_index)
