"""The shape of a pipeline: its stages, who runs them, and how minibatches are numbered and grouped.

Units. What travels is a unit: a minibatch, or one microbatch of it. Units are numbered so that unit u runs on replica
u mod r of every stage, forward and backward alike (1F1B-RR, PipeDream section 3.2). Microbatches of the minibatches
of one block (as many as the least common multiple of the replica counts) are interleaved to keep that true.

Positions. The workers stand in a row of positions, each with as many workers as its stages have replicas. A stage has a
position to itself, or, with several chunks per worker, shares it: of P positions, stage s stands at position s mod P,
or where the file has it that the order of work is read from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pipebench.hooks import hooks
from pipebench.schedule.csv_form import is_csv, read_csv
from pipebench.schedule.syncs import ALL_REDUCE, SYNCS

STASH = "stash"
MOST_BEYOND_NOAM = 1  # minibatches more in flight that a planner may choose, where they hide transfers
WHOLE, SPLIT = "whole", "split"  # how a backward runs


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
        replicas: replicas per stage; workers are numbered position by position.
        edges: which stages exchange values.
        order: the order of work, a name in `orders.ORDERS` or the path of a file.
        flushes: whether every update empties the pipeline.
        depth: minibatches in flight per input-stage replica (1F1B only); see `warmups` for the other stages.
        microbatches: units per minibatch.
        accumulate: blocks of minibatches per flush; without a flush, minibatches of every replica per update.
        loads: stages that read fields of the dataset.
        shares_norm: whether all stages agree on the gradient's global norm before an update (clipping, or
            loss scaling, in flushing modes).
        weights: how weight versions are numbered, a name in `weights.WEIGHT_POLICIES`.
        chunks: stages per worker.
        sync: how replicas of a stage agree, a name in `syncs.SYNCS`.
        backward: how a backward runs: `whole`, or `split` into its input part, whose gradients leave at once, and its
            weight part.
        swaps: stages that keep a part of what they save of a unit on the host, between its forward and backward.
        extensions: that a recipe has turned on, each with its settings.
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
    weights: str = STASH
    chunks: int = 1
    sync: str = ALL_REDUCE
    backward: str = WHOLE
    swaps: tuple[int, ...] = ()
    extensions: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.replicas)

    @property
    def num_positions(self) -> int:
        """Number of positions, which is that of the stages where each worker has one."""
        return len(self.replicas) // self.chunks

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Position of every stage."""
        if is_csv(self.order):
            return read_csv(self.order).placement
        return tuple(stage % self.num_positions for stage in range(self.num_stages))

    @cached_property
    def _stages_at(self) -> tuple[tuple[int, ...], ...]:
        """Stages of every position, ascending."""
        at: list[list[int]] = [[] for _ in range(self.num_positions)]
        for stage, position in enumerate(self.positions):
            at[position].append(stage)
        return tuple(map(tuple, at))

    @cached_property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self._positions)

    @cached_property
    def block(self) -> int:
        """Minibatches that give every replica of every stage equally many: lcm of the replica counts."""
        return math.lcm(*self.replicas)

    @property
    def period(self) -> int:
        """Minibatches after which the list of every worker repeats itself, and every stage has made whole updates."""
        return self.block * self.accumulate

    @cached_property
    def warmups(self) -> tuple[int, ...]:
        """Depth d_s of every stage in 1F1B: how many units a replica runs forward before its first backward.

        d_s = min(ceil(W_s / r_s), 1 + floor((d_t - 1) r_t / r_s) for t < s), d_0 = depth, where W_s is one for every
        worker from stage s on and, for every stage but the last, what the input stage admits beyond NOAM:
        (depth - NOAM) r_0 more, as if as many workers more stood before the last stage. The second bound is what the
        stages before can have sent while they wait for the first backward.
        """
        beyond = max(0, self.depth - noam(self.replicas)) * self.replicas[0]
        depths = [self.depth]
        for stage in range(1, self.num_stages):
            r = self.replicas[stage]
            admitted = sum(self.replicas[stage:]) + (beyond if stage < self.num_stages - 1 else 0)
            bounds = [1 + (depths[t] - 1) * self.replicas[t] // r for t in range(stage)]
            depths.append(min(math.ceil(admitted / r), *bounds))
        return tuple(depths)

    @cached_property
    def first_workers(self) -> tuple[int, ...]:
        """The worker of every stage's first replica; those of the others follow it."""
        counts = [self.replicas[stages[0]] for stages in self._stages_at]
        starts = [sum(counts[:position]) for position in range(self.num_positions)]
        return tuple(starts[position] for position in self.positions)

    def worker(self, stage: int, unit: int) -> int:
        """Return the worker that runs a unit at a stage."""
        return self.first_workers[stage] + unit % self.replicas[stage]

    def workers_of(self, stage: int) -> range:
        """Return the workers that run a stage, in order of its replicas."""
        first = self.first_workers[stage]
        return range(first, first + self.replicas[stage])

    @cached_property
    def _positions(self) -> tuple[tuple[int, int], ...]:
        """Position and replica index of every worker."""
        counts = (self.replicas[stages[0]] for stages in self._stages_at)
        return tuple((position, replica) for position, r in enumerate(counts) for replica in range(r))

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Return the stages that a worker runs, ascending."""
        return self._stages_at[self._positions[worker][0]]

    def replica_of(self, worker: int) -> int:
        """Return which replica of its stages a worker is."""
        return self._positions[worker][1]

    @cached_property
    def worker_names(self) -> tuple[str, ...]:
        """Return a name per worker: `stage 1`, `stage 0 replica 2` where a stage is replicated, or `stages 0, 4`."""
        names = []
        for worker in range(self.num_workers):
            stages = self.stages_of(worker)
            name = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
            names.append(f"{name} replica {self.replica_of(worker)}" if self.replicas[stages[0]] > 1 else name)
        return tuple(names)

    def minibatch(self, unit: int) -> tuple[int, int]:
        """Return the minibatch (numbered since the drain) and the microbatch that a unit is."""
        if self.microbatches == 1:
            return unit, 0
        block, within = divmod(unit, self.block * self.microbatches)
        microbatch, position = divmod(within, self.block)
        return block * self.block + position, microbatch

    def units(self, minibatch: int) -> list[int]:
        """Return the units of a minibatch, in order of microbatches."""
        block, position = divmod(minibatch, self.block)
        start = block * self.block * self.microbatches + position
        return [start + index * self.block for index in range(self.microbatches)]

    def own_units(self, stage: int, worker: int, units: Sequence[int]) -> Sequence[int]:
        """Return those of the units that a worker runs at a stage; they are ascending."""
        r, replica = self.replicas[stage], self.replica_of(worker)
        if isinstance(units, range):
            return units[(replica - units.start) % r :: r]
        return [unit for unit in units if unit % r == replica]

    def round_minibatches(self, stage: int, round_index: int, num_minibatches: int) -> range:
        """Return the minibatches whose mean gradient is one update of a stage; the last round may be short."""
        size = self.round_size(stage)
        return range(round_index * size, min((round_index + 1) * size, num_minibatches))

    def round_size(self, stage: int) -> int:
        """Return how many minibatches one update of a stage averages over."""
        if not SYNCS[self.sync].waits:
            return 1
        return (self.block if self.flushes else self.replicas[stage]) * self.accumulate

    def hooks(self, name: str) -> dict[str, Any]:
        """Return what the extensions that are on bring for a hook of the core, by extension; see `pipebench.hooks`."""
        synced = SYNCS[self.sync].extension
        return hooks(name, {**dict.fromkeys([synced] if synced else []), **self.extensions})

    def label(self, unit: int) -> str:
        """Return a unit's short name: `3`, or `3.1` for microbatch 1 of minibatch 3."""
        minibatch, microbatch = self.minibatch(unit)
        return f"{minibatch}.{microbatch}" if self.microbatches > 1 else str(minibatch)


def noam(replicas: Sequence[int]) -> int:
    """Return NOAM = ceil(workers / replicas of the input stage), PipeDream section 3.2."""
    return math.ceil(sum(replicas) / replicas[0])
