"""The shape of a pipeline: its stages, their workers, and the numbering and grouping of minibatches.

Units. What travels through the pipeline is a unit: a minibatch, or one microbatch of it. Unit u runs on replica u mod r
of a stage with r replicas, forward and backward (1F1B-RR, PipeDream section 3.2). To keep that true, the microbatches
of the minibatches of one block are interleaved; a block is as many minibatches as the least common multiple of the
replica counts.

Positions. Workers form a row of positions, each with as many workers as its stages have replicas. Which stages are at
which position depends on the order of work, see `placement`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pipebench.hooks import hooks
from pipebench.schedule.placement import places
from pipebench.schedule.syncs import (
    ALL_REDUCE,
    ALL_TO_ALL,
    NOT_SHARDED,
    ORDERED,
    PARAMETER_SERVER,
    PARAMETERS,
    REDUCE_SCATTER,
    RING,
    SYNCS,
    algorithm_of,
)

STASH = "stash"
MOST_BEYOND_NOAM = 1  # extra minibatches in flight, to hide transfers, that a planner may choose
WHOLE, SPLIT = "whole", "split"  # how a backward runs


@dataclass(frozen=True)
class Edge:
    """An edge from a stage to a later one, which reads values of it; `has_gradient`: whether gradients return."""

    source: int
    target: int
    has_gradient: bool = True


def chain(num_stages: int) -> tuple[Edge, ...]:
    """Return the edges of a pipeline without skip connections."""
    return tuple(Edge(stage, stage + 1) for stage in range(num_stages - 1))


@dataclass(frozen=True)
class Pipeline:
    """The shape of a pipeline and its order of work."""

    replicas: tuple[int, ...]  # per stage; workers are numbered position by position
    edges: tuple[Edge, ...]  # stages that exchange values
    order: str  # a name in `orders.ORDERS` or the path of a file
    flushes: bool  # whether every update empties the pipeline
    depth: int  # minibatches in flight per input-stage replica (1F1B only); see `warmups` for the other stages
    microbatches: int = 1  # units per minibatch
    accumulate: int = 1  # blocks of minibatches per flush; without flushes, minibatches of every replica per update
    loads: tuple[int, ...] = (0,)  # stages that read fields of the data set
    shares_norm: bool = False  # whether all stages agree on the gradient's norm before an update, in flushing modes
    weights: str = STASH  # numbering of weight versions, a name in `weights.WEIGHT_POLICIES`
    chunks: int = 1  # stages per worker
    sync: str = ALL_REDUCE  # how replicas of a stage agree, a name in `syncs.SYNCS`
    backward: str = WHOLE  # `whole`, or `split` into an input part, whose gradients are sent at once, and a weight part
    sums: str = RING  # in which order a sum adds the replicas' values, a name in `syncs.SUMS`
    shard: str = NOT_SHARDED  # what replicas of a stage shard, a name in `syncs.SHARDS`
    reshards: bool = True  # whether sharded parameters are freed after a forward, and gathered again for its backward
    swaps: tuple[int, ...] = ()  # stages that swap saved activations to the host between forward and backward
    ties: tuple[tuple[int, ...], ...] = ()  # stages that have copies of the same weights, ascending; see `members`
    extensions: Mapping[str, Any] = field(default_factory=dict, hash=False)  # name to settings of those that are on

    @property
    def is_sharded(self) -> bool:
        """Whether replicas of a stage each step on a shard of its parameters."""
        return self.shard != NOT_SHARDED

    def shards_stage(self, stage: int) -> bool:
        """Return whether a stage is sharded: it has several replicas, each with a shard."""
        return self.is_sharded and self.replicas[stage] > 1

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered before passes, because parameters are sharded."""
        return self.shard == PARAMETERS and self.shards_stage(0)

    @property
    def algorithm(self) -> str:
        """The algorithm by which replicas sum a buffer or, if they are sharded, reduce-scatter and all-gather it."""
        if self.is_sharded:
            return ALL_TO_ALL if self.sums == ORDERED else RING
        return algorithm_of(self.sync, self.sums)

    @property
    def buffer_algorithm(self) -> str:
        """The algorithm by which replicas sum running statistics."""
        return PARAMETER_SERVER if self.sums == ORDERED else ALL_REDUCE

    @property
    def sum_kind(self) -> str:
        """The kind of transfer as which the bytes of a sum of gradients are counted."""
        return REDUCE_SCATTER if self.is_sharded else SYNCS[self.sync].algorithm

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.replicas)

    @property
    def num_positions(self) -> int:
        """Number of positions: the number of stages if each worker has one stage."""
        return len(self.replicas) // self.chunks

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The workers of every stage, in order of its replicas."""
        return places(self.order, self.replicas, self.chunks)

    def is_local(self, source: int, target: int) -> bool:
        """Whether two stages are on the same workers, and exchange values without messages."""
        return self.places[source] == self.places[target]

    @cached_property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self._workers)

    @cached_property
    def block(self) -> int:
        """Minibatches that give every replica of every stage equally many: the lcm of the replica counts."""
        return math.lcm(*self.replicas)

    @property
    def period(self) -> int:
        """Minibatches after which every worker's list repeats, and every stage has made whole updates."""
        return self.block * self.accumulate

    @cached_property
    def warmups(self) -> tuple[int, ...]:
        """Depth d_s of every stage in 1F1B: units that a replica runs forward before its first backward.

        d_s = min(ceil(W_s / r_s), 1 + floor((d_t - 1) r_t / r_s) for t < s), d_0 = depth. W_s is the number of workers
        of stage s and all later stages. For every stage but the last it also includes the input stage's extra
        minibatches, (depth - NOAM) r_0, as if that many workers more preceded the last stage. The second bound is the
        number of units that an earlier stage t can send before its first backward.
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
    def _workers(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every worker, ascending."""
        held: dict[int, list[int]] = {}
        for stage, workers in enumerate(self.places):
            for worker in workers:
                held.setdefault(worker, []).append(stage)
        return tuple(tuple(held[worker]) for worker in range(len(held)))

    def worker(self, stage: int, unit: int) -> int:
        """Return the worker that runs a unit at a stage."""
        return self.places[stage][unit % self.replicas[stage]]

    def members(self, group: int) -> Sequence[int]:
        """Return the workers of a group that sums gradients: a stage, or tie k as group `num_stages` + k."""
        if group < self.num_stages:
            return self.places[group]
        stages = self.ties[group - self.num_stages]
        return tuple(sorted({worker for stage in stages for worker in self.places[stage]}))

    @property
    def tied_groups(self) -> range:
        """The groups that sum a tie's gradients; none if replicas are sharded, since each has a shard of every copy."""
        return range(self.num_stages, self.num_stages + (0 if self.is_sharded else len(self.ties)))

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Return a worker's stages, ascending."""
        return self._workers[worker]

    def replica_of(self, worker: int, stage: int | None = None) -> int:
        """Return a worker's index among the replicas of `stage`, one of its stages; of its first stage if None."""
        return self.places[self._workers[worker][0] if stage is None else stage].index(worker)

    @cached_property
    def worker_names(self) -> tuple[str, ...]:
        """A name per worker: `stage 1`, `stage 0 replica 2`, `stages 0, 4`, `stages 0, 3 replicas 1, 0`."""
        names = []
        for worker in range(self.num_workers):
            stages = self.stages_of(worker)
            name = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
            own = dict.fromkeys(str(self.replica_of(worker, stage)) for stage in stages)
            replicas = f" replica{'s' if len(own) > 1 else ''} {', '.join(own)}"
            names.append(f"{name}{replicas}" if self.replicas[stages[0]] > 1 else name)
        return tuple(names)

    def minibatch(self, unit: int) -> tuple[int, int]:
        """Return a unit's minibatch, counted from the last drain, and its microbatch in that minibatch."""
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
        """Return those of `units`, which ascend, that a worker runs at a stage."""
        r, replica = self.replicas[stage], self.replica_of(worker, stage)
        if isinstance(units, range):
            return units[(replica - units.start) % r :: r]
        return [unit for unit in units if unit % r == replica]

    def round_minibatches(self, stage: int, round_index: int, num_minibatches: int) -> range:
        """Return the minibatches whose mean gradient makes update `round_index` of a stage; the last may be fewer."""
        size = self.round_size(stage)
        return range(round_index * size, min((round_index + 1) * size, num_minibatches))

    def round_size(self, stage: int) -> int:
        """Return how many minibatches one update of a stage averages over."""
        if not SYNCS[self.sync].waits:
            return 1
        return (self.block if self.flushes else self.replicas[stage]) * self.accumulate

    def hooks(self, name: str) -> dict[str, Any]:
        """Return, by extension, the objects that the enabled extensions provide for a hook; see `pipebench.hooks`."""
        synced = SYNCS[self.sync].extension
        return hooks(name, {**dict.fromkeys([synced] if synced else []), **self.extensions})

    def label(self, unit: int) -> str:
        """Return a unit's short name: `3`, or `3.1` for microbatch 1 of minibatch 3."""
        minibatch, microbatch = self.minibatch(unit)
        return f"{minibatch}.{microbatch}" if self.microbatches > 1 else str(minibatch)


def default_microbatches(num_stages: int, minibatch_size: int) -> int:
    """Return the default number of microbatches per minibatch.

    It is the number of stages, so that all work at once, or else the largest smaller one that divides a minibatch.
    """
    return next(count for count in range(num_stages, 0, -1) if minibatch_size % count == 0)


def noam(replicas: Sequence[int]) -> int:
    """Return NOAM = ceil(workers / replicas of the input stage), PipeDream section 3.2."""
    return math.ceil(sum(replicas) / replicas[0])
