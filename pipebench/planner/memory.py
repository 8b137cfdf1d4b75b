"""Peak memory of a stage's replica, and the fewest replicas with which a stage fits.

Paper: PipeDream (SOSP'19) section 3.3. With d minibatches in flight a replica keeps

- d weight versions if the mode stashes them, else 1, or 2 in PipeDream-2BW;
- gradients, optimizer state and, in mixed precision, master weights;
- one copy of the parameters that aren't trained, and of buffers;
- the activations of d forwards, and those that one backward recomputes;
- buffers for two transfers in each direction.

In 1F1B-RR at NOAM d is 1 + ceil(R / m), with m replicas and R workers in later stages.

So bytes are linear in d or, with swapping, the minimum of two lines (`activations.on_device`). What m replicas shard
(`parallelism.shard`) adds a term divided by m.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipebench.planner.activations import Floats, on_device
from pipebench.planner.coarsening import MOST_EXACT, cheapest, is_coarsened
from pipebench.planner.cost_models import StageGrid, UnitWork
from pipebench.planner.states import States
from pipebench.schedule.orders import ALL_FORWARDS
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.schedule.programs import most_in_flight
from pipebench.schedule.syncs import GRADIENTS, NOT_SHARDED, PARAMETERS


class Sharded(NamedTuple):
    """Bytes of stages that replicas shard; arrays are [start, stop]."""

    divided: Floats  # divided by the number of replicas, if there are several
    alone: Floats  # instead, if a stage has one replica: at least half of `divided`

    def num_bytes(self, m: Floats | float) -> Floats:
        """Return the bytes of one of m replicas [start, stop]."""
        return np.where(np.asarray(m) > 1, self.divided / m, self.alone)


class MemoryLine(NamedTuple):
    """Bytes of stages as the minimum of lines in d, the units in flight; arrays are [line, start, stop]."""

    constant: Floats  # bytes at d = 0
    each: Floats  # bytes per unit in flight
    sharded: Sharded | None  # in addition; None: nothing is sharded

    def num_bytes(self, in_flight: Floats | int, m: Floats | int) -> Floats:
        """Return the bytes of one of m replicas [start, stop]."""
        lowest: Floats = (self.constant + in_flight * self.each).min(axis=0)
        return lowest if self.sharded is None else lowest + self.sharded.num_bytes(m)


@dataclass(frozen=True)
class MemoryRule:
    """How a mode uses memory, and the limit of a device."""

    limit_bytes: float  # memory of a device
    versions: int | None = None  # weight versions kept; None: one per minibatch in flight
    state_bytes_per_byte: float = 0.0  # optimizer state per byte of the parameters it updates
    in_flight: int | None = None  # units in flight in every stage; None for 1F1B's 1 + ceil(R / m)
    depth_at_most: int | None = None  # upper limit on 1F1B's units in flight, for straight plans shallower than NOAM
    beyond: int = 0  # minibatches above NOAM, summed over the input stage's replicas
    shard: str = NOT_SHARDED  # what a stage's replicas shard, a name in `syncs.SHARDS`
    in_place: bool = False  # whether all stages are on the same workers, so that nothing is sent between them
    masters: bool = False  # whether the optimizer updates master weights, kept besides the versions
    reshards: bool = True  # whether sharded parameters are freed between a forward and its backward
    accumulates: bool = False  # whether an update has several minibatches of a replica
    pushers: int = 0  # replicas that push gradients to the first one without waiting: it may receive all at once

    def num_bytes(self, states: States, start: int, stop: int, in_flight: int, m: int = 1) -> float:
        """Return the peak bytes of one of m replicas of the stage [start, stop)."""
        return float(self.parts(StageGrid(UnitWork(states), np.array([start]), stop)).num_bytes(in_flight, m)[0, 0])

    def beside_activations(self, states: States, start: int, stop: int, m: int = 1) -> tuple[float, float]:
        """Return (constant bytes, bytes per unit in flight) of one of m replicas of a stage without activations."""
        constant, each, sharded = self._beside(StageGrid(UnitWork(states), np.array([start]), stop))
        return float((constant if sharded is None else constant + sharded.num_bytes(m))[0, 0]), float(each[0, 0])

    def whole_bytes(self, groups: Sequence[float], m: int) -> list[float]:
        """Return the bytes per group of layers that are whole beside its shards at the peak of one of m replicas.

        Groups take turns, two neighbours at a time, and each has gradients and, if parameters are sharded, weights.
        Gradients of several minibatches stay whole until the last one's backward. Weights that stay from forward to
        backward are there, at the backward of a group, of all groups before it.

        Args:
            groups: bytes of each group's parameters, in order.
            m: number of replicas.
        """
        if m == 1 or self.shard not in (GRADIENTS, PARAMETERS):
            return [0.0] * len(groups)
        two = transient_bytes(groups, 2)
        gradients = groups if self.accumulates else two
        if self.shard == GRADIENTS:
            return [*gradients]
        if self.reshards or self.accumulates:
            return [sum(pair) for pair in zip(gradients, two if self.reshards else groups, strict=True)]
        most = max(range(len(groups)), key=lambda index: sum(groups[: index + 2]) + groups[index])
        return [size * ((index < most + 2) + (index == most)) for index, size in enumerate(groups)]

    def depth(self, m: int, after: int) -> int:
        """Return the units in flight of a stage with m replicas and `after` workers in later stages."""
        return int(self._depths(np.array(m), np.array(after)))

    def _depths(self, m: Floats, after: Floats) -> Floats:
        """Return `depth` of several stages, [stage]."""
        if self.in_flight is not None:
            return np.full(after.shape, float(self.in_flight))
        depths = np.where(after > 0, 1 + np.ceil((after + self.beyond) / m), 1.0)
        return np.minimum(depths, self.depth_at_most or np.inf)

    def least(self, parts: MemoryLine, after: Floats, at_most: int) -> Floats:
        """Return the fewest replicas with which the stages of a grid with one start fit, or infinity, [stop].

        Args:
            parts: the memory lines of the grid.
            after: workers in later stages, [stop].
            at_most: more replicas than this may be returned as infinity.
        """
        if parts.sharded is not None:
            return self._least_sharded(parts, after, at_most)
        constant, each = parts.constant[:, 0], parts.each[:, 0]
        with np.errstate(all="ignore"):
            room = np.floor((self.limit_bytes - constant) / each)
            room = np.where(each > 0, room, np.where(constant <= self.limit_bytes, np.inf, 0.0)).max(axis=0)
            if self.in_flight is not None:
                return np.where(room >= self.in_flight, 1.0, np.inf)
            if self.depth_at_most is not None:
                room = np.where(room >= self.depth_at_most, np.inf, room)
            needed = np.maximum(np.ceil((after + self.beyond) / (room - 1)), 1.0)
        return np.where(room >= 1, np.where(after == 0, 1.0, np.where(room > 1, needed, np.inf)), np.inf)

    def _least_sharded(self, parts: MemoryLine, after: Floats, at_most: int) -> Floats:
        """Return `least` by bisection: where stages are sharded, no replica holds more if there are more replicas."""

        def fit(m: Floats) -> NDArray[np.bool_]:
            with np.errstate(all="ignore"):
                held: NDArray[np.bool_] = parts.num_bytes(self._depths(m, after), m)[0] <= self.limit_bytes
            return held

        low, high = np.zeros(len(after)), np.full(len(after), float(at_most))
        possible = fit(high)
        while (high - low > 1).any():
            middle = np.ceil((low + high) / 2)
            enough = fit(middle)
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return np.where(possible, high, np.inf)

    def fits(self, parts: MemoryLine, m: int, after: int) -> NDArray[np.bool_]:
        """Return whether stages of m replicas fit, [start, stop].

        `parts` are the stages' memory lines, `after` the workers in later stages.
        """
        return parts.num_bytes(self.depth(m, after), m) <= self.limit_bytes

    def fit_all(self, states: States, stages: Sequence[tuple[int, int, int]], idle: int = 0) -> bool:
        """Return whether every stage (start, stop, replicas) fits; `idle` workers count as those of later stages."""
        after = idle
        for start, stop, replicas in reversed(stages):
            if self.num_bytes(states, start, stop, self.depth(replicas, after), replicas) > self.limit_bytes:
                return False
            after += replicas
        return True

    def parts(self, grid: StageGrid) -> MemoryLine:
        """Return the memory lines of a grid's stages."""
        states, unit = grid.work.states, grid.unit
        constant, stashed, sharded = self._beside(grid)
        constant = constant + grid.sums(states.recomputed_bytes)
        if unit is None:
            resumed, _ = grid.cuts(states.sent_bytes * states.resumes + states.parted_bytes)
            return MemoryLine(constant[None], (stashed + grid.sums(states.saved_bytes) + resumed)[None], sharded)
        lines = on_device(unit.swapped_bytes, unit.forward_s, unit.pcie_bytes_per_s)
        once, each = (np.stack(parts) for parts in zip(*lines, strict=True))
        return MemoryLine(constant + once, stashed + unit.stays_bytes + each, sharded)

    def _beside(self, grid: StageGrid) -> tuple[Floats, Floats, Sharded | None]:
        """Return constant bytes and bytes per unit in flight, both without activations, and what replicas shard."""
        states, (weights, stepped, untrained) = grid.work.states, grid.held
        before, after = grid.cuts(states.sent_bytes * (not self.in_place))
        versions = weights * (self.versions or 0)
        stashed = weights if self.versions is None else 0.0 * weights
        state = self.state_bytes_per_byte + self.masters
        rest = untrained + 2 * (before + after) + self.pushers * weights
        if self.shard == NOT_SHARDED:
            return stepped * (1 + state) + versions + rest, stashed, None
        # The gradient of a shard has the weights' type; only the part that an update reads is converted.
        gradients, gathered = (self.shard in kinds for kinds in ((GRADIENTS, PARAMETERS), (PARAMETERS,)))
        whole = (0.0 if gradients else 1.0) * weights + (0.0 if gathered else 1.0) * versions
        divided = stepped * state + (weights if gradients else 0.0) + (versions if gathered else 0.0)
        return whole + rest, stashed, Sharded(divided, stepped * (1 + state) + versions - whole)


class StraightPlans:
    """The straight plans of a model, over a subset of the places to cut if there are very many."""

    def __init__(self, work: UnitWork, num_workers: int, rule: MemoryRule) -> None:
        states = work.states
        self._states = states.select(cheapest(states, MOST_EXACT)) if is_coarsened(states) else states
        self._num_workers = num_workers
        over, starts = replace(work, states=self._states), range(len(self._states) - 1)
        self._parts = [rule.parts(StageGrid(over, np.array([start]), start + 1)) for start in starts]

    def fits(self, rule: MemoryRule, num_workers: int | None = None) -> bool:
        """Return whether any straight plan on at most `num_workers` (None: all) fits under a rule.

        The rule may differ from that of the constructor in its limit and depths.
        """
        states = self._states
        workers = np.full(len(states), np.inf)  # the fewest from every state to the end of the model
        workers[-1] = 0.0
        for start in reversed(range(len(states) - 1)):
            fits = rule.least(self._parts[start], workers[start + 1 :], 1) <= 1.0
            if not states.is_chain:
                fits &= states.inside[start, start + 1 :]
            workers[start] = np.where(fits, 1.0 + workers[start + 1 :], np.inf).min()
        return bool(workers[0] <= (num_workers or self._num_workers))


@cache
def in_flight_interleaved(order: str, positions: int, chunks: int, num_units: int) -> list[int]:
    """Return the most microbatches in flight per stage of an interleaved pipeline, counted from its schedule.

    A worker's stages peak at different times, so their sum is an upper bound of the worker's memory.

    Args:
        order: the order of work, a name in `schedule.orders`.
        positions: workers that a microbatch passes.
        chunks: stages per worker.
        num_units: microbatches per update.
    """
    num_stages = positions * chunks
    if order == ALL_FORWARDS:
        return [num_units] * num_stages
    pipeline = Pipeline((1,) * num_stages, chain(num_stages), order, True, positions, num_units, chunks=chunks)
    return list(most_in_flight(pipeline))


def transient_bytes(group_bytes: Sequence[float], at_once: int) -> list[float]:
    """Return the bytes per group that count for the peak if groups take turns, `at_once` neighbours at a time."""
    starts = range(max(1, len(group_bytes) - at_once + 1))
    most = max(starts, key=lambda start: sum(group_bytes[start : start + at_once]))
    return [size if most <= index < most + at_once else 0.0 for index, size in enumerate(group_bytes)]
